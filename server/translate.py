"""`quill translate`: from nothing to a served translation, with every step shown.

Knows: the front door's commands, in order. Does not know: how they work.
They run as processes of their own: training and export need torch, which a server never loads.
What is there already, the trained run or the bundle, is used again.
"""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from export.manifest import MANIFEST_FILE
from server.default_model import run_step
from server.errors import StartError

STOP_S = 30.0


def run(args: argparse.Namespace) -> None:
    run_directory, bundle = args.run_directory, args.bundle
    _train(run_directory)
    if (bundle / MANIFEST_FILE).exists():
        print(f"[2/4] {bundle} is exported already", flush=True)
    else:
        bundle.parent.mkdir(parents=True, exist_ok=True)
        run_step("[2/4] exporting", "export", str(run_directory), "--out", str(bundle))
    print("[3/4] serving", flush=True)
    with _serving(bundle) as address:
        for way in ([], ["--beams", "4"]):
            title = " ".join([f'[4/4] quill generate "{args.text}"', *way])
            run_step(title, "generate", args.text, "--address", address, *way)


def _train(run_directory: Path) -> None:
    """A run that was stopped goes on."""
    title = "[1/4] training; Ctrl-C saves, and the same command goes on"
    if _is_trained(run_directory):
        print(f"[1/4] {run_directory} is trained already", flush=True)
    elif (run_directory / "run.json").exists():
        run_step(title, "train", "--resume", str(run_directory))
    else:
        run_step(title, "train", "--preset", "seq2seq-tiny", "--out", str(run_directory))


def _is_trained(run_directory: Path) -> bool:
    """Whether its last step's checkpoint is there."""
    try:
        description = json.loads((run_directory / "run.json").read_text(encoding="utf-8"))
        num_steps = int(description["recipe"]["num_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return (run_directory / f"step-{num_steps:08d}").is_dir()


@contextmanager
def _serving(bundle: Path) -> Iterator[str]:
    """A server on a free port; its address."""
    command = [sys.executable, "-m", "quill", "serve", str(bundle), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--metrics-port", "off"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("Serving at "):
            raise StartError(f"the server of {bundle} didn't start; see above")
        yield line.removeprefix("Serving at ").partition(". ")[0]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
