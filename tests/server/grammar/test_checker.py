"""The grammar worker: what it accepts, what its limits end, and who waits for it."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quill.server.errors import InvalidFieldError, UnavailableError
from quill.server.grammar.checker import GrammarChecker
from quill.server.request import Constraint
from tests.server.fake_session import VOCAB_SIZE
from tests.server.scripted_session import TIMEOUT_S
from tests.server.small_grammars import EOS, GRAMMARS, small_tokenizer

FINE = Constraint("regex", "[a-f]{4}")
SLOW = [
    Constraint("lark", "start: e\ne: " + " | ".join(["e e", '"a"', *['e "+" e'] * number]))
    for number in (900, 901)
]
ORPHAN = """
import asyncio, os, signal, sys
from pathlib import Path
from quill.server.grammar.checker import GrammarChecker
from quill.server.request import Constraint
checker = GrammarChecker(Path(sys.argv[1]), int(sys.argv[2]), [int(sys.argv[3])])
asyncio.run(checker.check(Constraint("regex", "a"), ""))
print(checker.worker_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("small") / "tokenizer.json"
    path.write_text(small_tokenizer())
    return path


@pytest.fixture(scope="module")
def checker(tokenizer: Path) -> GrammarChecker:
    return GrammarChecker(tokenizer, VOCAB_SIZE, [EOS])


def check(checker: GrammarChecker, constraint: Constraint) -> None:
    asyncio.run(asyncio.wait_for(checker.check(constraint, "somebody"), TIMEOUT_S))


def error_of(checker: GrammarChecker, constraint: Constraint) -> str:
    with pytest.raises(InvalidFieldError) as caught:
        check(checker, constraint)
    assert caught.value.field == constraint.field
    assert not checker.has_passed(constraint)
    return caught.value.reason


def pid_of(checker: GrammarChecker) -> int:
    pid = checker.worker_pid
    assert pid is not None
    return pid


@contextlib.contextmanager
def ending(pid: int) -> Iterator[None]:
    """The process ends within this."""
    descriptor = os.pidfd_open(pid)
    try:
        yield
        ready, _, _ = select.select([descriptor], [], [], TIMEOUT_S)
        assert ready, "the worker doesn't end"
    finally:
        os.close(descriptor)


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.mark.parametrize("name", GRAMMARS)
def test_constraints_that_compile_pass_and_are_remembered(
    checker: GrammarChecker, name: str
) -> None:
    constraint = Constraint(*GRAMMARS[name])
    assert not checker.has_passed(constraint)
    check(checker, constraint)
    assert checker.has_passed(constraint)


def test_worker_starts_with_the_first_constraint_and_stays(tokenizer: Path) -> None:
    own = GrammarChecker(tokenizer, VOCAB_SIZE, [EOS])
    assert own.worker_pid is None
    check(own, FINE)
    pid = pid_of(own)
    check(own, Constraint("regex", "[a-f]{5}"))
    assert pid_of(own) == pid


def test_errors_are_those_of_the_compiler(checker: GrammarChecker) -> None:
    assert "unclosed group" in error_of(checker, Constraint("regex", "a(b"))


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("regex", r"\p{L}?" * 999), "MB to compile"),
    ],
)
def test_constraints_beyond_the_limits_are_rejected_and_harm_nobody(
    checker: GrammarChecker, constraint: Constraint, reason: str
) -> None:
    check(checker, FINE)
    pid = pid_of(checker)
    assert reason in error_of(checker, constraint)
    assert pid_of(checker) == pid, "its child died"
    check(checker, FINE)


def test_worker_that_is_killed_between_two_constraints_is_started_again(
    checker: GrammarChecker,
) -> None:
    check(checker, FINE)
    pid = pid_of(checker)
    with ending(pid):
        os.kill(pid, signal.SIGKILL)
    check(checker, Constraint("regex", "[a-f]{6}"))
    assert pid_of(checker) != pid


def test_constraint_whose_worker_is_killed_is_tried_again(checker: GrammarChecker) -> None:
    check(checker, FINE)
    pid, constraint = pid_of(checker), Constraint("regex", "[a-f]{7}")

    async def kill_meanwhile() -> None:
        checking = asyncio.ensure_future(checker.check(constraint, ""))
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_for, lambda: not checker._queue._turns)
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(checking, TIMEOUT_S)

    os.kill(pid, signal.SIGSTOP)
    asyncio.run(kill_meanwhile())
    assert checker.has_passed(constraint)


def test_death_that_a_constraint_notices_first_is_logged(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quill.server.grammar.checker._Worker._watch", lambda *_: None)
    check(checker, FINE)
    pid = pid_of(checker)
    with ending(pid):
        os.kill(pid, signal.SIGKILL)
    check(checker, Constraint("regex", "[a-f]{8}"))
    assert caplog.text.count("the grammar worker has died") == 1


def test_worker_that_cannot_start_is_an_error_of_the_server(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        check(GrammarChecker(tmp_path / "none.json", VOCAB_SIZE, [EOS]), FINE)


def test_worker_ends_when_its_checker_is_forgotten(tokenizer: Path) -> None:
    own = GrammarChecker(tokenizer, VOCAB_SIZE, [EOS])
    check(own, FINE)
    with ending(pid_of(own)):
        del own


def test_worker_ends_when_its_parent_is_killed(tokenizer: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, str(tokenizer), str(VOCAB_SIZE), str(EOS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with contextlib.suppress(ProcessLookupError), ending(int(done.stdout)):  # or it has already
        pass


def test_constraint_of_another_owner_does_not_wait_for_one_that_takes_long(
    checker: GrammarChecker,
) -> None:
    check(checker, FINE)

    async def beside_others() -> None:
        loop = asyncio.get_running_loop()
        slow = [loop.create_task(checker.check(each, "attacker")) for each in SLOW]
        await asyncio.wait_for(checker.check(Constraint("regex", "[a-f]{8}"), "other"), TIMEOUT_S)
        assert not any(task.done() for task in slow), "the other one waited"
        for task in slow:
            with pytest.raises(InvalidFieldError):
                await asyncio.wait_for(task, TIMEOUT_S)

    asyncio.run(beside_others())
