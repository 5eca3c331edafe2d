"""What Embed and FillMask may be asked, and which field is named when it is something else."""

import dataclasses
from typing import Any

import pytest

from quill.export.bundle.manifest import SpecialTokens
from quill.model.data.tokenizer import ENCODER_SPECIAL_TOKENS, byte_tokenizer
from quill.protos import generation_pb2 as pb
from quill.server.api import messages
from quill.server.errors import InvalidFieldError, UnimplementedError, UnsupportedError
from quill.server.frontend.reader import MAX_INPUTS, MAX_MASKS, Arrival, RequestReader
from quill.server.frontend.served_model import ServedModel
from quill.server.frontend.spec import ParsedRequest
from quill.server.request import PoolingParams
from quill.server.text.tokenizer import Text
from tests.server.running import CONTEXT, make_embedder, make_manifest, make_served
from tests.server.scripted_session import D_MODEL

ARRIVAL = Arrival(request_id="r", deadline_s=None, max_prompt_tokens=150)
TOKENIZER = byte_tokenizer(ENCODER_SPECIAL_TOKENS)
MASK = TOKENIZER.special.mask
assert MASK is not None


def make_encoder(**changes: Any) -> ServedModel:
    special = SpecialTokens(bos=0, eos=1, pad=None, unk=None, mask=MASK)
    manifest = make_manifest(family="encoder", **{"special_tokens": special, **changes})
    return make_served(manifest=manifest, text=Text(TOKENIZER._json, bos=0, eos=1))


EMBEDDER, ENCODER = make_embedder(), make_encoder()


def ids(*values: int) -> pb.TokenIds:
    return pb.TokenIds(ids=values)


def embed(**fields: Any) -> ParsedRequest:
    message = pb.EmbedRequest(**{"inputs": [pb.EmbedInput(text="abc")], **fields})
    return RequestReader(EMBEDDER).read_embed(messages.read_embed(message), ARRIVAL)


def fill(served: ServedModel = ENCODER, **fields: Any) -> ParsedRequest:
    message = pb.FillMaskRequest(**{"text": "a[MASK]b", **fields})
    return RequestReader(served).read_fill_mask(messages.read_fill_mask(message), ARRIVAL)


def reading(parsed: ParsedRequest) -> PoolingParams:
    assert parsed.request.pooling is not None
    return parsed.request.pooling


def entry(**fields: Any) -> dict[str, Any]:
    return {"inputs": [pb.EmbedInput(text="fine"), pb.EmbedInput(**fields)]}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("inputs", {"inputs": []}),
    ("inputs", {"inputs": [pb.EmbedInput(text="a")] * (MAX_INPUTS + 1)}),
    ("inputs[1].input", entry()),
    ("inputs[1].text", entry(text="")),
    ("inputs[1].text", entry(text="x" * (CONTEXT + 1))),
    ("inputs[1].text", entry(text="x" * 151)),  # the key's own limit
    ("inputs[1].text", entry(text="x" * 500_000)),
    ("inputs[1].token_ids", entry(token_ids=ids())),
    ("inputs[1].token_ids", entry(token_ids=ids(1, 257))),
    ("inputs[1].token_ids", entry(token_ids=ids(-1))),
    ("inputs[1].token_ids", entry(token_ids=ids(*[1] * (CONTEXT + 1)))),
    *(
        ("inputs[1].range", entry(text="abc", range=pb.TokenRange(start=start, stop=stop)))
        for start, stop in ((0, 0), (2, 1), (-1, 2), (0, 4), (3, 4))
    ),
    ("pooling", {"pooling": 7}),
    *(("dimensions", {"dimensions": number}) for number in (0, -1, D_MODEL + 1)),
    *(("priority", {"priority": number}) for number in (-11, 11)),
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: str(value)[:60])
def test_what_breaks_a_rule_is_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        embed(**fields)
    assert caught.value.field == field


