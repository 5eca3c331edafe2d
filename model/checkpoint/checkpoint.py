"""A network on disk: a directory that is whole or absent.

    config.json             shape, special tokens, chat template, generation defaults, provenance
    model.safetensors       the weights, in the source's own types
    quantized.safetensors   the matrices that were quantized at the source, as they came
    tokenizer.json          the tokenizer, if there is one

A matrix is in one of the two files, and `weights` has all. Tensors are read when they are asked for
(model/checkpoint/tensors.py).

Knows: these files. Does not know: training state (model/checkpoint/run_directory.py adds its own
files beside them), where weights come from.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from quill.json_records import RecordError, from_json
from quill.model.checkpoint.atomic import atomic_directory
from quill.model.checkpoint.quantized_weight import QuantizedWeight, row_counts
from quill.model.checkpoint.tensors import (
    Lazy,
    LazyTensor,
    Tensors,
    lazy,
    open_safetensors,
    write_safetensors,
)
from quill.model.data.tokenizer import SpecialTokens, Tokenizer
from quill.model.errors import CheckpointError, ConfigError, first_few
from quill.model.network.config import ModelConfig
from quill.model.network.network import Network
from quill.model.network.networks import make_network

FORMAT = 3
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
QUANTIZED_FILE = "quantized.safetensors"
TOKENIZER_FILE = "tokenizer.json"

Pooling = Literal["mean", "first", "last"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The entries of config.json beside the format and the model."""

    special_tokens: SpecialTokens
    prepend_bos: bool = False
    append_eos: bool = False
    stop_ids: tuple[int, ...]
    chat_template: str | None = None
    generation: dict[str, float | int]
    provenance: dict[str, Any]
    pooling: Pooling | None = None
    normalize: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """Everything that export, evaluation and decoding need."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer | None = None  # None: the model takes token ids only
    special_tokens: SpecialTokens = field(default_factory=SpecialTokens)
    prepend_bos: bool = False  # whether a text begins with bos, as in this model's training
    append_eos: bool = False  # whether an encoder's text ends with eos, as in its training
    stop_ids: tuple[int, ...] = ()  # every token that ends an answer
    chat_template: str | None = None
    generation: dict[str, float | int] = field(default_factory=dict)  # the author's defaults
    provenance: dict[str, Any] = field(default_factory=dict)
    quantized: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    pooling: Pooling | None = None  # how its author makes one vector of a text's; None: unsaid
    normalize: bool = False  # whether such a vector gets the length 1
    path: Path | None = field(default=None, compare=False)  # where it was read from

    def build(self) -> Network:
        """The network with these weights in float32, ready to evaluate. It shares their memory."""
        with torch.device("meta"):
            model = make_network(self.config)
        check_weights(model, self.weights)
        state = {name: weight.to(torch.float32) for name, weight in self.weights.items()}
        model.load_state_dict(state, assign=True)
        model.compute_tables()
        return model.eval()


def check_weights(model: Network, weights: Mapping[str, Tensor]) -> None:
    """Refuses, by name, tensors that are missing, too many, or of another shape."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = sorted(set(expected) - set(weights))
    if missing:
        raise CheckpointError(f"the weights lack {first_few(missing)}")
    unknown = sorted(set(weights) - set(expected))
    if unknown:
        raise CheckpointError(
            f"the weights have tensors that the model doesn't: {first_few(unknown)}"
        )
    found = lazy(weights)
    for name, shape in expected.items():
        if found.shape(name) != shape:
            raise CheckpointError(
                f"tensor {name} has the shape {found.shape(name)}; the model's config asks for "
                f"{shape}"
            )


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Writes the directory atomically. A full disk leaves what stood there before."""
    try:
        with atomic_directory(path) as directory:
            write_files(directory, checkpoint)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"can't write the checkpoint {path}: {error}") from error


def write_files(directory: Path, checkpoint: Checkpoint) -> None:
    weights, kept = lazy(checkpoint.weights), checkpoint.quantized
    names = sorted(set(weights) - set(kept), key=lambda name: (-weights.dtype(name).itemsize, name))
    write_safetensors(directory / WEIGHTS_FILE, names, ((name, weights[name]) for name in names))
    if kept:
        save_quantized(directory / QUANTIZED_FILE, kept)
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save(directory / TOKENIZER_FILE)
    settings = {field.name: getattr(checkpoint, field.name) for field in fields(Settings)}
    description = {
        **{"format": FORMAT, "model": checkpoint.config.to_dict()},
        **settings,
        "special_tokens": asdict(checkpoint.special_tokens),
    }
    text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def load_checkpoint(path: Path) -> Checkpoint:
    description = read_description(path)
    try:
        weights, _ = open_safetensors(path / WEIGHTS_FILE)
        quantized, dequantized = load_quantized(path / QUANTIZED_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"can't read the weights of the checkpoint {path}: {error}. The file is missing or "
            "damaged; import or train it again"
        ) from error
    config, settings = _read_settings(path, description)
    tokenizer_file, tokenizer = path / TOKENIZER_FILE, None
    if tokenizer_file.exists():
        tokenizer = Tokenizer.load(tokenizer_file, settings.special_tokens)
    return Checkpoint(
        config=config,
        weights=Tensors(weights.entries | dequantized),
        tokenizer=tokenizer,
        quantized=quantized,
        path=path,
        **{field.name: getattr(settings, field.name) for field in fields(Settings)},
    )


def _read_settings(path: Path, description: dict[str, Any]) -> tuple[ModelConfig, Settings]:
    values = {name: value for name, value in description.items() if name != "format"}
    try:
        config = ModelConfig.from_dict(values.pop("model", None))
        return config, from_json(Settings, values)
    except (ConfigError, RecordError) as error:
        raise CheckpointError(f"{path / CONFIG_FILE} is damaged: {error}") from error


def read_description(path: Path) -> dict[str, Any]:
    """The checkpoint's config.json, checked for being one that this version reads."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}: it should be a directory")
    if (path / "manifest.json").exists() and not (path / CONFIG_FILE).exists():
        raise CheckpointError(
            f"{path} is a bundle, which can't be trained or looked into. Name the checkpoint that "
            "it was exported from"
        )
    try:
        description = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"can't read {path / CONFIG_FILE}: {error}") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise CheckpointError(
            f"{path / CONFIG_FILE} isn't of checkpoint format {FORMAT}, the one this version "
            "reads. A Hugging Face directory is brought in with `quill import`"
        )
    return description


