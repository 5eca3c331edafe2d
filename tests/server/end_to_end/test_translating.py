"""A translation model over the wire: what works as for any model, and what is refused in words."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters
from quill.protos import generation_pb2 as pb
from quill.server.api import messages
from quill.server.client.errors import CallError
from quill.server.client.sync_client import Client
from quill.server.errors import StartError, UnsupportedError
from quill.server.frontend.reader import Arrival, RequestReader
from quill.server.loading.engine_factory import open_bundle, open_engine
from quill.server.request import Limits
from tests.server.running import CONTEXT, make_manifest, make_served, served_bundle
from tests.server.tiny_bundle import EOS, TinyBundle


@pytest.fixture(scope="module")
def client(tiny_translator: TinyBundle) -> Iterator[Client]:
    with served_bundle(tiny_translator.directory) as client:
        yield client


def source_ids(text: str) -> list[int]:
    return [*(byte + 1 for byte in text.encode()), EOS]


def expected(bundle: TinyBundle, text: str, max_new_tokens: int) -> tuple[int, ...]:
    parameters = SamplingParameters(
        temperature=0.0, max_new_tokens=max_new_tokens, stop_ids=frozenset({EOS})
    )
    return generate(bundle.model, [0], parameters, source_ids=source_ids(text)).token_ids


def test_prompt_is_the_source_and_the_answer_is_the_references(
    client: Client, tiny_translator: TinyBundle
) -> None:
    for text in ("a", "Restart the server", "é" * 60):
        answer = client.generate(text, temperature=0, max_new_tokens=12)
        chunks = list(client.stream(text, temperature=0, max_new_tokens=12))
        assert tuple(answer.sequences[0].token_ids) == expected(tiny_translator, text, 12)
        streamed = [token for chunk in chunks for token in chunk.token_ids]
        assert streamed == list(answer.sequences[0].token_ids)
        assert answer.usage.prompt_tokens == len(source_ids(text))
        assert answer.usage.cached_tokens == 0


def test_ids_are_taken_as_they_are_and_several_answers_share_one_source(client: Client) -> None:
    text = client.generate("Stop it", seed=5, max_new_tokens=8, num_sequences=3, logprobs=1)
    ids = client.generate(
        source_ids("Stop it"), seed=5, max_new_tokens=8, num_sequences=3, logprobs=1
    )
    assert [each.token_ids for each in text.sequences] == [each.token_ids for each in ids.sequences]
    assert len({tuple(each.token_ids) for each in text.sequences}) > 1
    for each in text.sequences[1:]:
        alone = client.generate("Stop it", seed=each.seed, max_new_tokens=8)
        assert alone.sequences[0].token_ids == each.token_ids


def test_tokens_of_a_text_are_those_that_the_encoder_reads(client: Client) -> None:
    assert client.tokenize("ab") == source_ids("ab")
    assert client.detokenize(source_ids("ab")[:-1]) == "ab"
    model = client.model()
    assert model.family == pb.FAMILY_SEQ2SEQ
    assert model.deterministic is False, "the tiny bundle was exported without measuring it"


def test_a_source_begins_as_the_model_learnt_it(
    tiny_translator: TinyBundle, tmp_path: Path
) -> None:
    bundle = shutil.copytree(tiny_translator.directory, tmp_path / "bundle")
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["special_tokens"]["source_bos"] = 7
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with served_bundle(bundle) as client:
        assert client.tokenize("ab") == [7, *source_ids("ab")]


def test_a_source_fills_the_context_and_no_more(client: Client) -> None:
    most = client.model().context
    assert client.generate([5] * most, max_new_tokens=1).usage.prompt_tokens == most
    with pytest.raises(CallError, match=f"has {most + 1} tokens") as caught:
        client.generate([5] * (most + 1))
    assert caught.value.field == "prompt_ids"


@pytest.mark.parametrize(
    ("field", "options"),
    [("echo", {"echo": True}), ("prompt_logprobs", {"prompt_logprobs": 0})],
)
def test_what_only_a_continued_text_has_is_refused(
    client: Client, field: str, options: dict[str, Any]
) -> None:
    with pytest.raises(CallError, match=f"^{field} is set; a translation") as caught:
        client.generate("ab", **options)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.field == field


def test_nothing_to_translate_is_refused(client: Client) -> None:
    with pytest.raises(CallError, match="prompt has 0 tokens"):
        client.generate("")


def test_scoring_is_not_offered_and_messages_are_refused(client: Client) -> None:
    with pytest.raises(CallError, match="can't score") as caught:
        client.score("ab")
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(CallError, match="translates, so it can't take messages") as caught:
        client.generate([{"role": "user", "content": "hello"}])
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_messages_are_refused_even_with_a_template() -> None:
    served = make_served(manifest=make_manifest(family="seq2seq"))
    conversation = pb.Conversation(messages=[pb.Message(role="user", content="hello")])
    spec = messages.read_generate(pb.GenerateRequest(messages=conversation))
    with pytest.raises(UnsupportedError, match="translates"):
        RequestReader(served).read_generate(spec, Arrival(request_id="r", deadline_s=None))
    assert served.context == CONTEXT


def test_bundle_that_names_no_first_token_is_refused(tiny_translator: TinyBundle) -> None:
    bundle = open_bundle(tiny_translator.directory, "fp32")
    special = dataclasses.replace(bundle.manifest.special_tokens, bos=None)
    manifest = dataclasses.replace(bundle.manifest, special_tokens=special)
    limits = Limits(max_num_seqs=1, context=8, num_blocks=2)
    with pytest.raises(StartError, match="begin after"):
        open_engine(dataclasses.replace(bundle, manifest=manifest), limits)
