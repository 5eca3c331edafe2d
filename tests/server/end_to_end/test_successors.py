"""What came after Llama, from a directory of transformers' to the engine: the same greedy tokens.

In a crowd, so that the tokens show two things: the graphs compute what transformers computes, and
nobody's answer depends on the others.
"""

import random
from pathlib import Path

import pytest
import torch

from quill.export.pipeline import ExportOptions, write_bundle
from quill.model.importers.huggingface_directory import read_huggingface
from quill.server.engine.engine import Engine
from quill.server.engine.kv_cache import BlockShape
from quill.server.request import Limits, Request, SamplingParams
from tests.model.huggingface_models import saved
from tests.model.successors import CONTEXT, SUCCESSORS
from tests.operators import OWN
from tests.server.random_requests import Answers, restless_clock, together
from tests.server.tiny_bundle import TinyBundle

pytestmark = pytest.mark.portable

NUM_NEW = 12
LENGTHS = (70, 3, 41, 17, 1)
# With integers, too: all that is between the matrices in one or the other.
IN_INTEGERS = {"gemma 3", "qwen3-moe", "deepseek-v3"}


def requests() -> list[Request]:
    rng = random.Random(3)
    return [
        Request(
            request_id=str(length),
            prompt_ids=tuple(rng.randrange(1, 272) for _ in range(length)),
            sampling=SamplingParams(temperature=0.0),
            max_new_tokens=NUM_NEW,
            logprobs=0,
        )
        for length in LENGTHS
    ]


def answered(bundle: TinyBundle, precision: str, max_num_seqs: int) -> Answers:
    rng, num_blocks = random.Random(max_num_seqs), 4 * CONTEXT // 16
    limits = Limits(max_num_seqs=max_num_seqs, context=CONTEXT, num_blocks=num_blocks)
    session = bundle.session(precision, num_blocks)
    return together(Engine(session, limits, clock=restless_clock(rng)), requests(), rng)


@pytest.mark.parametrize("name", SUCCESSORS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = SUCCESSORS[name]()
    checkpoint = read_huggingface(saved(theirs, tmp_path / "theirs"))
    own = OWN if name in IN_INTEGERS else ()
    wishes = ExportOptions(precisions=("fp32", *own), verify=False)
    manifest = write_bundle(tmp_path / "bundle", checkpoint, wishes)
    bundle = TinyBundle(tmp_path / "bundle", manifest, checkpoint.build())
    block = BlockShape.of(manifest.sizes, manifest.graphs_in("fp32"))
    assert block.num_bytes == 16 * manifest.cache_bytes_per_token("float32")
    found = answered(bundle, "fp32", max_num_seqs=4)
    for request in requests():
        ids_1T = torch.tensor([request.prompt_ids])
        expected = theirs.generate(
            ids_1T, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, use_cache=False
        )
        tokens = [each.token_id for each in found[request.request_id, 0]]
        assert tokens == expected[0, ids_1T.shape[1] :].tolist()
    for precision in own:
        assert answered(bundle, precision, 4) == answered(bundle, precision, 1)
