"""Writes a GGUF file: model/importers/gguf_config.py and gguf_llama.py run backwards.

Knows: the order of a file's parts, which settings go where. Does not know: how transformers spells
settings (export/convert/huggingface_settings.py), tokenizers (export/convert/gguf_vocabulary.py).

Matrices that were quantized at their source are written as they came, bit for bit.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from quill.export.convert.gguf_vocabulary import check_vocabulary, vocabulary_metadata
from quill.export.convert.huggingface_settings import (
    Found,
    check_writable,
    described,
    different,
    find_architectures,
    instead,
)
from quill.export.convert.parts import restored, rows_of_parts, separate_all, separated
from quill.export.errors import UnsupportedModelError
from quill.model.checkpoint.atomic import atomic_file
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.tensors import lazy, raw_bytes
from quill.model.errors import ModelError
from quill.model.importers.gguf_config import (
    ARCHITECTURES,
    LONG_FACTORS,
    MIXTRAL,
    NEEDED,
    OLMO3,
    OPTIONAL,
    ROTARY_FACTORS,
    SHORT_FACTORS,
    Architecture,
    read_config,
)
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_tensors import KEPT
from quill.model.importers.tensor_layout import Layout, llama_layout
from quill.model.network.config import ModelConfig
from quill.model.network.positions import rotary_frequencies
from quill.model.progress import track

F32 = GGMLQuantizationType.F32
_FLOATS = {torch.float16: GGMLQuantizationType.F16, torch.bfloat16: GGMLQuantizationType.BF16}
_DTYPES = {kind: dtype for dtype, kind in _FLOATS.items()}
_PROVENANCE = {"name": "general.name", "version": "general.version", "licence": "general.license"}
_PROVENANCE |= {"author": "general.organization", "url": "general.source.url"}
_VOCABULARY = ("embedding.weight", "projection.weight")  # by their numbers a reader tells if tied
_QUANTIZATION_VERSION = 2  # of llama.cpp's block formats


Kinds = dict[str, Any]  # the GGMLQuantizationType of each of the file's tensors


def write_gguf(out: Path, checkpoint: Checkpoint, preferred: str | None) -> str:
    """Tensors are read, taken apart and written one by one. Returns the architecture."""
    config = checkpoint.config
    name, row, found = _find_architecture(config, preferred)
    writer: Any = gguf.GGUFWriter(None, name)
    for key, value in _metadata(checkpoint, name, row, found).items():
        _add_value(writer, key, value)
    tables = {table: _bytes(torch.tensor(each)) for table, each in _rotary_tables(config).items()}
    for table, data in tables.items():
        writer.add_tensor_info(table, data.shape, np.uint8, data.nbytes, F32)
    layout = llama_layout(config, row.names, row.interleaved)
    vocabulary = {name: layout.pop(name) for name in _VOCABULARY if name in layout}
    kinds = _add_infos(writer, checkpoint, vocabulary | layout)

    def write(part: Layout) -> None:
        raws = partial(_raws, checkpoint, part, kinds)
        for _, raw in separate_all(part, raws, f"Writing {out}"):
            writer.write_tensor_data(raw.numpy())

    with atomic_file(out) as path, contextlib.closing(writer):
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for data in tables.values():
            writer.write_tensor_data(data)
        write(vocabulary)
        _check(path, writer, checkpoint)
        write(layout)
    return name


def _find_architecture(
    config: ModelConfig, preferred: str | None
) -> tuple[str, Architecture, Found]:
    check_writable(config, preferred)
    rows = [*ARCHITECTURES.items(), ("llama", MIXTRAL), ("olmo2", OLMO3)]
    for found in find_architectures(config, preferred):
        for name, row in rows:
            if row.huggingface == found.architecture and not different(found.config, config):
                return name, row, found
    raise UnsupportedModelError(
        f"no GGUF architecture that Quill writes computes this {described(config)}; it writes "
        f"{', '.join(ARCHITECTURES)}. {instead(config)}"
    )


def _metadata(checkpoint: Checkpoint, name: str, row: Architecture, found: Found) -> dict[str, Any]:
    config = checkpoint.config
    values = {
        **{theirs: found.spelling.get(ours) for theirs, ours in _names(row).items()},
        **dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_size),
        "rope.dimension_count": config.rotary_size,
        "vocab_size": config.vocab_size,
        **_scaling(config),
    }
    if config.short_conv is not None:
        of_layers = map(config.is_conv, range(config.num_layers))
        kv_heads = [0 if is_conv else config.num_kv_heads for is_conv in of_layers]
        values["attention.head_count_kv"] = kv_heads
    return {
        **{key: checkpoint.provenance.get(ours) for ours, key in _PROVENANCE.items()},
        "general.quantization_version": _QUANTIZATION_VERSION,
        **{f"{name}.{key}": value for key, value in values.items()},
        **vocabulary_metadata(checkpoint),
    }


def _names(row: Architecture) -> dict[str, str]:
    """Names in the file, and in config.json."""
    norms = [each for each in OPTIONAL if each.endswith("epsilon")]
    optional = {key: name for key, name in OPTIONAL.items() if key not in norms or key == row.eps}
    return {**NEEDED, **optional, **row.settings}


def _scaling(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rotary_scaling
    if scaling is None or scaling.kind == "llama3":  # that is a table
        return {}
    values: dict[str, Any] = {"type": scaling.kind}
    if scaling.kind != "longrope":  # llama.cpp would stretch by it besides its tables
        values["factor"] = scaling.factor
    if scaling.kind != "linear":
        values["original_context_length"] = scaling.original_context
    if scaling.kind == "yarn":
        values["yarn_beta_fast"] = scaling.high_freq_factor
        values["yarn_beta_slow"] = scaling.low_freq_factor
    if scaling.kind == "longrope":
        values["attn_factor"] = scaling.attention_factor
    return {f"rope.scaling.{name}": value for name, value in values.items()}


def _rotary_tables(config: ModelConfig) -> dict[str, list[float]]:
    """Tensors with a divisor for each frequency."""
    scaling = config.rotary_scaling
    if scaling is None or scaling.kind in ("linear", "yarn"):
        return {}
    if scaling.kind == "longrope":
        # Quill has one of the two for texts of all lengths.
        return {name: [*scaling.divisors] for name in (LONG_FACTORS, SHORT_FACTORS)}
    plain_F = rotary_frequencies(config.rotary_size, config.rotary_base, None)
    stretched_F = rotary_frequencies(config.rotary_size, config.rotary_base, scaling)
    return {ROTARY_FACTORS: (plain_F / stretched_F).tolist()}


def _add_value(writer: Any, key: str, value: object) -> None:
    """What is None isn't written."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adders |= {str: writer.add_string, list: writer.add_array}
    if value is not None:
        adders[type(value)](key, value)


