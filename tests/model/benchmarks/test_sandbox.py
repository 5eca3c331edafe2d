"""Programs that a model wrote are tested, and those that mean harm do none."""

import os
import socket
import time
from pathlib import Path

import pytest

from quill.model.benchmarks.sandbox import isolation, run_program

TIMEOUT_S = 60.0  # a busy machine needs long to start a process
needs_seccomp = pytest.mark.skipif(
    "seccomp" not in isolation() or "Landlock" not in isolation(),
    reason="this kernel has no Landlock or this processor no table of system calls",
)


def test_a_program_passes_if_it_runs_to_its_end() -> None:
    assert run_program("assert sorted([2, 1]) == [1, 2]", TIMEOUT_S).passed
    failed = run_program("assert 1 == 2, 'wrong'", TIMEOUT_S)
    assert (failed.passed, failed.detail) == (False, "AssertionError: wrong")
    assert "SyntaxError" in run_program("def", TIMEOUT_S).detail


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import os; os._exit(0)", "exit()"])
def test_leaving_early_isnt_passing(leave: str) -> None:
    assert not run_program(f"{leave}\nassert False", TIMEOUT_S).passed


def test_output_isnt_an_answer() -> None:
    forged = """import os
for number in range(3, 60):
    try: os.write(number, b'{"key": ""}')
    except OSError: pass
os._exit(0)"""
    assert not run_program(forged, TIMEOUT_S).passed
    assert run_program("print('x' * 10**7)", TIMEOUT_S).passed


def test_an_endless_program_ends_at_the_deadline() -> None:
    started = time.monotonic()
    assert "not finished" in run_program("while True: pass", 1.0).detail
    assert time.monotonic() - started < 10


def test_memory_is_limited() -> None:
    assert run_program("x = bytearray(3 << 30)", TIMEOUT_S).detail == "MemoryError"


def test_files_are_limited_in_size() -> None:
    program = "open('x', 'wb').write(bytes(2 << 20))"
    assert "File too large" in run_program(program, TIMEOUT_S).detail


def test_a_program_has_a_directory_of_its_own_which_goes() -> None:
    program = "open('x', 'w').write('a')\nassert open('x').read() == 'a'"
    assert run_program(program, TIMEOUT_S).passed
    assert not Path("x").exists()


def test_the_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUILL_API_KEY", "secret")
    assert run_program("import os; assert 'QUILL_API_KEY' not in os.environ", TIMEOUT_S).passed


@needs_seccomp
def test_a_fork_bomb_starts_nothing() -> None:
    assert "not permitted" in run_program("import os\nwhile True: os.fork()", TIMEOUT_S).detail
    program = "import subprocess; subprocess.run(['true'])"
    assert "not permitted" in run_program(program, TIMEOUT_S).detail
    assert not run_program("import threading; threading.Thread(target=int).start()").passed


@needs_seccomp
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = listening.getsockname()
        program = f"import socket; socket.create_connection({place!r}, 1)"
        assert "not permitted" in run_program(program, TIMEOUT_S).detail
        listening.settimeout(0)
        with pytest.raises(BlockingIOError):
            listening.accept()


@needs_seccomp
def test_files_outside_are_neither_written_nor_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    for program in (
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({str(secret)!r}, 'a')",
        f"open({str(secret)!r}).read()",
        f"import os; os.remove({str(secret)!r})",
        f"import os; os.rename({str(secret)!r}, 'x')",
        f"import os; os.mkdir({str(tmp_path / 'new')!r})",
        f"import os; os.truncate({str(secret)!r}, 0)",
        f"import os; os.chmod({str(secret)!r}, 0)",
        f"import os; os.utime({str(secret)!r})",
        "import os; open(f'/proc/{os.getppid()}/environ').read()",
    ):
        assert "PermissionError" in run_program(program, TIMEOUT_S).detail, program
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert secret.read_text() == "x"


@needs_seccomp
def test_other_processes_get_no_signals_and_no_limits() -> None:
    limits = "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (9, 9))"
    for program in (
        "os.kill(os.getppid(), 9)",
        f"os.killpg({os.getpgid(0)}, 9)",
        limits,
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    ):
        outcome = run_program(f"import os, resource; {program}", TIMEOUT_S)
        assert "not permitted" in outcome.detail, program


@needs_seccomp
def test_a_program_cant_lift_its_limits() -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    assert not run_program(program, TIMEOUT_S).passed
