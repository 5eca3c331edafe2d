"""A program that moves into a session of its own, seen from its parent."""

import subprocess
import sys

import pytest

from tests.server.process import ROOT

HEAD = "import os, signal, sys\nfrom quill.server.cluster.own_session import go_on_in_own_session\n"


def run(script: str) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, "-c", HEAD + script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=60,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)]
)
def test_child_has_its_own_session_and_the_parent_its_exit_code(end: str, code: int) -> None:
    session = "go_on_in_own_session()\nprint(os.getsid(0) == os.getpid(), flush=True)\n"
    assert run(session + end) == (code, "True\n", "")


def test_signals_are_forwarded() -> None:
    script = (
        "before = os.getpid()\n"
        "go_on_in_own_session()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        "os.kill(before, signal.SIGINT)\n"
        "print(signal.sigwait([signal.SIGINT]).name)\n"
    )
    assert run(script) == (0, "SIGINT\n", "")


def test_ctrl_c_after_the_end_changes_nothing() -> None:
    script = (
        "wait = os.waitpid\n"
        "def interrupted(*args):\n"
        "    found = wait(*args)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return found\n"
        "os.waitpid = interrupted\n"
        "go_on_in_own_session()\n"
        "sys.exit(3)\n"
    )
    assert run(script) == (3, "", "")
