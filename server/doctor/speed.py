"""How fast a bundle's steps are, and how near to what the machine does at most.

Knows: steps, what a step reads and multiplies, peaks. Does not know: whether results are right.
Steps of the model alone: a server also schedules, samples and writes text.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from quill.export.precisions import Device
from quill.server.doctor.graph_cost import Cost
from quill.server.doctor.peaks import Peaks, Rates
from quill.server.doctor.probe import Probe
from quill.server.engine.kv_cache import BlockShape, DeviceKVCache

NUM_SEQUENCES = (1, 8, 32)
PAST_TOKENS = 64  # of each sequence before a decode step
PREFILLS = (128, 512)
ROUNDS = 6
TURN_S = 0.2  # as many steps as fit into that
CARD_BYTES = 2**29


class Peak(Protocol):
    def measure(self) -> Rates: ...


@dataclass
class Work:
    """One kind of step, and the seconds that it took each time, with what the machine did at most
    then: what a virtual machine can do changes from second to second."""

    name: str
    step: Callable[[], None]
    num_tokens: int
    num_bytes: int
    num_products: int
    num_steps: int = 1  # of a turn
    turns: list[tuple[float, Rates]] = field(default_factory=list)

    def measure(self) -> float:
        start = time.perf_counter()
        for _ in range(self.num_steps):
            self.step()
        return (time.perf_counter() - start) / self.num_steps

    @property
    def seconds(self) -> float:
        return min(seconds for seconds, _ in self.turns)

    @property
    def tokens_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def share_of_reading(self) -> float:
        return median(self.num_bytes / seconds / rates.bytes for seconds, rates in self.turns)

    @property
    def share_of_multiplying(self) -> float | None:
        shares = [
            self.num_products / seconds / rates.products
            for seconds, rates in self.turns
            if rates.products
        ]
        return median(shares) if shares else None


class CardPeak:
    """Of a card's memory, read and written by ONNX Runtime's own copy. How much the card multiplies
    isn't known."""

    def __init__(self, device: Device, num_bytes: int = CARD_BYTES) -> None:
        self._num_bytes = num_bytes
        self._blocks = DeviceKVCache(2, BlockShape("float16", ((num_bytes // 2,),)), device)
        self.measure()  # the first is slower

    def measure(self) -> Rates:
        start = time.perf_counter()
        self._blocks.copy([(0, 1)])
        return Rates(2 * self._num_bytes / (time.perf_counter() - start), 0.0)


def peak_of(device: Device, num_threads: int) -> Peak:
    return Peaks(num_threads) if device == "cpu" else CardPeak(device)


def works_of(probe: Probe, cost: Cost, cache_bytes: int) -> list[Work]:
    """`cache_bytes`: of a token."""
    works = []
    past = min(PAST_TOKENS, probe.short - 1)
    for num in () if probe.is_encoder else NUM_SEQUENCES:
        works.append(
            Work(
                f"decode {num}",
                lambda num=num: probe.decode(num, past),  # type: ignore[misc]
                num,
                cost.weight_bytes + num * past * cache_bytes,
                num * (cost.products_token + cost.products_logit),
            )
        )
    for num in (num for num in PREFILLS if num <= probe.long):
        works.append(
            Work(
                f"prefill {num}",
                lambda num=num: probe.prefill(num),  # type: ignore[misc]
                num,
                cost.weight_bytes,
                num * cost.products_token + (0 if probe.is_encoder else cost.products_logit),
            )
        )
    return works


def measure_speed(works: list[Work], peak: Peak, tell: Callable[[str], None]) -> list[Rates]:
    """In turns: what disturbs the machine disturbs all of them."""
    for work in works:
        work.measure()  # the first step is slower
        work.num_steps = max(1, int(TURN_S / work.measure()))
    before = [peak.measure()]
    for index in range(ROUNDS):
        tell(f"measuring speed, {index + 1} of {ROUNDS}")
        for work in works:
            seconds = work.measure()
            before.append(peak.measure())
            work.turns.append((seconds, best(before[-2:])))
        before += [] if works else [peak.measure()]
    return before


def best(found: Iterable[Rates]) -> Rates:
    return Rates(*map(max, zip(*found, strict=True)))
