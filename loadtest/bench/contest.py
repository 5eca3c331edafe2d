"""Lets contenders do the same tasks in turns, and keeps each one's best.

Knows: processes that speak the lines of loadtest/bench/contenders/protocol.py. Does not know: what
is in them.

A machine is slower at one moment than at the next, and everybody should meet the same moments. So
a round lets every contender do a task before anybody does it again, and only one is at work at a
time: before each turn there is a pause in which spinning threads of the one before fall asleep.
"""

import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quill.loadtest.bench.contenders.protocol import About
from quill.loadtest.environment.processes import wait_or_kill
from quill.loadtest.errors import ContenderError

PAUSE_S = 0.3  # OpenMP's threads spin for up to 0.2 s


@dataclass(frozen=True)
class Task:
    """Something to do, and how many tokens it makes or reads."""

    name: str
    order: Mapping[str, Any]
    num_tokens: int


@dataclass
class Result:
    """A contender's best of all rounds."""

    about: About
    speeds: dict[str, float] = field(default_factory=dict)  # tokens a second, by task
    peak_bytes: int = 0
    perplexity: float = math.nan


class Running:
    """One contender's process."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log
        self.about = About(**self._read())

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._gone() from None
        answer = self._read()
        if "error" in answer:
            raise ContenderError(f"{order['do']} failed: {answer['error']}; see {self._log}")
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _gone(self) -> ContenderError:
        command = " ".join(map(str, self._process.args))  # type: ignore[arg-type]
        last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return ContenderError(f"`{command}` ended: {' '.join(last) or 'no word'} ({self._log})")


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[Running]:
    """Starts a contender; ends it, whatever happens."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    try:
        yield Running(process, log)
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        wait_or_kill(process, 5.0)


@contextmanager
def all_running(commands: Sequence[Sequence[str]], logs: Path) -> Iterator[list[Running]]:
    """Several of them, each with a log of its own."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(running(command, logs / f"contender-{number}.log"))
            for number, command in enumerate(commands)
        ]


def contest(
    commands: Sequence[Sequence[str]],
    tasks: Sequence[Task],
    passages: Sequence[Sequence[int]],
    logs: Path,
    num_rounds: int = 5,
    say: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Speeds first, then memory, then perplexity: scoring needs memory that serving doesn't."""
    with all_running(commands, logs) as contenders:
        results = [Result(contender.about) for contender in contenders]
        for number in range(num_rounds):
            say(f"round {number + 1} of {num_rounds}")
            for task in tasks:
                for contender, result in zip(contenders, results, strict=True):
                    _do(contender, result, task)
        for contender, result in zip(contenders, results, strict=True):
            result.peak_bytes = contender.ask({"do": "memory"})["peak_bytes"]
            if passages:
                say(f"perplexity of {result.about.name} {result.about.kind}")
                result.perplexity = _perplexity(contender, passages)
        return results


def _do(contender: Running, result: Result, task: Task) -> None:
    time.sleep(PAUSE_S)
    speed = task.num_tokens / contender.ask(task.order)["seconds"]
    result.speeds[task.name] = max(speed, result.speeds.get(task.name, 0.0))


def _perplexity(contender: Running, passages: Sequence[Sequence[int]]) -> float:
    score = contender.ask({"do": "score", "passages": passages})
    return math.exp(score["nats"] / score["num_tokens"])
