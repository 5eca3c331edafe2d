"""Token statistics for Locust's page: time to first token, gaps, tokens a second.

Knows: Locust's events, how a tab is added to its page. Does not know: users, requests.
Locust counts every event as a request, and its value as milliseconds. So only streams are events;
these numbers are kept beside Locust's and are part of the reports of a worker to its master.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flask import Response, request
from locust.env import Environment
from locust.runners import WorkerRunner

from quill.loadtest.workload.records import RequestRecord

KEY = "quill-tokens"
ALL = "Aggregated"
PERCENTILES = (50, 95, 99)
_STEP = math.log(1.01)  # a bucket is so much wider than the one below: times are known to 1%
_LEAST_MS = 0.1  # tokens that came together have no gap between them

console = logging.getLogger("locust.stats_logger")  # where Locust's own summary goes


def buckets(values_ms: Iterable[float]) -> Counter[int]:
    """Milliseconds, of which only percentiles are needed: as many as come, in little memory."""
    return Counter(round(math.log(max(ms, _LEAST_MS)) / _STEP) for ms in values_ms)


def percentile(times: Counter[int], percent: int) -> float | None:
    due = times.total() * percent / 100
    for bucket in sorted(times):
        due -= times[bucket]
        if due <= 0:
            return math.exp(bucket * _STEP)
    return None


class NameStats(NamedTuple):
    """Of all streams of one name. Locust's messages carry it as it is."""

    numbers: Counter[str]  # of streams and tokens
    first_token: Counter[int]  # buckets
    gap: Counter[int]
    finish_reasons: Counter[str]

    @classmethod
    def empty(cls) -> "NameStats":
        return cls(Counter(), Counter(), Counter(), Counter())

    def log(self, record: RequestRecord) -> None:
        first = [] if record.first_token_ms is None else [record.first_token_ms]
        reasons = [record.finish_reason] if record.finish_reason else []
        numbers = {"streams": 1, "tokens": record.num_tokens}
        self.merge((numbers, buckets(first), buckets(record.gaps_ms), Counter(reasons)))

    def merge(self, others: Iterable[Mapping[Any, int]]) -> None:
        counters: tuple[Counter[Any], ...] = self
        for ours, theirs in zip(counters, others, strict=True):
            ours.update(theirs)


def _columns() -> dict[str, str]:
    """The fields of a row and their headings."""
    columns = {"name": "Name", "streams": "# streams", "tokens": "# tokens"}
    columns["tokens_per_s"] = "Tokens/s"
    for kind, title in (("first_token", "First token"), ("gap", "Gap")):
        columns |= {f"{kind}_p{each}": f"{title} p{each} (ms)" for each in PERCENTILES}
    return columns | {"finish_reasons": "Finish reasons"}


COLUMNS = _columns()


class TokenStats:
    """One in each Locust process. The one that has no master has the numbers of all."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._names: dict[str, NameStats] = {}
        events = environment.events
        events.test_start.add_listener(self._clear)
        events.reset_stats.add_listener(self._clear)
        events.report_to_master.add_listener(self._report)
        events.worker_report.add_listener(self._receive)
        events.quitting.add_listener(self._print)
        if environment.web_ui is not None:
            tab = {"title": "Tokens", "key": KEY}
            structure = [{"key": key, "title": title} for key, title in COLUMNS.items()]
            environment.web_ui.template_args["extended_tabs"] = [tab]
            environment.web_ui.template_args["extended_tables"] = [
                {"key": KEY, "structure": structure}
            ]
            assert environment.web_ui.app is not None
            environment.web_ui.app.after_request(self._extend)

    def log(self, record: RequestRecord) -> None:
        self._of(record.scenario).log(record)

    def rows(self) -> list[dict[str, Any]]:
        """One for each name, and one for all together, as Locust's page has it."""
        everything = NameStats.empty()
        for stats in self._names.values():
            everything.merge(stats)
        named = [*sorted(self._names.items()), (ALL, everything)]
        return [self._row(name, stats) for name, stats in named]

    def _row(self, name: str, stats: NameStats) -> dict[str, Any]:
        total = self._environment.stats.total
        elapsed_s = (total.last_request_timestamp or total.start_time) - total.start_time
        row: dict[str, Any] = {
            "name": name,
            "streams": stats.numbers["streams"],
            "tokens": stats.numbers["tokens"],
            "tokens_per_s": round(stats.numbers["tokens"] / elapsed_s, 1) if elapsed_s else 0.0,
        }
        for kind, times in (("first_token", stats.first_token), ("gap", stats.gap)):
            for percent in PERCENTILES:
                time_ms = percentile(times, percent)
                row[f"{kind}_p{percent}"] = None if time_ms is None else round(time_ms, 1)
        reasons = sorted(stats.finish_reasons.items())
        return row | {"finish_reasons": ", ".join(f"{n:,} {reason}" for reason, n in reasons)}

    def _of(self, name: str) -> NameStats:
        return self._names.setdefault(name, NameStats.empty())

    def _clear(self, **_: Any) -> None:
        self._names.clear()

    def _report(self, data: dict[str, Any], **_: Any) -> None:
        data[KEY] = self._names
        self._names = {}

    def _receive(self, data: dict[str, Any], **_: Any) -> None:
        for name, stats in data.get(KEY, {}).items():
            self._of(name).merge(stats)

    def _extend(self, response: Response) -> Response:
        if request.path.endswith("/stats/requests") and response.is_json:
            table = {"key": KEY, "data": self.rows()}
            response.set_data(json.dumps({**response.get_json(), "extended_stats": [table]}))
        return response

    def _print(self, **_: Any) -> None:
        """Below Locust's own summary of a run without a page."""
        options = self._environment.parsed_options
        is_worker = isinstance(self._environment.runner, WorkerRunner)
        if options is None or not options.headless or is_worker or not self._names:
            return
        for row in (COLUMNS, *self.rows()):
            name, *numbers, reasons = ("" if cell is None else cell for cell in row.values())
            cells = "".join(f"{number:>20}" for number in numbers)
            console.info(f"{name:<20}{cells}  {reasons}")
