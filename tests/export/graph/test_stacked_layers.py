"""Experts and latent attention from a checkpoint to a bundle that is proven."""

import dataclasses
from pathlib import Path

import onnx

from quill.export.graph.quill_layers import VERSION
from quill.model.network.config import Experts, Latent
from tests.export.tiny import export, make_checkpoint
from tests.operators import OWN
from tests.tiny_networks import LLAMA

EXPERTS = Experts(number=4, per_token=2, d_expert=32, num_shared=1, balanced=True, dense_layers=1)
LATENT = Latent(rank=16, query_rank=32, rope_size=16, nope_size=16, value_size=16)


def test_both_are_proven_with_the_latents_that_the_cache_holds(tmp_path: Path) -> None:
    config = dataclasses.replace(
        LLAMA, num_kv_heads=4, head_size=32, experts=EXPERTS, latent=LATENT
    )
    exported = export(tmp_path / "out", make_checkpoint(config), "fp32", *OWN[:1])
    for graphs in exported.manifest.graphs:
        assert graphs.invariance is not None
        assert graphs.invariance.holds
        assert graphs.decoder is not None
        model = onnx.load(exported.directory / graphs.decoder, load_external_data=False)
        names = [node.op_type for node in model.graph.node if node.domain == "quill"]
        assert {"Experts", "HeadLinear", "Attention"} <= set(names)
        assert {opset.domain: opset.version for opset in model.opset_import}["quill"] == VERSION
