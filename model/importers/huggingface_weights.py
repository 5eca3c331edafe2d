"""Opens the tensors of a Hugging Face directory, to be read one at a time.

Knows: safetensors, whole or in shards with an index; PyTorch's .bin in their absence; MXFP4, of
which a matrix has a tensor of codes and one of exponents.
Does not know: what the tensors are for, what a block of MXFP4 stands for
(model/checkpoint/quantized_weight.py).

A .bin is a pickle, and a pickle can run code: PyTorch's loader for weights only refuses all but
tensors. Names of files in an index come from strangers: one that leads out of the directory is
refused.
"""

import json
import pickle
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from quill.model.checkpoint.quantized_weight import BLOCK_SIZE, QuantizedWeight
from quill.model.checkpoint.tensors import LazyTensor, Tensors, lazy, open_safetensors
from quill.model.errors import CheckpointError, UnsupportedError
from quill.model.importers.tensor_layout import Part, check_exponents

# N outputs of all experts · S blocks along the inputs · b bytes of a block

CODES, EXPONENTS = "_blocks", "_scales"  # of MXFP4
# The whole file before shards, as in transformers; safetensors before pickles.
_KINDS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
# A damaged pickle is a program that fails anywhere.
_PICKLE_ERRORS = (
    *(RuntimeError, EOFError, pickle.UnpicklingError, LookupError, TypeError, ValueError),
    *(AttributeError, AssertionError, struct.error),
)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def open_weights(directory: Path) -> Tensors:
    """All tensors, none of them read yet."""
    places = _places(directory)
    files = {name: _open(directory / name) for name in sorted(set(places.values()))}
    entries: dict[str, LazyTensor] = {}
    for name, file in places.items() if "" not in places else _all_of(files):
        if name not in files[file]:
            raise CheckpointError(f"the index lists {name} in {file}, but it isn't there")
        if files[file].dtype(name) not in _FLOATS and not is_mxfp4(name, files[file].dtype(name)):
            if name.endswith("position_ids"):  # 0, 1, 2, … in older files
                continue
            raise UnsupportedError(
                f"tensor {name} in {directory / file} is of type "
                f"{str(files[file].dtype(name)).removeprefix('torch.')}; Quill reads "
                f"{', '.join(str(kind).removeprefix('torch.') for kind in _FLOATS)}"
            )
        entries[name] = files[file].entries[name]
    return Tensors(entries)


def same_numbers(tensors: Tensors, name: str, other: str) -> bool:
    return tensors.shape(name) == tensors.shape(other) and torch.equal(
        tensors[name].float(), tensors[other].float()
    )


def _all_of(files: dict[str, Tensors]) -> list[tuple[str, str]]:
    return [(name, file) for file, tensors in files.items() for name in tensors]


def _places(directory: Path) -> dict[str, str]:
    """The file of each tensor; of "" if all are in one file."""
    for whole, index in _KINDS:
        if (directory / whole).is_file():
            return {"": whole}
        if (directory / index).exists():
            places = _read_index(directory / index, Path(whole).suffix)
            for name in places.values():
                if not (directory / name).is_file():
                    raise CheckpointError(f"{directory} lacks {name}, which its {index} names")
            return places
    names = ", ".join(name for kind in _KINDS for name in kind)
    raise CheckpointError(f"{directory} has no weights: none of {names}")


def _open(path: Path) -> Tensors:
    try:
        return open_safetensors(path)[0] if path.suffix == ".safetensors" else _open_pickle(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"can't read {path}: {error}. Fetch it again") from error


def _open_pickle(path: Path) -> Tensors:
    """Mapped, not read, unless the file is older than PyTorch 1.6."""
    try:
        try:
            state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except _PICKLE_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnsupportedError(
            f"{path} can't be read as a pickle of tensors only: {reason}. Save "
            "the model again as safetensors: save_pretrained does so"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(each, Tensor) for each in state.values()):
        raise UnsupportedError(f"{path} holds something else than tensors by name")
    for name, tensor in state.items():
        if not _has_own_numbers(tensor):
            raise UnsupportedError(
                f"tensor {name} in {path} has fewer numbers in the file than its shape asks for, "
                "or isn't dense. Save the model again as safetensors: save_pretrained does so"
            )
    return lazy({str(name): tensor for name, tensor in state.items()})


def _has_own_numbers(tensor: Tensor) -> bool:
    """A few bytes can stand for any number of values: with strides of 0, sparse, or nowhere."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize


def _read_index(path: Path, suffix: str) -> dict[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path} names no weights")
    for file in places.values():
        is_plain = isinstance(file, str) and Path(file).name == file and "\\" not in file
        if not is_plain or not file.endswith(suffix):
            raise CheckpointError(
                f"{path} names the file {file!r}; only {suffix} files beside it are read"
            )
    return places


def is_mxfp4(name: str, dtype: torch.dtype) -> bool:
    return dtype == torch.uint8 and name.endswith((CODES, EXPONENTS))


def mxfp4_names(source: Tensors) -> list[str]:
    """The matrices that are in two tensors each; neither has the matrix's own name."""
    names = [name for name in source if is_mxfp4(name, source.dtype(name))]
    return [name.removesuffix(CODES) for name in names if name.endswith(CODES)]


def with_values(source: Tensors) -> Tensors:
    """With each such matrix in the place of its two tensors, in float32."""
    entries = dict(source.entries)
    for name in mxfp4_names(source):
        shape = source.shape(name + CODES)
        exponents = entries.pop(name + EXPONENTS, None)
        if len(shape) != 4 or shape[3] != BLOCK_SIZE // 2 or exponents is None:
            raise CheckpointError(
                f"tensor {name}{CODES} has the shape {shape}; MXFP4 has experts x outputs x blocks "
                f"x {BLOCK_SIZE // 2} bytes, and {EXPONENTS} of the first three sizes beside them"
            )
        if exponents.shape != shape[:3] or exponents.dtype != torch.uint8:
            raise CheckpointError(
                f"tensor {name}{EXPONENTS} has the shape {exponents.shape}; {CODES} have {shape}"
            )
        del entries[name + CODES]
        sizes = (shape[0], shape[1], shape[2] * BLOCK_SIZE)
        entries[name] = LazyTensor(sizes, torch.float32, partial(_values, source, name, sizes))
    return Tensors(entries)


def read_mxfp4(source: Tensors, part: Part) -> QuantizedWeight:
    """All experts as one matrix, in our order."""
    weight = _weight(source, part.name)
    if part.order is None:
        return weight
    return QuantizedWeight(weight.kind, weight.raw[torch.from_numpy(part.order)])


def _values(source: Tensors, name: str, sizes: tuple[int, ...]) -> Tensor:
    return _weight(source, name).dequantize().reshape(sizes)


def _weight(source: Tensors, name: str) -> QuantizedWeight:
    """Here a byte has neighbours in its halves; in GGUF the second is 16 inputs further."""
    codes_NSb = source[name + CODES].flatten(0, 1).numpy()
    exponents_NS = source[name + EXPONENTS].flatten(0, 1).numpy()
    check_exponents(name + EXPONENTS, exponents_NS)
    both = np.stack((codes_NSb & 15, codes_NSb >> 4), axis=-1).reshape(*exponents_NS.shape, -1)
    low, high = np.split(both, 2, axis=-1)
    raw = np.concatenate((exponents_NS[..., None], low | high << np.uint8(4)), axis=-1)
    return QuantizedWeight("mxfp4", torch.from_numpy(raw.reshape(len(raw), -1)))
