"""What came after Llama, from a directory of transformers' to the engine: the same greedy tokens.

In a crowd, so that the tokens show two things: the graphs compute what transformers computes, and
nobody's answer depends on the others.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quill.export.pipeline import ExportOptions, write_bundle
from quill.model.importers.huggingface_directory import read_huggingface
from quill.server.client.sync_client import Client
from quill.server.engine.engine import Engine
from quill.server.engine.kv_cache import BlockShape
from quill.server.request import Limits, Request, SamplingParams
from tests.model.huggingface_models import saved
from tests.model.successors import CONTEXT, SUCCESSORS
from tests.operators import OWN
from tests.server.process import server_process
from tests.server.random_requests import Answers, restless_clock, together
from tests.server.tiny_bundle import TinyBundle

pytestmark = pytest.mark.portable

NUM_NEW = 12
LENGTHS = (70, 3, 41, 17, 1)
# With integers, too: all that is between the matrices in one or the other.
IN_INTEGERS = {"gemma 3", "qwen3-moe", "deepseek-v3", "gpt-oss", "lfm2"}


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


def their_answer(theirs: Any, request: Request) -> list[int]:
    ids_1T = torch.tensor([request.prompt_ids])
    answer_1T = theirs.generate(
        ids_1T, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, use_cache=False
    )
    found: list[int] = answer_1T[0, ids_1T.shape[1] :].tolist()
    return found


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
        tokens = [each.token_id for each in found[request.request_id, 0]]
        assert tokens == their_answer(theirs, request)
    for precision in own:
        assert answered(bundle, precision, 4) == answered(bundle, precision, 1)


@pytest.mark.parametrize("name", ["gpt-oss", "lfm2"])
def test_server_process_gives_those_alone_and_batched(tmp_path: Path, name: str) -> None:
    theirs = SUCCESSORS[name]()
    checkpoint = read_huggingface(saved(theirs, tmp_path / "theirs"))
    wishes = ExportOptions(precisions=("fp32",), verify=False)
    write_bundle(tmp_path / "bundle", checkpoint, wishes)
    with (
        server_process(tmp_path / "bundle", tmp_path / "log") as server,
        Client(server.address) as client,
        ThreadPoolExecutor(len(LENGTHS)) as pool,
    ):

        def ask(request: Request) -> list[int]:
            answer = client.generate(
                request.prompt_ids, temperature=0.0, max_new_tokens=NUM_NEW, ignore_eos=True
            )
            return list(answer.sequences[0].token_ids)

        expected = [their_answer(theirs, request) for request in requests()]
        assert [ask(request) for request in requests()] == expected
        assert list(pool.map(ask, requests())) == expected
