"""The metrics of a server's frontends as one: what a scrape of any of them shows.

Knows: samples as plain data, how values of several processes become one. Does not know: where they
come from, prometheus_client.

Counters, histograms and summaries are added. What a frontend that has died had counted when it was
last asked stays in the sum, so that no counter goes back.
"""

from collections.abc import Callable, Iterable

import msgspec

from quill.server.telemetry.metric_table import TABLE, Merge

ENGINE_PROCESS = "quill_engine_process_"  # each frontend reports the same process


class Sample(msgspec.Struct, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True):
    """All samples of one metric."""

    name: str
    help: str
    kind: str
    samples: list[Sample]


_RULES: dict[str, Merge] = {row.name: row.merge for row in TABLE if row.merge is not None}
_RULES |= {
    "process_virtual_memory_bytes": "sum",
    "process_resident_memory_bytes": "sum",
    "process_open_fds": "sum",
    "process_start_time_seconds": "min",
}
_MERGES: dict[Merge, Callable[[float, float], float]] = {
    "sum": lambda one, other: one + other,
    "max": max,
    "min": min,
}


def _rule(family: Family) -> Merge:
    if family.name.startswith(ENGINE_PROCESS):
        return "max"
    return _RULES.get(family.name, "max" if family.kind == "gauge" else "sum")


def merge(reports: Iterable[list[Family]]) -> list[Family]:
    """In the order of their first appearance."""
    families: dict[str, Family] = {}
    values: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for family in (each for report in reports for each in report):
        merged = families.setdefault(family.name, Family(family.name, family.help, family.kind, []))
        combine = _MERGES[_rule(family)]
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            known = values.get(key)
            if known is None:
                values[key] = new = Sample(sample.name, sample.labels, sample.value)
                merged.samples.append(new)
            elif sample.name.endswith("_created"):
                known.value = min(known.value, sample.value)
            else:
                known.value = combine(known.value, sample.value)
    return list(families.values())


class MergedMetrics:
    """Of frontends by name."""

    def __init__(self) -> None:
        self._reports: dict[str, list[Family]] = {}
        self._ended: list[Family] = []  # what frontends that died had counted

    def note(self, frontend: str, report: list[Family]) -> None:
        self._reports[frontend] = report

    def forget(self, frontend: str) -> None:
        report = self._reports.pop(frontend, [])
        counted = [
            each
            for each in report
            if each.kind != "gauge" and not each.name.startswith(ENGINE_PROCESS)
        ]
        self._ended = merge((self._ended, counted))

    def merged(self) -> list[Family]:
        return merge((*self._reports.values(), self._ended))
