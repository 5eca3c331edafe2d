"""The programs beside Quill: in which environment each runs, what it reads, and how that is made.

Knows: the peers' environments, the cache. Does not know: workloads, speeds.
All of them get the same weights, those of a GGUF file, and the same held-out passages. What is
made of a model lies in a directory of the cache, and is made once.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quill.cache import cache_directory
from quill.loadtest.bench.backends.protocol import size_of
from quill.loadtest.bench.experiment import Entry
from quill.loadtest.bench.models import BACKENDS
from quill.loadtest.environment.process import ROOT, memory_gib
from quill.loadtest.errors import BackendError, OptionError
from quill.model.sources.catalogue import DEFAULT

PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
LLAMA_SERVER = PEERS_PYTHON.with_name("llama-server")
HUGGING_FACE = "hf"  # the same weights in float32
LOG = "prepare.log"
MEMORY_SHARE = 0.8  # of this machine's, for all peers at once


class Peer(NamedTuple):
    """A program with one kind of weights."""

    name: str
    module: str
    kind: str  # "": as the GGUF file has them
    file: str  # in the model's directory of the cache; "": the GGUF file
    options: tuple[str, ...] = ()
    environment: str = ""  # that it runs in; "": the peers' common one
    maker: str = ""  # the environment in which its file is made

    def entry(self, model: "PeersModel", threads: str) -> Entry:
        kind = " ".join((self.kind or model.kind, *self.options[1:]))
        path, python = model.path(self.file), python_of(self.environment)
        command = [str(python), "-m", f"{BACKENDS}.{self.module}", str(path), kind, threads]
        return Entry([*command, *self.options], f"{self.name} {kind}")


PEERS = (
    Peer("openvino", "openvino_genai", "int8", "openvino-int8", maker="optimum"),
    Peer("openvino", "openvino_genai", "int4", "openvino-int4", maker="optimum"),
    Peer("ik_llama.cpp", "llama_cpp", "", "", ("ik",)),
    Peer("ik_llama.cpp", "llama_cpp", "", "", ("ik", "repacked")),
    Peer("ik_llama.cpp", "llama_cpp", "Q8_0", "q8_0.gguf", ("ik",)),
    Peer("llama.cpp", "llama_cpp", "", ""),
    Peer("llama.cpp", "llama_cpp", "Q8_0", "q8_0.gguf"),
    Peer("llama.cpp", "llama_cpp", "Q4_0", "q4_0.gguf"),
    Peer("llama.cpp", "llama_cpp", "IQ4_NL", "iq4_nl.gguf"),
    Peer("vllm", "vllm_cpu", "bfloat16", HUGGING_FACE, environment="vllm"),
    Peer("onnxruntime-genai", "genai", "int8", "genai-int8"),
    Peer("onnxruntime-genai", "genai", "int4", "genai-int4"),
    Peer("ctranslate2", "ctranslate2", "int8", "ct2-int8"),
    Peer("transformers", "transformers", "float32", HUGGING_FACE),
)
NAMES = tuple(dict.fromkeys(peer.name for peer in PEERS))


class PeersModel(NamedTuple):
    """A model of the catalogue, as the peers read it."""

    name: str
    gguf: Path
    directory: Path  # of what is made of it

    @property
    def kind(self) -> str:
        """Of weights, as the file's name ends: Q4_K_M."""
        return self.gguf.stem.replace("-", ".").rpartition(".")[2].upper()

    def path(self, file: str) -> Path:
        return self.directory / file if file else self.gguf


def python_of(environment: str) -> Path:
    """Of an environment within the peers' own."""
    home = PEERS_PYTHON.parents[1]
    return home / environment / "bin" / "python" if environment else PEERS_PYTHON


def peer_entry(module: str, *arguments: str, python: Path | None = None) -> Entry:
    """A backend in the peers' environment, or in that of `python`."""
    if python is None:
        _check_installed()
    return Entry([str(python or PEERS_PYTHON), "-m", f"{BACKENDS}.{module}", *arguments])


def _check_installed() -> None:
    if not PEERS_PYTHON.exists():
        raise OptionError("the peers aren't installed. Run `make peers` first; it takes minutes")


