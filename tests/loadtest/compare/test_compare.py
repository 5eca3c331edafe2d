"""`quill compare`, as a person types it, over small runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.operators import needs_operators


def quill(*arguments: object) -> str:
    command = [sys.executable, "-m", "quill", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_operators
def test_a_run_is_exported_served_and_shown(tmp_path: Path) -> None:
    words, things = ["red", "blue", "green", "old"], ["door", "lamp", "fan", "lock", "room"]
    pairs = [(word, thing, i) for i, word in enumerate(words) for thing in things]
    lines = [f"The {w} {t} no {i}\tDas {t} Nummer {i} ist {w}" for w, t, i in pairs * 3]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines), encoding="utf-8")
    run, out = tmp_path / "gru", tmp_path / "compared"
    quill(
        *("train", "--preset", "gru-bahdanau-tiny", "--pairs", tmp_path / "pairs.tsv"),
        *("--out", run, "--vocab-size", 300, "--context", 48, "--batch-tokens", 128),
        *("--steps", 3, "--warmup", 1, "--evaluate-every", 3),
    )
    said = quill("compare", "--runs", run, "--out", out, "--sentences", 4, "--sentence", "The lamp")
    assert "1 translators compared" in said
    (found,) = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    assert found["title"] == "GRU, Bahdanau"
    assert found["num_equal"] >= 1
    assert found["crowd_speed"] > 0
    assert "data:image/png" in (out / "compare.html").read_text(encoding="utf-8")
