"""Blocks of keys and values, in the processor's memory and in a device's.

The CUDA provider copies an input when it is bound and doesn't look at it again. A decoder that
does the same stands in for it here, with the CPU in the part of the device.
"""

import ctypes
import math
import random
from typing import Any

import numpy as np
import onnx
import pytest

from quill.server.engine.engine import Engine
from quill.server.engine.kv_cache import BlockShape, DeviceKVCache, KVCache
from quill.server.engine.model_runner import BlockCopy, OrtSession
from quill.server.errors import StartError
from quill.server.machine.onnx_session import (
    identity_graph,
    input_name,
    open_graph,
    output_name,
)
from quill.server.request import BeamParams, Limits, Request, SamplingParams
from tests.server.random_requests import Answers, restless_clock, together
from tests.server.tiny_bundle import CONTEXT, TinyBundle

NUM_BLOCKS = 64
VOCAB_SIZE = 512


class CopyingBinding:
    """Keeps inputs as they were when they were bound; all but caches."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        self.bind_output = binding.bind_output
        self._kept: dict[str, Any] = {}

    def bind_input(self, name: str, *place: Any) -> None:
        device, device_id, number_type, shape, address = place
        if "_cache_" not in name:
            num_bytes = math.prod(shape) * np.dtype(number_type).itemsize
            self._kept[name] = np.frombuffer(ctypes.string_at(address, num_bytes), np.uint8)
            address = self._kept[name].ctypes.data
        self.binding.bind_input(name, device, device_id, number_type, shape, address)


class CopyingDecoder:
    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def io_binding(self) -> CopyingBinding:
        return CopyingBinding(self._decoder.io_binding())

    def run_with_iobinding(self, binding: CopyingBinding) -> None:
        self._decoder.run_with_iobinding(binding.binding)


def _session(bundle: TinyBundle, on_device: bool) -> OrtSession:
    graphs = bundle.manifest.graphs_in("fp32")
    shape = BlockShape.of(bundle.manifest.sizes, graphs)
    assert graphs.decoder is not None
    decoder: Any = open_graph(bundle.directory / graphs.decoder, "cpu", 1, spinning=False)
    blocks: Any = KVCache(NUM_BLOCKS, shape)
    if on_device:
        decoder, blocks = CopyingDecoder(decoder), DeviceKVCache(NUM_BLOCKS, shape, "cpu")
    return OrtSession(decoder, blocks, bundle.manifest.sizes, gives_hidden=graphs.hidden)


def _requests(rng: random.Random) -> list[Request]:
    """Prompts in several chunks, answers that share a prompt, beams, and rows that end early."""
    return [
        Request(
            request_id=str(number),
            prompt_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))),
            sampling=SamplingParams(temperature=rng.choice([0.0, 1.0])),
            seed=number,
            max_new_tokens=rng.randint(1, 12),
            num_sequences=3 if number % 4 == 0 else 1,
            beams=BeamParams(num_beams=3) if number % 8 == 0 else None,
            logprobs=2,
        )
        for number in range(16)
    ]


def _answers(session: OrtSession, requests: list[Request]) -> Answers:
    rng = random.Random(1)
    limits = Limits(max_num_seqs=4, context=CONTEXT, num_blocks=NUM_BLOCKS)
    return together(Engine(session, limits, clock=restless_clock(rng)), requests, rng)


def test_blocks_on_a_device_give_the_tokens_of_blocks_here(tiny_bundle: TinyBundle) -> None:
    requests = _requests(random.Random(0))
    expected = _answers(_session(tiny_bundle, on_device=False), requests)
    assert _answers(_session(tiny_bundle, on_device=True), requests) == expected


SHAPE = BlockShape(cache_type="float16", sides=((2, 4, 16), (2, 16, 4), (3, 8, 16), (2, 16, 4)))


def test_whole_block_is_copied_and_no_other_touched() -> None:
    here, there = KVCache(3, SHAPE), DeviceKVCache(3, SHAPE, "cpu")
    for blocks in (here, there):
        sides = [_array(view) for view in blocks.views()]
        for number, side in enumerate(sides):
            side[:] = 0
            side[0] = number + 1
        blocks.copy([BlockCopy(0, 2)])
        assert [side[:, 0, 0, 0].tolist() for side in sides] == [[n, 0, n] for n in (1, 2, 3, 4)]
        assert all((side[2] == side[0]).all() for side in sides)


def _array(view: Any) -> Any:
    num_bytes = math.prod(view.shape) * view.number_type.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(view.address)
    return np.frombuffer(memory, view.number_type).reshape(view.shape)


def test_graph_of_copies_is_sound_and_copies() -> None:
    """As many as SmolLM2 has caches: lengths need more than one byte then."""
    model = identity_graph(60)
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    session = open_graph(model, "cpu", 1, spinning=False)
    inputs = {input_name(i): np.full(i, i, np.uint8) for i in range(60)}
    outputs = session.run([output_name(i) for i in range(60)], inputs)
    assert [list(output) for output in outputs] == [[i] * i for i in range(60)]


def test_memory_that_is_not_there_says_what_to_lower() -> None:
    for make in (KVCache, lambda num, shape: DeviceKVCache(num, shape, "cpu")):
        with pytest.raises(StartError, match=r"GB of memory .* can't be had\. Lower --kv-cache-mb"):
            make(10**12, SHAPE)
