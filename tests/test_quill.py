"""The front door: quick, helpful, and silent about what a command doesn't need."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from quill.__main__ import build_parser, main

COMMANDS = ["train", "eval", "import", "attention", "serve", "generate", "chat"]
COMMANDS += ["loadtest", "bench"]

FRONT_DOOR = "import sys; from quill.__main__ import build_parser, main; sys.exit(main())"
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
        "from quill.__main__ import build_parser, main\n"
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


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("fly", "quill: unknown command 'fly'. See quill --help"),
        ("srve", "quill: unknown command 'srve'. Did you mean serve? See quill --help"),
        (
            "cluster upp",
            "quill cluster: unknown action 'upp'. Did you mean up? See quill cluster --help",
        ),
        (
            "serve --prot 6000",
            "quill serve: unknown option --prot. Did you mean --port? See quill serve --help",
        ),
        ("serve --prot=6000 x", "quill serve: unknown option --prot. Did you mean --port? See"),
        ("generate a --zzz", "quill generate: unknown option --zzz. See quill generate --help"),
        ("models a", "quill models: unexpected argument 'a'. See quill models --help"),
        ("serve --port x", "quill serve: argument --port: 'x' isn't a whole number from 0 to"),
    ],
)
def test_what_is_mistyped_is_reported_in_one_line(
    line: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert errors.startswith(error)
    assert errors.count("\n") == 1


def test_options_of_generate_have_openais_names_too() -> None:
    args = build_parser().parse_args(["generate", "Hello", "--max-tokens", "5"])
    assert args.max_new_tokens == 5


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
        "from quill.__main__ import build_parser, main\n"
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
