"""Import, export, serve: the engine's beams are those of transformers on the same weights."""

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from quill.export.pipeline import ExportOptions, write_bundle
from quill.model.importers.huggingface_directory import read_huggingface
from quill.server.loading.engine_factory import open_bundle, open_engine
from quill.server.outputs import FinishEvent, HypothesisEvent
from quill.server.request import BeamParams, Limits, Request

transformers: Any = importlib.import_module("transformers")  # its types are not strict

VOCAB_SIZE, CONTEXT, START, EOS = 300, 64, 299, 0
ENDS = list(range(0, VOCAB_SIZE, 6))  # many, so that some answers end
NAMES: dict[str, Any] = {"heuristic": False, "at_once": True, "never": "never"}


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=START,
        eos_token_id=EOS,
        pad_token_id=START,
    )
    return randomized(transformers.LlamaForCausalLM(config), 0.3)


def marian() -> Any:
    config = transformers.MarianConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        pad_token_id=START,
        eos_token_id=EOS,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
        activation_function="relu",
        scale_embedding=True,
    )
    return randomized(transformers.MarianMTModel(config), 0.2)


def randomized(model: Any, std: float) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_positions" not in name:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise * std + (1.0 if "norm" in name else 0.0))
    return model.eval()


def their_search(theirs: Any, request: Request) -> list[tuple[tuple[int, ...], float]]:
    given = list(request.source_ids or request.prompt_ids)
    assert request.beams is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = theirs.generate(
            torch.tensor([given]),
            attention_mask=torch.ones(1, len(given), dtype=torch.long),
            do_sample=False,
            num_beams=request.beams.num_beams,
            num_return_sequences=request.num_sequences,
            length_penalty=request.beams.length_penalty,
            early_stopping=NAMES[request.beams.early_stopping],
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=request.min_new_tokens,
            eos_token_id=ENDS,
            return_dict_in_generate=True,
            output_scores=True,
        )
    num_before = len(request.prompt_ids)
    answers = [_until_end(each[num_before:]) for each in output.sequences.tolist()]
    return list(zip(answers, output.sequences_scores.tolist(), strict=True))


def _until_end(answer: list[int]) -> tuple[int, ...]:
    ends = [place + 1 for place, token in enumerate(answer) if token in ENDS]
    return tuple(answer[: ends[0]] if ends else answer)


@pytest.mark.parametrize("make", [llama, marian])
def test_imported_model_is_searched_as_transformers_does(tmp_path: Path, make: Any) -> None:
    theirs = make()
    theirs.save_pretrained(tmp_path / "hf")
    checkpoint = read_huggingface(tmp_path / "hf")
    options = ExportOptions(precisions=("fp32",), verify=False)
    write_bundle(tmp_path / "bundle", checkpoint, options)
    bundle = open_bundle(tmp_path / "bundle", "fp32")
    limits = Limits(max_num_seqs=9, context=CONTEXT, num_blocks=200)
    engine = open_engine(bundle, limits, 1)
    requests = [
        _request(str(number), number, theirs.config.is_encoder_decoder) for number in range(8)
    ]
    for request in requests:
        engine.submit(request, 0.0)
    events = list[Any]()
    while not engine.is_idle:
        events += engine.step().events
    lengths = set()
    for request in requests:
        expected = their_search(theirs, request)
        own = [each for each in events if each.request_id == request.request_id]
        found = [each.token_ids for each in own if isinstance(each, HypothesisEvent)]
        assert found == [answer for answer, _ in expected]
        scores = [each.score for each in own if isinstance(each, FinishEvent)]
        assert scores == pytest.approx([score for _, score in expected], abs=1e-4)
        lengths |= {len(answer) for answer, _ in expected}
    assert len(lengths) > 1, "some answers end before others"


def _request(name: str, number: int, translates: bool) -> Request:
    generator = torch.Generator().manual_seed(number)
    ids = tuple(torch.randint(1, START, (3 + 4 * number,), generator=generator).tolist())
    beams = BeamParams(
        num_beams=2 + number % 3,
        length_penalty=(1.0, 0.6, 2.0)[number % 3],
        early_stopping=("heuristic", "at_once", "never")[number % 3],
    )
    return Request(
        request_id=name,
        prompt_ids=(START,) if translates else ids,
        source_ids=(*ids, EOS) if translates else None,
        beams=beams,
        num_sequences=beams.num_beams,
        max_new_tokens=10,
        min_new_tokens=(0, 0, 4)[number % 3],
        eos_ids=frozenset(ENDS),
    )