def test_defaults_are_the_manifests_then_the_plain_mean() -> None:
    asked = embed()
    assert (reading(asked).method, asked.normalize, asked.dimensions) == ("mean", False, None)
    manifest = make_manifest(pooling="last", normalize=True)
    served = dataclasses.replace(EMBEDDER, manifest=manifest)
    message = pb.EmbedRequest(inputs=[pb.EmbedInput(text="abc")])
    asked = RequestReader(served).read_embed(messages.read_embed(message), ARRIVAL)
    assert (reading(asked).method, asked.normalize) == ("last", True)
    message.pooling, message.normalize = pb.POOLING_FIRST, False
    asked = RequestReader(served).read_embed(messages.read_embed(message), ARRIVAL)
    assert (reading(asked).method, asked.normalize) == ("first", False)


def test_texts_may_fill_the_context_and_ranges_are_of_their_tokens() -> None:
    arrival = Arrival(request_id="r", deadline_s=None)
    message = pb.EmbedRequest(
        inputs=[
            pb.EmbedInput(text="x" * CONTEXT),
            pb.EmbedInput(token_ids=ids(5, 6, 7), range=pb.TokenRange(start=1, stop=3)),
        ],
        priority=3,
    )
    request = RequestReader(EMBEDDER).read_embed(messages.read_embed(message), arrival).request
    assert request.pooling is not None
    assert [len(text) for text in request.pooling.texts] == [CONTEXT, 3]
    assert request.pooling.ranges == (range(CONTEXT), range(1, 3))
    assert (request.num_prompt, request.priority) == (CONTEXT + 3, 3)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("input", {"text": None}),
        ("text", {"text": "no mask"}),
        ("text", {"text": "[MASK]" * (MAX_MASKS + 1)}),
        ("text", {"text": "[MASK]" + "x" * CONTEXT}),
        ("token_ids", {"text": None, "token_ids": ids(5, 6)}),
        ("token_ids", {"text": None, "token_ids": ids(999)}),
        ("top_k", {"top_k": 0}),
        ("top_k", {"top_k": 21}),
        ("priority", {"priority": 11}),
    ],
    ids=str,
)
def test_masks_that_break_a_rule_are_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        fill(**fields)
    assert caught.value.field == field


def test_only_the_mask_counts_of_what_a_text_says_of_special_tokens() -> None:
    asked = fill(text="a[MASK]b[SEP]")
    (text,) = reading(asked).texts
    first, *_, last = text
    assert (first, last) == (0, 1)
    assert reading(asked).masks == (2,)
    assert text.count(1) == 1, "the [SEP] that was written is five letters"
    assert asked.request.prompt_logprobs == asked.prompt_logprobs == 5
    by_ids = fill(text=None, token_ids=ids(*text), top_k=20)
    assert reading(by_ids) == reading(asked)


def test_models_that_cant_say_so_in_words() -> None:
    message = pb.EmbedRequest(inputs=[pb.EmbedInput(text="abc")])
    old, spec = make_served(), messages.read_embed(message)
    with pytest.raises(UnsupportedError, match="Export the bundle again"):
        RequestReader(old).read_embed(spec, ARRIVAL)
    with pytest.raises(UnsupportedError, match="--device cpu"):
        RequestReader(make_served(device="cuda")).read_embed(spec, ARRIVAL)
    translator = make_served(manifest=make_manifest(family="seq2seq"))
    with pytest.raises(UnimplementedError, match="translation model"):
        RequestReader(translator).read_embed(spec, ARRIVAL)
    with pytest.raises(UnimplementedError, match="only encoders"):
        fill(EMBEDDER)
    no_mask = make_encoder(special_tokens=SpecialTokens(bos=0, eos=1, pad=None, unk=None))
    with pytest.raises(UnsupportedError, match="no head for masked tokens"):
        fill(no_mask)


def test_what_an_encoder_has_is_said_alike_wherever_it_is_said() -> None:
    special = SpecialTokens(bos=0, eos=1, pad=None, unk=None)
    for served, calls in (
        (ENCODER, "Embed and FillMask"),
        (make_encoder(special_tokens=special), "Embed"),
    ):
        spec = messages.read_generate(pb.GenerateRequest(prompt="abc"))
        for read in (RequestReader(served).read_generate, RequestReader(served).read_score):
            with pytest.raises(UnimplementedError, match=f"It has {calls}$"):
                read(spec, ARRIVAL)
        assert messages.model_message(served).HasField("mask_token_id") == ("FillMask" in calls)
