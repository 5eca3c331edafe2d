"""The front door: quick, helpful, and silent about what a command doesn't need."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from quill.__main__ import main

COMMANDS = ["train", "eval", "import", "attention", "serve", "generate", "chat"]
COMMANDS += ["loadtest", "bench"]

FRONT_DOOR = "import sys; from quill.__main__ import main; sys.exit(main())"
# A process in which importing torch raises, as on a serving machine.
WITHOUT_TORCH = f"import sys; sys.modules['torch'] = None; {FRONT_DOOR}"


def run(*arguments: str, script: str = FRONT_DOOR) -> str:
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return f"{result.returncode}\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_nothing_heavy(command: str) -> None:
    script = (
        "import sys\n"
        "from quill.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'numpy', 'grpc', 'matplotlib', 'tokenizers'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))\n"
    )
    printed = run(command, "--help", script=script)
    assert "usage: quill" in printed
    assert "LOADED []" in printed


def test_help_answers_in_under_a_second() -> None:
    # Processor time, not the clock's: how busy the machine is says nothing about Quill.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run("train", "--help").startswith("0\n")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_help_has_its_signs_once() -> None:
    """argparse formats an option's words, and leaves a description as it is."""
    assert "%%" not in run("top", "--help")


def test_help_names_every_command() -> None:
    printed = run("--help")
    assert all(command in printed for command in COMMANDS)


def test_an_unknown_command_is_refused() -> None:
    assert run("fly").startswith("2\n")


def test_a_command_whose_package_is_missing_names_the_extra() -> None:
    printed = run("train", "--out", "x", script=WITHOUT_TORCH)
    assert printed.startswith("3\n")
    assert "pip install '.[train]'" in printed
    assert "Traceback" not in printed


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m quill --help | true"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr


def test_an_error_of_the_world_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "/nowhere"]) == 1
    errors = capfd.readouterr().err
    assert errors.startswith("quill: there is no file or directory '/nowhere'")
    assert errors.count("\n") == 1


def test_sigterm_ends_a_command_in_good_order(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, types\n"
        "from quill.__main__ import main\n"
        "from pathlib import Path\n"
        "from quill.model.checkpoint.atomic import atomic_directory\n"
        "def run(args):\n"
        "    with atomic_directory(Path(sys.argv[1]) / 'out'):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.modules['quill.model.evaluation.evaluate'] = types.SimpleNamespace(run=run)\n"
        "sys.exit(main(['eval', 'x']))\n"
    )
    assert run(str(tmp_path), script=script) == "143\n"
    assert not list(tmp_path.iterdir())
