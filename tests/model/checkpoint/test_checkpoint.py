"""A checkpoint comes back as it was saved, or says by name what is wrong with it."""

import contextlib
import dataclasses
import json
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quill.model.checkpoint.checkpoint import (
    CONFIG_FILE,
    QUANTIZED_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from quill.model.checkpoint.quantized_weight import Kind, stack_rows
from quill.model.checkpoint.tensors import Tensors
from quill.model.data.tokenizer import SpecialTokens, byte_tokenizer
from quill.model.errors import CheckpointError
from quill.model.network.transformer import Transformer
from tests.random_weights import random_rows, random_weight
from tests.tiny_networks import tiny

SMALL = tiny(257, 16, num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, d_ff=32)


@pytest.fixture
def checkpoint() -> Checkpoint:
    torch.manual_seed(0)
    return Checkpoint(SMALL, Transformer(SMALL).state_dict())


def change_description(path: Path, **changes: Any) -> None:
    description = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps({**description, **changes}))


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_everything_comes_back(tmp_path: Path, checkpoint: Checkpoint) -> None:
    tokenizer = byte_tokenizer()
    saved = dataclasses.replace(
        checkpoint,
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(bos=0, eos=0),
        prepend_bos=True,
        stop_ids=(0, 7),
        chat_template="{{ messages }} – ü",
        generation={"temperature": 0.2, "top_k": 50},
        provenance={"source": "a test", "files": ["x"]},
        path=tmp_path / "out",
    )
    save_checkpoint(tmp_path / "out", saved)
    loaded = load_checkpoint(tmp_path / "out")
    assert equal(loaded.weights, saved.weights)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("Grüße 🙂") == tokenizer.encode("Grüße 🙂")
    others = {field.name for field in dataclasses.fields(Checkpoint)} - {"weights", "tokenizer"}
    for name in others:
        assert getattr(loaded, name) == getattr(saved, name)


def test_the_built_network_computes_what_the_saved_one_did(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL).eval()
    save_checkpoint(tmp_path / "out", checkpoint)
    built = load_checkpoint(tmp_path / "out").build()
    ids = torch.arange(10).unsqueeze(0)
    assert not built.training
    assert torch.equal(built(ids), model(ids))


def test_quantized_weights_come_back_bit_by_bit(tmp_path: Path, checkpoint: Checkpoint) -> None:
    weights = {kind: random_weight(kind, 4, 512) for kind in get_args(Kind)}
    weights["several"] = stack_rows([random_rows("q4_k", 4, 256), random_rows("q6_k", 2, 256)])
    save_checkpoint(tmp_path / "out", dataclasses.replace(checkpoint, quantized=weights))
    loaded = load_checkpoint(tmp_path / "out").quantized
    assert {name: each.kind for name, each in loaded.items()} == {
        name: each.kind for name, each in weights.items()
    }
    for name, weight in weights.items():
        assert torch.equal(loaded[name].raw, weight.raw)
        assert torch.equal(loaded[name].dequantize(), weight.dequantize())


