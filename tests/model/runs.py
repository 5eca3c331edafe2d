"""Small training runs for the tests: data, command lines, what a run left behind.

Knows: `quill train` as a person calls it. Does not know: what any test is after.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from quill.__main__ import main
from quill.model.checkpoint.run_directory import step_directories

SENTENCES = [
    "The state of the union is strong.",
    "We hold the line against waste and want.",
    "Peace is the work of patient men and women.",
    "A budget is a promise, and a promise is a debt.",
]


def write_text(path: Path) -> Path:
    lines = [f"{SENTENCES[i % 4]} That was said in {1800 + i}." for i in range(120)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def write_pairs(path: Path) -> Path:
    words = ["red", "blue", "green", "old", "new", "small"]
    things = ["door", "lamp", "fan", "lock", "light", "room", "house"]
    lines = [
        f"The {w} {t} no {i}\tDas {t} Nummer {i} ist {w}"
        for i, (w, t) in enumerate((w, t) for w in words for t in things)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def text_arguments(data: Path, out: Path, *more: str) -> list[str]:
    return [
        *("train", "--preset", "tiny", "--text", str(data), "--out", str(out)),
        *("--vocab-size", "300", "--context", "16", "--batch-tokens", "64"),
        *("--steps", "9", "--warmup", "2", "--save-every", "3", "--evaluate-every", "4"),
        *more,
    ]


def pair_arguments(data: Path, out: Path, *more: str) -> list[str]:
    return [
        *("train", "--preset", "seq2seq-tiny", "--pairs", str(data), "--out", str(out)),
        *("--vocab-size", "300", "--context", "48", "--batch-tokens", "128"),
        *("--steps", "6", "--warmup", "2", "--save-every", "3", "--evaluate-every", "3"),
        *more,
    ]


def masked_arguments(data: Path, out: Path, *more: str) -> list[str]:
    return [
        *("train", "--preset", "bert-tiny", "--text", str(data), "--out", str(out)),
        *("--vocab-size", "300", "--context", "16", "--batch-tokens", "64"),
        *("--steps", "6", "--warmup", "2", "--save-every", "3", "--evaluate-every", "3"),
        *more,
    ]


def train(arguments: list[str]) -> None:
    assert main(arguments) == 0


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python script in a process of its own: one that may be killed.

    It has as many threads as the tests have: sums are rounded otherwise with another number.
    """
    command = [sys.executable, "-c", script, *arguments]
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=env
    )


def last_checkpoint(run: Path) -> Path:
    return step_directories(run)[-1]


def weight_bytes(run: Path) -> bytes:
    return (last_checkpoint(run) / "model.safetensors").read_bytes()


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(last_checkpoint(run) / "model.safetensors")


def log_lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
