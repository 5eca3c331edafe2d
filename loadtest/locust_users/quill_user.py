"""The Locust user that asks what the scenarios say.

Knows: Locust, the schedule of asks. Does not know: scenarios' contents, reports.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import gevent
from gevent.pool import Group
from locust import task
from locust.exception import StopUser

from quill.loadtest.locust_users.collector import Collector
from quill.loadtest.locust_users.stream_user import StreamUser
from quill.loadtest.workload.schedule import Schedule

_IDLE_S = 0.1


class Shared:
    """What this process's users need to find."""

    collector: Collector
    schedule: Schedule
    servers = ExitStack()
    grpc_address: str | None = None  # of a server of our own


class QuillUser(StreamUser):
    """Closed loop: one request after the other. Open loop: the first user starts them all."""

    def on_start(self) -> None:
        self._schedule = Shared.schedule
        self._calls = Group()
        self._is_open = self._schedule.plan.rate > 0
        self._starts: Iterator[float] | None = None
        if self._is_open:
            self._starts = self._schedule.take_arrivals()

    @task
    def next_request(self) -> None:
        if self._is_open and self._starts is None:
            self._rest()
            return
        intended_s = self._wait_for_start()
        index = self._schedule.next_index(intended_s)
        if index is None:
            raise StopUser
        self._schedule.num_running += 1
        if self._is_open:
            self._calls.spawn(self._run, index, intended_s)
        else:
            self._run(index, intended_s)

    def _wait_for_start(self) -> float | None:
        if self._starts is None:
            return None
        intended_s = next(self._starts)
        gevent.sleep(max(0.0, intended_s - time.monotonic()))
        return intended_s

    def _run(self, index: int, intended_s: float | None) -> None:
        schedule = self._schedule
        try:
            ask = schedule.ask(index)
            record = self.generate(ask, ask.kind, index, intended_s, schedule.plan.rate)
            Shared.collector.add(record)
        finally:
            schedule.num_running -= 1

    def _rest(self) -> None:
        if self._schedule.is_over():
            raise StopUser
        gevent.sleep(_IDLE_S)

    def on_stop(self) -> None:
        """An open loop's requests end by themselves, if it isn't Locust that ends them early."""
        if not self._schedule.is_over():
            self._calls.join(timeout=self.environment.stop_timeout)
            self._calls.kill()
        self._calls.join()
        super().on_stop()
