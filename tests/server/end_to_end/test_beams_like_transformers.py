"""Import, export, serve: the engine's beams are those of transformers on the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quill.export.pipeline import ExportOptions, write_bundle
from quill.model.importers.huggingface_directory import read_huggingface
from quill.server.loading.engine_factory import open_bundle, open_engine
from quill.server.outputs import FinishEvent, HypothesisEvent
from quill.server.request import BeamParams, Limits, Request
from tests.model.huggingface_models import (
    CONTEXT,
    EOS,
    PAD,
    VOCAB_SIZE,
    llama,
    marian,
    randomised,
    saved,
    their_search,
)

ENDS = frozenset(range(0, VOCAB_SIZE, 2))  # many, so that some answers end
NAMES: dict[str, Any] = {"heuristic": False, "at_once": True, "never": "never"}


def servable_llama() -> Any:
    return randomised(llama(hidden_size=64, num_attention_heads=4), 0.3)


def servable_marian() -> Any:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return marian(d_model=64, activation_function="relu", **heads)


def search(theirs: Any, request: Request) -> list[tuple[tuple[int, ...], float]]:
    assert request.beams is not None
    return their_search(
        theirs,
        request.source_ids or request.prompt_ids,
        ENDS,
        num_beams=request.beams.num_beams,
        num_return_sequences=request.num_sequences,
        length_penalty=request.beams.length_penalty,
        early_stopping=NAMES[request.beams.early_stopping],
        max_new_tokens=request.max_new_tokens,
        min_new_tokens=request.min_new_tokens,
    )


@pytest.mark.parametrize("make", [servable_llama, servable_marian])
def test_imported_model_is_searched_as_transformers_does(tmp_path: Path, make: Any) -> None:
    theirs = make()
    checkpoint = read_huggingface(saved(theirs, tmp_path / "hf"))
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
        expected = search(theirs, request)
        own = [each for each in events if each.request_id == request.request_id]
        found = [each.token_ids for each in own if isinstance(each, HypothesisEvent)]
        assert found == [answer for answer, _ in expected]
        scores = [each.score for each in own if isinstance(each, FinishEvent)]
        assert scores == pytest.approx([score for _, score in expected], abs=1e-4)
        lengths |= {len(answer) for answer, _ in expected}
    assert len(lengths) > 1, "some answers end before others"


def _request(name: str, number: int, translates: bool) -> Request:
    generator = torch.Generator().manual_seed(number)
    ids = tuple(torch.randint(1, PAD, (3 + 4 * number,), generator=generator).tolist())
    beams = BeamParams(
        num_beams=2 + number % 3,
        length_penalty=(1.0, 0.6, 2.0)[number % 3],
        early_stopping=("heuristic", "at_once", "never")[number % 3],
    )
    return Request(
        request_id=name,
        prompt_ids=(PAD,) if translates else ids,
        source_ids=(*ids, EOS) if translates else None,
        beams=beams,
        num_sequences=beams.num_beams,
        max_new_tokens=10,
        min_new_tokens=(0, 0, 4)[number % 3],
        eos_ids=ENDS,
    )
