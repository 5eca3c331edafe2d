"""The server room stands without torch, and without the rooms it doesn't know."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import importlib, pkgutil, sys
for name in ("torch", "transformers", "model", "loadtest"):
    sys.modules[name] = None  # importing it raises
import protos, server
for room in (server, protos):
    for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
        if module.name != "quill.protos.generate":  # a development tool
            importlib.import_module(module.name)
assert "opentelemetry" not in sys.modules, "only a server that traces pays for it"
print(*sorted(name for name in sys.modules if name.startswith("export.")))
"""


def test_server_imports_with_torch_and_model_out_of_reach() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    standard_library_only = {
        "quill.export.bundle.graph_contract",
        "quill.export.errors",
        "quill.export.bundle.manifest",
        "quill.export.operators.library",
        "quill.export.precisions",
        "quill.export.bundle.json_records",
    }
    assert set(done.stdout.split()) <= standard_library_only