def test_a_matrix_that_is_kept_quantized_is_stored_once(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    weight = random_weight("q4_1", 16, 32)
    name = "decoder.0.feed_forward.down.weight"
    weights = {**checkpoint.weights, name: weight.dequantize()}
    save_checkpoint(
        tmp_path / "out", dataclasses.replace(checkpoint, weights=weights, quantized={name: weight})
    )
    assert name not in load_file(tmp_path / "out" / WEIGHTS_FILE)
    loaded = load_checkpoint(tmp_path / "out").weights
    assert equal(loaded, weights)
    assert isinstance(loaded, Tensors)
    assert loaded.shape(name) == weight.shape
    assert loaded.dtype(name) == torch.float32


def test_weights_keep_the_types_of_their_source_and_the_network_is_in_float32(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in checkpoint.weights.items()}
    save_checkpoint(tmp_path / "out", dataclasses.replace(checkpoint, weights=weights))
    loaded = load_checkpoint(tmp_path / "out")
    assert equal(loaded.weights, weights)
    assert {tensor.dtype for tensor in loaded.build().state_dict().values()} == {torch.float32}


def test_a_loaded_checkpoint_reads_the_files_that_it_was_loaded_from(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    save_checkpoint(tmp_path / "out", checkpoint)
    loaded = load_checkpoint(tmp_path / "out")
    changed = {name: tensor + 1 for name, tensor in checkpoint.weights.items()}
    save_checkpoint(tmp_path / "out", dataclasses.replace(checkpoint, weights=changed))
    assert equal(loaded.weights, checkpoint.weights)


def test_saving_again_replaces_everything(tmp_path: Path, checkpoint: Checkpoint) -> None:
    save_checkpoint(tmp_path / "out", dataclasses.replace(checkpoint, tokenizer=byte_tokenizer()))
    save_checkpoint(tmp_path / "out", dataclasses.replace(checkpoint, stop_ids=(3,)))
    loaded = load_checkpoint(tmp_path / "out")
    assert loaded.stop_ids == (3,)
    assert loaded.tokenizer is None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_that_cant_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"can't write the checkpoint .*file/out"):
        save_checkpoint(tmp_path / "file" / "out", checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@contextlib.contextmanager
def no_file_may_exceed(num_bytes: int) -> Iterator[None]:
    """Makes writes fail half-way, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_an_error_and_keeps_the_old_checkpoint(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    save_checkpoint(tmp_path / "out", checkpoint)
    changed = {name: tensor + 1 for name, tensor in checkpoint.weights.items()}
    message = "can't write the checkpoint"
    with no_file_may_exceed(1000), pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "out", dataclasses.replace(checkpoint, weights=changed))
    assert equal(load_checkpoint(tmp_path / "out").weights, checkpoint.weights)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("decoder_norm.weight", None, r"the weights lack decoder_norm\.weight$"),
        ("lm_head.weight", torch.zeros(2), r"that the model doesn't: lm_head\.weight$"),
        ("embedding.weight", torch.zeros(100, 16), r"embedding\.weight .*\(100, 16\).*\(257, 16\)"),
    ],
    ids=["missing", "unknown", "wrong shape"],
)
def test_tensors_that_do_not_fit_are_named(
    checkpoint: Checkpoint, name: str, tensor: Tensor | None, message: str
) -> None:
    weights = {each: value for each, value in checkpoint.weights.items() if each != name}
    if tensor is not None:
        weights[name] = tensor
    with pytest.raises(CheckpointError, match=message):
        dataclasses.replace(checkpoint, weights=weights).build()


def test_long_lists_of_tensors_are_cut(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"the weights lack (\S+, ){4}\S+ and \d+ more$"):
        dataclasses.replace(checkpoint, weights={}).build()


@pytest.mark.parametrize("file", [WEIGHTS_FILE, QUANTIZED_FILE])
@pytest.mark.parametrize("num_bytes", [0, 5, 200])
def test_truncated_weights_are_an_error(
    tmp_path: Path, checkpoint: Checkpoint, file: str, num_bytes: int
) -> None:
    weight = random_weight("q8_0", 4, 64)
    saved = dataclasses.replace(checkpoint, quantized={"a.weight": weight})
    save_checkpoint(tmp_path / "out", saved)
    content = (tmp_path / "out" / file).read_bytes()
    (tmp_path / "out" / file).write_bytes(content[:num_bytes])
    with pytest.raises(CheckpointError, match="can't read the weights of the checkpoint"):
        load_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (WEIGHTS_FILE, None, "missing or damaged"),
        (CONFIG_FILE, '{"format": 99}', "isn't of checkpoint format"),
        (CONFIG_FILE, '{"architectures": ["LlamaForCausalLM"]}', "brought in with `quill import`"),
        (CONFIG_FILE, "", r"config\.json"),
        (CONFIG_FILE, "{", r"config\.json"),
        (CONFIG_FILE, "[1]", r"config\.json"),
        (CONFIG_FILE, "null", r"config\.json"),
        (TOKENIZER_FILE, "{", r"tokenizer\.json can't be read"),
    ],
)
def test_a_damaged_file_is_an_error(
    tmp_path: Path, checkpoint: Checkpoint, file: str, content: str | None, message: str
) -> None:
    save_checkpoint(tmp_path, dataclasses.replace(checkpoint, tokenizer=byte_tokenizer()))
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "abc"),
        ("model", {"family": "causal"}),
        ("stop_ids", None),
        ("stop_ids", ["x"]),
        ("special_tokens", {"bos": "x"}),
        ("special_tokens", {"start": 1}),
        ("special_tokens", None),
        ("generation", 5),
        ("generation", {"temperature": "warm"}),
        ("chat_template", 3),
        ("provenance", []),
    ],
)
def test_a_damaged_description_is_refused_by_name(
    name: str, value: object, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, checkpoint)
    change_description(path, **{name: value})
    with pytest.raises(CheckpointError, match=r"config\.json|special_tokens"):
        load_checkpoint(path)


def test_a_bundle_and_a_missing_directory_are_told_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    with pytest.raises(CheckpointError, match="is a bundle"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*nowhere"):
        load_checkpoint(tmp_path / "nowhere")
