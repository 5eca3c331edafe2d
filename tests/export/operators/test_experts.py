"""Quill's own experts and matrices of heads: PyTorch's numbers, the same bits in any company."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quill.export.graph.stacked_layers import CustomExperts, CustomHeadLinear
from quill.export.quantize.quantizers import quantize
from quill.export.quantize.quill_layout import InputBits, OperatorWeight
from quill.export.verify.runner import Array, open_session
from quill.model.network.config import Experts, ModelConfig
from quill.model.network.experts import ExpertFeedForward
from quill.model.network.latent import by_head
from tests.export.operators.custom_kernels import (
    FLOAT,
    check_all_kernels_agree,
    save_operator,
)
from tests.operators import needs_operators
from tests.random_weights import random_weight
from tests.tiny_networks import LLAMA

pytestmark = needs_operators

MXFP4 = 5  # in the place of bits: its integers have so many
PLAIN = Experts(number=5, per_token=2, d_expert=32)
GROUPED = Experts(
    number=24,
    per_token=5,
    d_expert=64,
    scoring="sigmoid",
    scale=2.5,
    groups=6,
    top_groups=3,
    group_best=2,
    balanced=True,
)
UNSCALED = dataclasses.replace(PLAIN, number=17, per_token=1, normalize=False)
BIASED = Experts(number=6, per_token=3, d_expert=64, bias=True, clamp=0.3)
CASES = [(PLAIN, 32), (GROUPED, 32), (UNSCALED, 32), (PLAIN, 8), (GROUPED, 8), (PLAIN, 4)]
CASES += [(BIASED, 32), (BIASED, 8), (BIASED, MXFP4)]


def mixture(experts: Experts, bits: int) -> tuple[ExpertFeedForward, CustomExperts]:
    """By PyTorch, with the values that its integers stand for, and by the operator."""
    torch.manual_seed(experts.number)
    layer = ExpertFeedForward(config_with(experts), experts).eval()
    if experts.balanced:
        layer.balance_E.copy_(torch.randn(experts.number) * 0.2)
    for each in (layer.router, layer.up, layer.down):
        if each.bias is not None:
            torch.nn.init.normal_(each.bias, std=0.2)
    if bits == 32:
        return layer, CustomExperts(layer, None, None)
    weights = [each.weight.detach() for each in (layer.up, layer.down)]
    if bits == MXFP4:
        up, down = (random_weight("mxfp4", *each.shape) for each in weights)
    else:
        up, down = (quantize("q4_1" if bits == 4 else "q8_0", each).weight for each in weights)
    layer.up.weight.data, layer.down.weight.data = up.dequantize(), down.dequantize()
    input_bits: InputBits = 8 if bits < 8 else 16
    return layer, CustomExperts(
        layer, OperatorWeight(up, input_bits), OperatorWeight(down, input_bits)
    )


def config_with(experts: Experts) -> ModelConfig:
    return dataclasses.replace(LLAMA, experts=experts)


def save(directory: Path, own: CustomExperts, **changes: Any) -> Path:
    constants = {"up": own.up, "down": own.down}
    if own.balance_E is not None:
        constants["balance"] = own.balance_E
    if own.up_bias_N is not None and own.down_bias_N is not None:
        constants |= {"": torch.empty(0), "up_bias": own.up_bias_N, "down_bias": own.down_bias_N}
    experts = own.experts
    names = ("number", "per_token", "d_expert", "groups", "top_groups", "group_best", "scale")
    attributes: dict[str, Any] = {name: getattr(experts, name) for name in names}
    attributes |= {"inputs": LLAMA.d_model, "normalize": int(experts.normalize)}
    attributes |= {"sigmoid": int(experts.scoring == "sigmoid")}
    if experts.clamp:
        attributes |= {"clamp": experts.clamp, "slope": experts.slope}
    for index, name in enumerate(("up", "down")):
        attributes[f"{name}_layout"] = own.layouts[index]
        attributes[f"{name}_input_bits"] = own.input_bits[index]
    attributes |= changes
    return save_node(directory, "Experts", ["x", "logits"], constants, attributes)


def save_node(
    directory: Path,
    operator: str,
    inputs: list[str],
    constants: dict[str, torch.Tensor],
    attributes: dict[str, Any],
) -> Path:
    return save_operator(
        directory,
        operator,
        [*inputs, *constants],
        dict.fromkeys(inputs, FLOAT),
        {"y": FLOAT},
        {name: tensor.numpy() for name, tensor in constants.items() if name},
        attributes,
    )


def tokens(layer: ExpertFeedForward, num: int) -> dict[str, Array]:
    x_RD = torch.randn(num, LLAMA.d_model)
    with torch.no_grad():
        return {"x": x_RD.numpy(), "logits": layer.router(x_RD).numpy() * 30}


def run(path: Path, feeds: dict[str, Array], num_threads: int = 2) -> Array:
    y: Array = open_session(path, num_threads).run(None, feeds)[0]
    return y


@pytest.mark.portable
@pytest.mark.parametrize(("experts", "bits"), CASES, ids=str)
def test_they_compute_what_pytorch_does_batch_invariantly(
    experts: Experts, bits: int, tmp_path: Path
) -> None:
    layer, own = mixture(experts, bits)
    path, feeds = save(tmp_path, own), tokens(layer, 70)
    found = run(path, feeds)
    for parameter in layer.router.parameters():
        parameter.data *= 30
    with torch.no_grad():
        expected = layer(torch.from_numpy(feeds["x"])).numpy()
    assert np.abs(found - expected).max() < (1e-4 if bits == 32 else 0.4) * expected.std()
    for some in ([3], [69, 3, 10], range(0, 70, 3)):
        part = {name: array[list(some)] for name, array in feeds.items()}
        np.testing.assert_array_equal(run(path, part, 1), found[list(some)])


@pytest.mark.parametrize(("experts", "bits"), [*CASES[1:4], *CASES[6:]], ids=str)
def test_all_kernels_compute_the_same_bits(experts: Experts, bits: int, tmp_path: Path) -> None:
    layer, own = mixture(experts, bits)
    path, feeds = save(tmp_path, own), tokens(layer, 23)
    check_all_kernels_agree(path, feeds)


def test_biases_of_another_size_are_an_error(tmp_path: Path) -> None:
    layer, own = mixture(BIASED, 32)
    own.down_bias_N = torch.zeros(3)
    with pytest.raises(Exception, match="weights of another size"):
        run(save(tmp_path, own), tokens(layer, 3))


def test_a_token_that_is_not_finite_spoils_no_other(tmp_path: Path) -> None:
    layer, own = mixture(GROUPED, 32)
    path, feeds = save(tmp_path, own), tokens(layer, 9)
    good = run(path, feeds)
    feeds["x"][4], feeds["logits"][4] = np.nan, np.nan
    found = run(path, feeds)
    assert not np.isfinite(found[4]).any()
    np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(good, 4, 0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"number": 0}, "no such experts"),
        ({"number": 6}, "weights of another size"),
        ({"per_token": 6}, "no such experts"),
        ({"groups": 2}, "no such experts"),
        ({"d_expert": 24}, "no such experts"),
        ({"up_layout": 10}, "no such experts"),
        ({"clamp": -1.0}, "no such gate"),
        ({"slope": float("inf")}, "no such gate"),
        ({"down_layout": -1}, "no such experts"),
        ({"up_layout": 7}, "no such experts"),
        ({"up_layout": 4, "up_input_bits": 4}, "no such experts"),
        ({"down_layout": 0, "down_input_bits": 32}, "no such experts"),
        ({"inputs": 80}, "weights of another size"),
    ],
    ids=str,
)
def test_experts_that_do_not_fit_are_errors_not_crashes(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    layer, own = mixture(PLAIN, 32)
    with pytest.raises(Exception, match=words):
        run(save(tmp_path, own, **changes), tokens(layer, 3))


@pytest.mark.portable
def test_each_head_has_a_matrix_of_its_own(tmp_path: Path) -> None:
    weight_NIO, x = torch.randn(3, 20, 32), torch.randn(37, 60)
    own = CustomHeadLinear(weight_NIO)
    attributes = {"heads": 3, "inputs": 20, "columns": 32}
    path = save_node(tmp_path, "HeadLinear", ["x"], {"records": own.records}, attributes)
    found = run(path, {"x": x.numpy()})
    np.testing.assert_allclose(found, by_head(x, weight_NIO).numpy(), atol=1e-4)
    np.testing.assert_array_equal(run(path, {"x": x[7:8].numpy()}, 1), found[7:8])
    with pytest.raises(Exception, match="heads of another width"):
        run(path, {"x": x[:, :40].numpy()})
