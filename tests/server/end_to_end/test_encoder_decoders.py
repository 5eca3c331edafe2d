"""T5 and BART from transformers' directories to the engine: the same greedy tokens, in a crowd."""

import random
from pathlib import Path

import pytest
import torch

from quill.export.pipeline import ExportOptions, write_bundle
from quill.model.importers.huggingface_directory import read_huggingface
from quill.server.engine.engine import Engine
from quill.server.request import Limits, Request, SamplingParams
from tests.model.huggingface_models import saved
from tests.model.seq2seqs import CONTEXT, SEQ2SEQS, START, source_ids
from tests.operators import OWN
from tests.server.random_requests import Answers, restless_clock, together
from tests.server.tiny_bundle import TinyBundle

NUM_NEW = 20
LENGTHS = (90, 3, 41, 17, 1)


def requests() -> list[Request]:
    return [
        Request(
            request_id=str(length),
            prompt_ids=(START,),
            source_ids=tuple(source_ids(length, seed=length)),
            sampling=SamplingParams(temperature=0.0),
            max_new_tokens=NUM_NEW,
            logprobs=0,
        )
        for length in LENGTHS
    ]


def answered(bundle: TinyBundle, precision: str, max_num_seqs: int) -> Answers:
    rng, num_blocks = random.Random(max_num_seqs), 8 * CONTEXT // 16
    limits = Limits(max_num_seqs=max_num_seqs, context=CONTEXT, num_blocks=num_blocks)
    session = bundle.session(precision, num_blocks)
    return together(Engine(session, limits, clock=restless_clock(rng)), requests(), rng)


@pytest.mark.parametrize("name", SEQ2SEQS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = SEQ2SEQS[name]()
    checkpoint = read_huggingface(saved(theirs, tmp_path / "theirs"))
    own = OWN if name in ("t5", "bart") else ()
    options = ExportOptions(precisions=("fp32", *own), verify=False)
    manifest = write_bundle(tmp_path / "bundle", checkpoint, options)
    bundle = TinyBundle(tmp_path / "bundle", manifest, checkpoint.build())
    found = answered(bundle, "fp32", max_num_seqs=4)
    for request in requests():
        expected = theirs.generate(
            torch.tensor([request.source_ids]),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            use_cache=False,  # transformers' has as many layers as the encoder
        )
        tokens = [each.token_id for each in found[request.request_id, 0]]
        assert tokens == expected[0, 1:].tolist()
    for precision in own:
        assert answered(bundle, precision, 4) == answered(bundle, precision, 1)