def _add_infos(writer: Any, checkpoint: Checkpoint, layout: Layout) -> Kinds:
    """Describes all tensors. Those that are floats aren't read."""
    weights, kinds = lazy(checkpoint.weights), Kinds()
    for ours in track(list(layout), "Looking at the tensors"):
        parts = layout[ours]
        is_matrix = len(weights.shape(ours)) > 1 and ours.endswith(".weight")
        floats = _FLOATS.get(weights.dtype(ours), F32) if is_matrix else F32
        found = dict.fromkeys((part.name for part in parts), floats)
        if ours in checkpoint.quantized:
            rows = rows_of_parts(parts, checkpoint.quantized[ours])
            for part, of_part in zip(parts, rows or [], strict=rows is not None):
                found[part.name] = GGMLQuantizationType[of_part.kind.upper()]
        for part in parts:
            if part.name not in kinds:
                kinds[part.name] = found[part.name]
                shape = gguf.quant_shape_to_byte_shape(part.shape, found[part.name])
                size = math.prod(shape)
                writer.add_tensor_info(part.name, shape, np.uint8, size, found[part.name])
    return kinds


def _raws(
    checkpoint: Checkpoint, layout: Layout, kinds: Kinds, ours: str
) -> Iterator[tuple[str, Tensor]]:
    """The bytes of the file's tensors that one of ours becomes."""
    parts = layout[ours]
    if ours in checkpoint.quantized and kinds[parts[0].name] in KEPT:
        rows = rows_of_parts(parts, checkpoint.quantized[ours])
        assert rows is not None
        yield from restored(parts, [torch.from_numpy(each.raw_Nb) for each in rows])
        return
    for name, tensor in separated(parts, checkpoint.weights[ours]):
        yield name, torch.from_numpy(_bytes(tensor.to(_DTYPES.get(kinds[name], torch.float32))))


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return np.frombuffer(raw_bytes(tensor), np.uint8)


def _check(path: Path, writer: Any, checkpoint: Checkpoint) -> None:
    """Raises an error unless the importer reads this very network out of the file, most of whose
    weights aren't written yet."""
    (file,) = writer.fout
    file.flush()
    sizes = [file.tell(), *(info.nbytes for info in writer.tensors[0].values())]
    os.truncate(path, sum(writer.ggml_pad(size, writer.data_alignment) for size in sizes))
    written = GgufFile(path)
    try:
        names = different(read_config(written), checkpoint.config)
    except ModelError as error:
        raise UnsupportedModelError(f"the model can't be written as GGUF: {error}") from error
    if names:
        raise UnsupportedModelError(
            f"the model can't be written as GGUF: files of its architecture can't tell its "
            f"{', '.join(names)}. Convert it to transformers or onnx"
        )
    check_vocabulary(written.metadata, checkpoint)
