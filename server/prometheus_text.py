"""Reads a page of metrics: Prometheus' text format.

Knows: the format. Does not know: where the page is fetched, what the numbers mean. Imports nothing
but the standard library: clients and load tests read the server's metrics with it.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    name: str
    labels: frozenset[tuple[str, str]]
    value: float


class Samples:
    """One scrape."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def value(self, name: str, **labels: str) -> float:
        """The sum over all label sets that have these labels; 0.0 without any."""
        wanted = labels.items()
        found = self._by_name.get(name, ())
        return sum(sample.value for sample in found if wanted <= sample.labels)

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram's cumulative counts by upper bound; the last bound is infinity."""
        found: dict[float, float] = {}
        for sample in self._by_name.get(f"{name}_bucket", ()):
            bound = float(dict(sample.labels)["le"])
            found[bound] = found.get(bound, 0.0) + sample.value
        return dict(sorted(found.items()))


def read_samples(text: str) -> Samples:
    return Samples(
        Sample(name, frozenset(_LABEL.findall(labels)), float(value))
        for name, labels, value in _LINE.findall(text)
    )
