"""Slots in a device's memory, with the CPU in the part of the device.

The CUDA provider copies an input when it is bound and doesn't look at it again. A decoder that
does the same stands in for it here; everything else is what runs on a GPU.
"""

import ctypes
import math
import random
from typing import Any

import numpy as np
import onnx
import pytest

from quill.export.precisions import Device
from quill.server.engine.engine import Engine
from quill.server.errors import StartError
from quill.server.request import Beams, Request, Sampling
from quill.server.runtime.copy_graph import identity_graph, input_name, output_name
from quill.server.runtime.device_slots import DeviceSlots
from quill.server.runtime.model_runner import OrtSession
from quill.server.runtime.onnx_session import SessionSettings, cuda_problem, open_graph
from quill.server.runtime.prefix_cache import PrefixCache
from quill.server.runtime.slots import Slots, SlotShape
from quill.server.scheduler.limits import Limits
from quill.server.scheduler.plan import Copy
from tests.server.random_requests import Answers, restless_clock, together
from tests.server.tiny_bundle import CONTEXT, TinyBundle

ONE_THREAD = SessionSettings(num_threads=1, spinning=False)
NUM_SLOTS = 4
VOCAB_SIZE = 512


class CopyingBinding:
    """Keeps inputs as they were when they were bound; all but caches."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        self.bind_output = binding.bind_output
        self._kept: dict[str, Any] = {}

    def bind_input(self, name: str, *place: Any) -> None:
        device, device_id, number_type, shape, address = place
        if not name.startswith("past_"):
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


def _session(bundle: TinyBundle, precision: str, slots: type, device: Device = "cpu") -> OrtSession:
    graphs = bundle.manifest.graphs_in(precision)
    shape = SlotShape.of(bundle.manifest.sizes, CONTEXT, graphs.cache_type)
    decoder: Any = open_graph(bundle.directory / graphs.decoder, ONE_THREAD, device)
    if slots is DeviceSlots:
        copying = CopyingDecoder(decoder) if device == "cpu" else decoder
        memory = DeviceSlots(NUM_SLOTS, shape, device)
        return OrtSession(copying, memory, VOCAB_SIZE, pad=False)
    return OrtSession(decoder, Slots(NUM_SLOTS, shape), VOCAB_SIZE, pad=False)


def _requests(rng: random.Random) -> list[Request]:
    """Prompts in several chunks, answers that share a prompt, and rows that end early."""
    return [
        Request(
            request_id=str(number),
            prompt_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))),
            sampling=Sampling(temperature=rng.choice([0.0, 1.0])),
            seed=number,
            max_new_tokens=rng.randint(1, 12),
            num_sequences=rng.choice([1, 1, 3]),
            logprobs=2,
        )
        for number in range(16)
    ]


def _answers(session: OrtSession, requests: list[Request]) -> Answers:
    rng = random.Random(1)
    limits = Limits(max_rows=NUM_SLOTS, context=CONTEXT)
    engine = Engine(session, limits, PrefixCache(0), clock=restless_clock(rng))
    return together(engine, requests, rng)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_device_slots_give_the_tokens_of_slots(tiny_for_both: TinyBundle, precision: str) -> None:
    requests = _requests(random.Random(0))
    expected = _answers(_session(tiny_for_both, precision, Slots), requests)
    assert _answers(_session(tiny_for_both, precision, DeviceSlots), requests) == expected


def test_beams_on_device_slots_are_those_on_slots(tiny_for_both: TinyBundle) -> None:
    """Their copies leave positions alone that both slots have; a whole slot must do as well."""
    request = Request(
        request_id="r",
        prompt_ids=(1, 2, 3),
        max_new_tokens=20,
        num_sequences=3,
        beams=Beams(num_beams=3),
        logprobs=0,
    )
    expected = _answers(_session(tiny_for_both, "fp32", Slots), [request])
    assert _answers(_session(tiny_for_both, "fp32", DeviceSlots), [request]) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logits_are_those_of_the_cpu(tiny_for_both: TinyBundle, device: Device) -> None:
    if device == "cuda" and (problem := cuda_problem()):
        pytest.skip(problem)
    steps = []
    for session in (
        _session(tiny_for_both, "fp16", Slots),
        _session(tiny_for_both, "fp16", DeviceSlots, device),
    ):
        session.prefill(1, 0, [1, 2, 3], [])
        session.copy(Copy(1, 0, 3))
        session.prefill(1, 3, [4, 5], [1])
        steps.append([session.decode([6, 7], [3, 5]).copy() for _ in range(2)])
    plain, on_device = np.array(steps)
    assert np.abs(plain - on_device).max() < (0.1 * plain.std() if device == "cuda" else 1e-9)


def test_decoder_that_copies_is_wrong_without_device_slots(tiny_for_both: TinyBundle) -> None:
    """So the tests above would notice a number that isn't bound for every step."""
    session = _session(tiny_for_both, "fp32", Slots)
    stale = OrtSession(
        CopyingDecoder(session._decoder),
        session._slots,
        VOCAB_SIZE,
        pad=False,
    )
    first = stale.decode([1], [0]).copy()
    assert np.array_equal(stale.decode([2], [1]), first)
    assert not np.array_equal(session.decode([2], [1]), first)


def test_whole_slot_is_copied_and_no_other_touched() -> None:
    slots = DeviceSlots(3, SlotShape(1, 2, 8, 4, "float16"), "cpu")
    values = [cache._value.numpy() for cache in slots.caches()]
    for place, value in enumerate(values):
        value[0] = place + 1
    slots.copy(Copy(0, 2, 5))
    slots.copy(Copy(1, 0, 0))
    assert [value[:, 0, 0, 0].tolist() for value in values] == [[1, 0, 1], [2, 0, 2]]
    assert all((value[2] == value[0]).all() for value in values)


def test_graph_of_copies_is_sound_and_copies() -> None:
    """As many as SmolLM2 has caches: lengths need more than one byte then."""
    model = identity_graph(60)
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    session = open_graph(model, ONE_THREAD)
    inputs = {input_name(i): np.full(i, i, np.uint8) for i in range(60)}
    outputs = session.run([output_name(i) for i in range(60)], inputs)
    assert [list(output) for output in outputs] == [[i] * i for i in range(60)]


def test_memory_that_is_not_there_says_what_to_lower() -> None:
    with pytest.raises(StartError, match=r"GB of memory on cpu.* Lower --max-slots or --context"):
        DeviceSlots(10**12, SlotShape(1, 2, 128, 16, "float16"), "cpu")
