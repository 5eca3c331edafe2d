"""gpt-oss's MXFP4 of a Hugging Face directory: transformers' numbers, kept in their blocks."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quill.model.checkpoint.quantized_weight import MAX_EXPONENT, QuantizedWeight
from quill.model.errors import CheckpointError
from quill.model.importers.huggingface_directory import read_huggingface
from tests.model.huggingface_models import change_config, saved
from tests.model.successors import CONTEXT, SUCCESSORS

LAST = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture
def theirs(tmp_path: Path) -> torch.nn.Module:
    """A model, and its directory with experts in MXFP4, whose numbers it has."""
    model: torch.nn.Module = SUCCESSORS["gpt-oss"]()
    path = saved(model, tmp_path) / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensors.pop(name).shape
            shape = (experts, outputs, inputs // 32, 16)
            blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(119, 125, shape[:3], generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            parameter.data = values.contiguous()
    save_file(tensors, path)
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    return model


def test_logits_are_those_of_transformers_and_blocks_are_kept(
    theirs: torch.nn.Module, tmp_path: Path
) -> None:
    checkpoint = read_huggingface(tmp_path)
    ids_BT = torch.randint(272, (2, CONTEXT), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected, found = theirs(ids_BT).logits, checkpoint.build()(ids_BT)
    assert expected.std() > 0.1
    assert float((found - expected).abs().max()) < 1e-4
    layers = ("decoder.0.feed_forward", "decoder.1.feed_forward")
    matrices = [f"{layer}.{part}.weight" for layer in layers for part in ("up", "down")]
    assert list(checkpoint.quantized) == matrices
    for name in matrices:
        assert checkpoint.quantized[name].kind == "mxfp4"
        assert torch.equal(checkpoint.quantized[name].dequantize(), checkpoint.weights[name])


def test_every_exponent_stands_for_the_number_of_the_gguf_package() -> None:
    num = MAX_EXPONENT + 1
    raw = np.random.default_rng(0).integers(0, 256, (num, 17), np.uint8)
    raw[:, 0] = np.arange(num)
    found = QuantizedWeight("mxfp4", torch.from_numpy(raw)).dequantize().numpy()
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(found, expected)


def damaged(scales: Tensor) -> Tensor:
    scales[2, 3, 1] = MAX_EXPONENT + 1
    return scales


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("_scales", damaged, "down_proj_scales has a NaN"),
        ("_scales", lambda each: each[:, :5].contiguous(), "down_proj_scales has the shape"),
        ("_scales", lambda _: None, "down_proj_blocks has the shape"),
        ("_blocks", lambda each: each[..., :8].contiguous(), "MXFP4 has experts x outputs"),
        ("_blocks", lambda each: each[:3].contiguous(), "down_proj_scales has the shape"),
        ("_blocks", lambda _: None, "lacks .*down_proj"),
    ],
)
@pytest.mark.usefixtures("theirs")
def test_what_is_missing_or_damaged_is_named(
    suffix: str, change: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    changed = change(tensors.pop(LAST + suffix))
    save_file(tensors | ({} if changed is None else {LAST + suffix: changed}), path)
    with pytest.raises(CheckpointError, match=message):
        read_huggingface(tmp_path).quantized["decoder.1.feed_forward.down.weight"]
