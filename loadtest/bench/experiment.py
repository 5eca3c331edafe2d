"""An experiment: backends × workloads × columns, and the one runner for all of them.

Knows: turns, processes with the protocol of bench/backends/protocol.py.
Does not know: any backend or workload.

A machine is slower at one moment than at the next, and all backends should meet the same moments.
So a round lets every backend run a workload before any backend runs it again, one at a time, and
before each turn there is a pause in which spinning threads of the last backend fall asleep.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quill.loadtest.bench.backends.protocol import BackendInfo
from quill.loadtest.environment.process import last_line, stop_process
from quill.loadtest.errors import BackendError

PAUSE_S = 0.3  # OpenMP's threads spin for up to 0.2 s

Turn = dict[str, Any]  # a backend's answer, with `seconds` and `num_tokens` where it has a speed


@dataclass(frozen=True)
class Entry:
    """A backend's process. `options` are added to every order: entries with the same command
    share a process and differ in their options."""

    command: Sequence[str]
    label: str = ""  # empty: the backend's name and kind of weights
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """An order for each round; the last one is repeated where there are more rounds."""

    name: str
    orders: Sequence[Mapping[str, Any]]
    num_tokens: int = 0  # 0: the backend counts them
    once: bool = False  # after all rounds: no speed, or too slow to repeat
    entries: tuple[str, ...] = ()  # labels; empty: all


@dataclass
class Measured:
    """One entry's turns."""

    label: str
    info: BackendInfo
    turns: dict[str, list[Turn]] = field(default_factory=dict)  # by workload
    peak_bytes: int | None = None

    def speeds(self, workload: str) -> list[float]:
        """Tokens a second of every round."""
        turns = self.turns.get(workload, [])
        return [turn["num_tokens"] / turn["seconds"] for turn in turns]

    def speed(self, workload: str) -> float:
        """The best of all rounds; NaN if the workload wasn't run."""
        return max(self.speeds(workload), default=float("nan"))

    def best(self, workload: str) -> Turn:
        """The fastest turn."""
        return min(self.turns[workload], key=lambda turn: turn["seconds"] / turn["num_tokens"])

    def last(self, workload: str) -> Turn:
        return self.turns[workload][-1]

    def num_turns(self, workload: Workload) -> int:
        return len(self.turns.get(workload.name, ()))


Results = Sequence[Measured]


@dataclass(frozen=True)
class Column:
    """A heading, and the cell of a row. Rows are entries, unless the experiment makes others."""

    name: str
    cell: Callable[[Any, Results], str]


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    entries: Sequence[Entry]
    workloads: Sequence[Workload]
    columns: Sequence[Column]
    num_rounds: int = 5
    warm_up: bool = False  # a first round that doesn't count
    rows: Callable[[Results], Sequence[Any]] = lambda results: results
    notes: Callable[[Results], Sequence[str]] = lambda _: ()  # below the table
    problems: Callable[[Results], Sequence[str]] = lambda _: ()  # make the command fail


class BackendProcess:
    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log
        self.info = BackendInfo(**self._read())

    def run(self, order: Mapping[str, Any]) -> Turn:
        assert self._process.stdin is not None
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._read()
        if "error" in answer:
            raise BackendError(f"{order['do']} failed: {answer['error']}; see {self._log}")
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> BackendError:
        command = " ".join(map(str, self._process.args))  # type: ignore[arg-type]
        return BackendError(f"`{command}` ended: {last_line(self._log)} ({self._log})")


@contextmanager
def start_backend(command: Sequence[str], log: Path) -> Iterator[BackendProcess]:
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    try:
        yield BackendProcess(process, log)
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        stop_process(process, 60.0)  # a server drains


class Run(NamedTuple):
    """An entry, its process and its results."""

    entry: Entry
    backend: BackendProcess
    result: Measured


def run_experiment(
    experiment: Experiment,
    earlier: Results = (),
    save: Callable[[Results], None] = lambda _: None,
) -> list[Measured]:
    """All rounds, then memory, then the workloads that run once: scoring needs more memory.

    Turns of earlier results aren't taken again, and entries that have all of them aren't started.
    `save` gets what there is after each round, with the earlier results of other entries.
    """
    repeated = [each for each in experiment.workloads if not each.once]
    num_rounds = experiment.num_rounds if repeated else 0
    results = {each.label: each for each in earlier}
    complete = {each.label for each in earlier if _is_complete(each, experiment)}
    entries = [each for each in experiment.entries if each.label not in complete]
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        runs = [
            run._replace(result=results.setdefault(run.result.label, run.result))
            for run in _start_all(entries, Path(logs), stack)
        ]
        for number in range(-experiment.warm_up, num_rounds):
            _show("warm-up" if number < 0 else f"round {number + 1} of {num_rounds}")
            for workload in repeated:
                waiting = [run for run in runs if run.result.num_turns(workload) <= max(number, 0)]
                _take_turns(waiting, workload, number + experiment.warm_up, counts=number >= 0)
            save([*results.values()])
        for run in runs:
            run.result.peak_bytes = run.backend.run({"do": "memory"})["peak_bytes"]
        for workload in experiment.workloads:
            if workload.once:
                _show(workload.name)
                _take_turns(
                    [run for run in runs if not run.result.num_turns(workload)], workload, 0
                )
        save([*results.values()])
        return [*results.values()]


def _is_complete(result: Measured, experiment: Experiment) -> bool:
    return result.peak_bytes is not None and all(
        result.num_turns(each) >= (1 if each.once else experiment.num_rounds)
        for each in experiment.workloads
        if not each.entries or result.label in each.entries
    )


def _start_all(entries: Sequence[Entry], logs: Path, stack: ExitStack) -> list[Run]:
    """One process for each different command."""
    backends: dict[tuple[str, ...], BackendProcess] = {}
    runs = []
    for number, entry in enumerate(entries):
        command = tuple(entry.command)
        if command not in backends:
            _show(f"starting {entry.label or 'a backend'}")
            started = start_backend(command, logs / f"backend-{number}.log")
            backends[command] = stack.enter_context(started)
        info = backends[command].info
        result = Measured(entry.label or f"{info.name} {info.kind}", info)
        runs.append(Run(entry, backends[command], result))
    return runs


def _take_turns(runs: Sequence[Run], workload: Workload, number: int, counts: bool = True) -> None:
    """One round of a workload. The warm-up doesn't count."""
    order = workload.orders[min(number, len(workload.orders) - 1)]
    defaults = {"num_tokens": workload.num_tokens} if workload.num_tokens else {}
    for entry, backend, result in runs:
        if workload.entries and result.label not in workload.entries:
            continue
        time.sleep(PAUSE_S)
        turn = defaults | backend.run({**order, **entry.options})
        if counts:
            result.turns.setdefault(workload.name, []).append(turn)


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