def peers_model(source: str | None) -> PeersModel:
    """OptionError: it has no GGUF file, or `quill serve` hasn't fetched it yet."""
    name, cache = source or DEFAULT, cache_directory()
    found = sorted((cache / "models" / name).glob("*.gguf"))
    if not found:
        raise OptionError(
            f"{cache} has no GGUF file of {name!r}. The peers read a causal model of "
            f"`quill models` that is a GGUF file; `quill import {name}` fetches it"
        )
    return PeersModel(name, found[0], cache / "peers" / name)


def chosen_peers(names: str | None) -> list[Peer]:
    wanted = NAMES if names is None else names.split(",")
    for name in wanted:
        if name not in NAMES:
            raise OptionError(f"unknown peer {name!r}; there are {', '.join(NAMES)}")
    return [peer for peer in PEERS if peer.name in wanted]


def prepare_peers(model: PeersModel, peers: Sequence[Peer]) -> list[Peer]:
    """Makes what is missing; returns the peers that can run, and says why others can't."""
    _check_installed()
    hugging_face, partial = model.path(HUGGING_FACE), model.path(f"partial-{HUGGING_FACE}")
    if not hugging_face.exists():
        shutil.rmtree(partial, ignore_errors=True)
        run_quill("quill", "convert", model.name, "--to", "transformers", "--out", str(partial))
        partial.rename(hugging_face)
    for maker in dict.fromkeys(peer.maker for peer in peers):
        files = {peer.file: None for peer in peers if peer.maker == maker and peer.file}
        make(model, maker, *files)
    reasons = {peer: _reason(model, peer) for peer in peers}
    for peer, reason in reasons.items():
        if reason:
            print(f"skipped {peer.name} {peer.kind}: {reason}", file=sys.stderr)
    ready = [peer for peer in peers if not reasons[peer]]
    _check_memory(model, ready)
    return ready


def make(model: PeersModel, maker: str, *files: str) -> None:
    """In an environment; a file that can't be made isn't there afterwards. Converters print much,
    and that goes to a log."""
    missing = [file for file in files if not model.path(file).exists()]
    if not missing or not python_of(maker).exists():
        return
    print(f"making {', '.join(missing)}", file=sys.stderr)
    command = [python_of(maker), "-m", f"{BACKENDS}.prepare", model.gguf, model.directory]
    with model.path(LOG).open("ab") as log:
        subprocess.run([*map(str, command), *missing], cwd=ROOT, stderr=log, check=False)


def _reason(model: PeersModel, peer: Peer) -> str:
    """Why a peer can't run; empty if it can."""
    if not python_of(peer.environment).exists():
        return f"it isn't installed (make peers-{peer.environment})"
    if not python_of(peer.maker).exists():
        return "what makes its file isn't installed (make peers)"
    if not model.path(peer.file).exists():
        return f"{peer.file} couldn't be made; see {model.path(LOG)}"
    return ""


def _check_memory(model: PeersModel, peers: Sequence[Peer]) -> None:
    needed = sum(size_of(model.path(peer.file)) for peer in peers) / 2**30
    if needed > MEMORY_SHARE * memory_gib():
        raise OptionError(
            f"all these peers run at once, and their weights of {needed:.0f} GiB are too much for "
            f"{memory_gib():.0f} GiB of memory. Choose some by --peers, and others next, with "
            "--resume"
        )


def held_out(model: PeersModel) -> list[list[int]]:
    """The passages on which export measures perplexity, made once."""
    path = model.path("passages.json")
    if not path.exists():
        model.directory.mkdir(parents=True, exist_ok=True)
        path.write_text(run_quill("quill.export.cli.passages", model.name), encoding="utf-8")
    passages: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))["passages"]
    return passages


def reference(model: PeersModel, num_passages: int) -> Path:
    """The logits of float32 in these passages, made once."""
    file = f"reference-{num_passages}.npy"
    make(model, "", file)
    if not model.path(file).exists():
        raise BackendError(f"{file} couldn't be made; see {model.path(LOG)}")
    return model.path(file)


def run_quill(module: str, *arguments: str) -> str:
    """In a process of its own: it needs torch. Returns what it prints."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode != 0:
        raise BackendError(f"`{' '.join(command)}` failed with code {done.returncode}; see above")
    return done.stdout
