"""Collects the records of all processes of a load test, by Locust's own messages.

Knows: Locust's runners and events. Does not know: users, requests. Runs in Locust processes only.
A worker's records are part of the reports that Locust sends to its master; the last ones come with
the message that it is done. So workers may run on other machines.
"""

import json
import time
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from quill.loadtest.workload.records import RecordFile, RequestRecord, to_row
from quill.loadtest.workload.schedule import PROGRESS, Schedule

DONE = "quill-done"
_POLL_S = 0.05
_PROGRESS_S = 1.0


class Collector:
    """One in each process. Only the one that has no master writes."""

    def __init__(self, environment: Environment, path: Path | None) -> None:
        self._environment = environment
        self._rows: list[dict[str, str]] = []
        self._file = RecordFile(path) if path and not self._is_worker else None
        self._num_parts = 1
        self._num_done = self._num_requests = self._num_tokens = self._num_errors = 0
        self._start_s = time.monotonic()
        self.schedule: Schedule | None = None
        environment.events.report_to_master.add_listener(self._report)
        environment.events.worker_report.add_listener(self._receive)
        if isinstance(environment.runner, MasterRunner):
            environment.runner.register_message(DONE, self._on_done)

    @property
    def _is_worker(self) -> bool:
        return isinstance(self._environment.runner, WorkerRunner)

    def add(self, record: RequestRecord) -> None:
        row = to_row(record)
        if self._is_worker:
            self._rows.append(row)
        else:
            self._write([row])

    def watch(self, schedule: Schedule) -> None:
        """Ends the test when all requests of this process have ended."""
        self.schedule = schedule
        self._start_s = time.monotonic()
        gevent.spawn(self._wait_until_done, schedule)

    def start_workers(self) -> int:
        """Of a master: the number of parts of the load, one for each worker."""
        assert isinstance(self._environment.runner, MasterRunner)
        self._start_s = time.monotonic()
        self._num_parts, self._num_done = self._environment.runner.worker_count, 0
        return self._num_parts

    def print_progress(self) -> None:
        """A line a second, for the process that started this one."""
        while True:
            gevent.sleep(_PROGRESS_S)
            self._print_progress()

    def close(self, **_: Any) -> None:
        if self._file:
            self._file.close()

    def _wait_until_done(self, schedule: Schedule) -> None:
        while self.schedule is schedule and not schedule.is_done():
            gevent.sleep(_POLL_S)
        if self.schedule is not schedule:
            return  # another test has begun
        runner = self._environment.runner
        if isinstance(runner, WorkerRunner):
            # Locust's next report may come too late: the last records go with this message.
            data: dict[str, Any] = {}
            self._environment.events.report_to_master.fire(client_id=runner.client_id, data=data)
            runner.send_message(DONE, data)
        else:
            self._end()

    def _on_done(self, msg: Any, **_: Any) -> None:
        self._environment.events.worker_report.fire(client_id=msg.node_id, data=msg.data)
        self._num_done += 1
        if self._num_done == self._num_parts:
            gevent.spawn(self._end)

    def _end(self) -> None:
        runner, options = self._environment.runner, self._environment.parsed_options
        assert runner is not None
        self._print_progress()
        if options is not None and options.headless:
            runner.quit()
        else:
            # A master that is stopped while its users start would report "running" for good.
            while isinstance(runner, MasterRunner) and not runner.spawning_completed:
                gevent.sleep(_POLL_S)
            runner.stop()

    def _report(self, data: dict[str, Any], **_: Any) -> None:
        data["quill"] = self._take()

    def _receive(self, data: dict[str, Any], **_: Any) -> None:
        self._write(data.get("quill", []))

    def _take(self) -> list[dict[str, str]]:
        rows, self._rows = self._rows, []
        return rows

    def _write(self, rows: list[dict[str, str]]) -> None:
        for row in rows:
            self._num_requests += 1
            self._num_tokens += len(row["token_ids"].split())
            self._num_errors += row["ok"] != "True"
        if self._file:
            self._file.write(rows)

    def _print_progress(self) -> None:
        options, runner = self._environment.parsed_options, self._environment.runner
        if options is None or runner is None or not options.progress:
            return
        progress = {
            "elapsed_s": time.monotonic() - self._start_s,
            "users": runner.user_count,
            "running": self.schedule.num_running if self.schedule else None,
            "requests": self._num_requests,
            "tokens": self._num_tokens,
            "errors": self._num_errors,
        }
        print(PROGRESS + json.dumps(progress), flush=True)