def save_quantized(path: Path, weights: Mapping[str, QuantizedWeight]) -> None:
    kinds: dict[str, str] = {}

    def raws() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            kinds[name] = f"{weight.kind} {weight.shape[0]} {weight.shape[1]}"
            yield name, weight.raw

    write_safetensors(path, list(weights), raws(), kinds)


def load_quantized(path: Path) -> tuple[Lazy[QuantizedWeight], dict[str, LazyTensor]]:
    """The quantized matrices, and the same matrices in float32."""
    if not path.exists():
        return Lazy({}), {}
    raws, kinds = open_safetensors(path)
    reads: dict[str, Callable[[], QuantizedWeight]] = {}
    values: dict[str, LazyTensor] = {}
    for name, description in kinds.items():
        kind, *shape = description.split()
        row_counts(kind)  # raises an error for an unknown one
        reads[name] = read = partial(_read_quantized, raws, name, kind)
        values[name] = LazyTensor(
            tuple(map(int, shape)), torch.float32, partial(_dequantized, read)
        )
    return Lazy(reads), values


def _read_quantized(raws: Tensors, name: str, kind: str) -> QuantizedWeight:
    return QuantizedWeight(kind, raws[name])


def _dequantized(read: Callable[[], QuantizedWeight]) -> Tensor:
    return read().dequantize()
