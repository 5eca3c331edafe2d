"""Reads the tensors of a Hugging Face directory, one at a time.

Knows: safetensors, whole or in shards with an index. Does not know: what the tensors are for.

Only safetensors are read: a .bin is a pickle, and a pickle runs code. Names of files in the index
come from strangers: one that leads out of the directory is refused.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quill.model.errors import CheckpointError, UnsupportedError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = {"F64", "F32", "F16", "BF16"}


class WeightFiles:
    """The safetensors of one directory, open for reading."""

    def __init__(self, files: dict[str, Any], places: dict[str, str], directory: Path) -> None:
        self._files = files
        self._places = places  # the file of each tensor
        self.directory = directory
        self.shapes = {name: self._shape(name) for name in places}

    def read(self, name: str) -> Tensor:
        """One tensor, in float32."""
        tensor: Tensor = self._files[self._places[name]].get_tensor(name)
        return tensor.to(torch.float32)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same numbers."""
        return self.shapes[name] == self.shapes[other] and torch.equal(
            self.read(name), self.read(other)
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        file = self._places[name]
        try:
            part = self._files[file].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{INDEX} lists {name} in {file}, but it isn't there: {error}"
            ) from error
        if part.get_dtype() not in _FLOATS:
            raise UnsupportedError(
                f"tensor {name} in {self.directory / file} is of type {part.get_dtype()}; Quill "
                f"reads {', '.join(sorted(_FLOATS))}"
            )
        return tuple(part.get_shape())


def weight_paths(directory: Path) -> list[Path]:
    """The files that hold the weights."""
    if (directory / WHOLE).is_file():  # before shards, as in transformers
        names = [WHOLE]
    elif (directory / INDEX).exists():
        names = sorted(set(_read_index(directory).values()))
    else:
        raise _without_safetensors(directory)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(f"{directory} lacks {missing[0]}, which its {INDEX} names")
    return [directory / name for name in names]


@contextlib.contextmanager
def open_weights(directory: Path) -> Iterator[WeightFiles]:
    paths = weight_paths(directory)
    with contextlib.ExitStack() as stack:
        files = {path.name: stack.enter_context(_open(path)) for path in paths}
        if WHOLE in files:
            places = dict.fromkeys(files[WHOLE].keys(), WHOLE)
        else:
            places = _read_index(directory)
        yield WeightFiles(files, places, directory)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"can't read {path}: {error}. Fetch it again") from error


def _read_index(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path} names no weights")
    for file in places.values():
        is_plain = isinstance(file, str) and Path(file).name == file and "\\" not in file
        if not is_plain or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path} names the file {file!r}; only .safetensors files beside it are read"
            )
    return places


def _without_safetensors(directory: Path) -> CheckpointError | UnsupportedError:
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    if pickles:
        return UnsupportedError(
            f"{directory} has its weights as a pickle ({pickles[0]}), which could run any code. "
            "Save the model again as safetensors: save_pretrained does so"
        )
    return CheckpointError(f"{directory} has no {WHOLE} and no {INDEX}")
