"""The server package stands without torch, and without the packages it doesn't know."""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, pkgutil, sys
for name in ("torch", "transformers", "rich", "quill.model.network", "quill.loadtest", "ray"):
    sys.modules[name] = None  # importing it raises
import quill.protos, quill.server
num_imported = 0
for package in (quill.server, quill.protos):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name != "quill.protos.generate":  # a development tool
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # Ray is for those who have a cluster
                assert error.name.startswith("ray") and ".server.cluster." in module.name, error
            num_imported += 1
assert num_imported > 100, num_imported
assert "opentelemetry" not in sys.modules, "only a server that traces pays for it"
ours = ("quill.export.", "quill.model.")
print(*sorted(name for name in sys.modules if name.startswith(ours)))
"""


def test_server_imports_with_torch_and_model_out_of_reach() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    standard_library_only = {
        "quill.model.checkpoint",
        "quill.model.checkpoint.atomic",
        "quill.model.data",
        "quill.model.data.wheels",
        "quill.model.errors",
        "quill.model.sources",
        "quill.model.sources.catalogue",
        "quill.model.sources.hashes",
        "quill.model.sources.kinds",
        "quill.model.network",  # None: see above
        "quill.export.bundle",
        "quill.export.bundle.graph_contract",
        "quill.json_records",
        "quill.export.bundle.manifest",
        "quill.export.errors",
        "quill.export.operators",
        "quill.export.operators.library",
        "quill.export.precisions",
    }
    assert set(done.stdout.split()) <= standard_library_only


FRONTEND = """
import sys
import quill.server.serve.frontend_main
assert "quill.server.serve.server" in sys.modules
print(*{"onnxruntime", "quill.server.engine.engine"} & set(sys.modules))
"""
SUPERVISOR = """
import sys
import quill.server.serve.run
assert "quill.server.process.supervisor" in sys.modules
print(*{"onnxruntime", "grpc", "numpy", "prometheus_client", "tokenizers"} & set(sys.modules))
"""


@pytest.mark.parametrize("program", [FRONTEND, SUPERVISOR])
def test_processes_import_only_what_they_need(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
