"""Where the models that are compared lie, and how the peers' are made.

Knows: the cache, the peers' environment. Does not know: tasks, speeds.
"""

import json
import subprocess
import sys
from pathlib import Path

from quill.cache import cache_directory
from quill.export.bundle.manifest import MANIFEST_FILE
from quill.loadtest.environment.processes import ROOT
from quill.loadtest.errors import ContenderError, OptionError
from quill.server.serve.default_model import NAME as MODEL

PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
LLAMA_SERVER = PEERS_PYTHON.with_name("llama-server")

PASSAGES = "passages.json"


def peer_commands(cache: Path, num_threads: int) -> list[list[str]]:
    """Each with the kinds of weights that it is known for."""
    peers = cache / "peers"
    files = {
        "llama": {
            "Q8_0": peers / "q8_0.gguf",
            "Q4_1": gguf(cache),
            "Q4_0": peers / "q4_0.gguf",
        },
        "genai": {kind: peers / f"genai-{kind}" for kind in ("int4", "int8", "fp32")},
        "ctranslate2": {kind: peers / f"ct2-{kind}" for kind in ("int8", "float32")},
        "transformers": {"float32": peers / "hf"},
    }
    contenders = "quill.loadtest.bench.contenders"
    return [
        [str(PEERS_PYTHON), "-m", f"{contenders}.{module}", str(path), kind, str(num_threads)]
        for module, kinds in files.items()
        for kind, path in kinds.items()
    ]


def prepare_peers(cache: Path) -> None:
    tokenizer = default_bundle() / "tokenizer.json"
    arguments = ["quill.loadtest.bench.contenders.prepare", gguf(cache), tokenizer, cache / "peers"]
    _check(subprocess.run([PEERS_PYTHON, "-m", *map(str, arguments)], cwd=ROOT, check=False))


def held_out(cache: Path) -> list[list[int]]:
    """The passages that export measures perplexity on, made once."""
    path = cache / "peers" / PASSAGES
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "quill.export.cli.passages", MODEL]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
        _check(done)
        path.write_bytes(done.stdout)
    passages: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))["passages"]
    return passages


def _check(done: "subprocess.CompletedProcess[bytes]") -> None:
    if done.returncode != 0:
        command = " ".join(map(str, done.args))
        raise ContenderError(f"`{command}` failed with code {done.returncode}; see above")


def gguf(cache: Path) -> Path:
    """The file that `quill import smollm2-135m` fetched."""
    found = sorted(cache.glob("*SmolLM2-135M*.gguf"))
    if not found:
        raise OptionError(f"{cache} has no SmolLM2 yet. Run `quill import {MODEL}` first")
    return found[0]


def default_bundle() -> Path:
    bundle = cache_directory() / "bundles" / MODEL
    if not (bundle / MANIFEST_FILE).exists():
        raise OptionError(f"there is no bundle at {bundle}. Run `make serve` once, or name another")
    return bundle
