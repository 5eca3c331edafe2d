"""Recurrent networks become graphs that pass verification like others."""

from pathlib import Path

import torch

from quill.model.network.networks import make_network
from tests.export.tiny import export, make_checkpoint
from tests.operators import OWN, needs_operators
from tests.tiny_networks import RECURRENT


@needs_operators
def test_graphs_are_verified_against_pytorch_with_their_states(tmp_path: Path) -> None:
    manifest = export(tmp_path / "bundle", make_checkpoint(RECURRENT), "fp32", *OWN[:1]).manifest
    for graphs in manifest.graphs:
        assert graphs.one_token_steps
        assert graphs.cache_type == "float32", "rounding errors of a state add up"
        assert graphs.verification is not None
        assert graphs.invariance is not None
        assert graphs.invariance.holds
    with torch.device("meta"):
        expected = make_network(RECURRENT).num_parameters()
    assert manifest.sizes.num_parameters == expected
