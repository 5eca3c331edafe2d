"""Recurrent networks become graphs that are proven like any other's."""

import dataclasses
from pathlib import Path

import pytest
import torch

from quill.export.errors import UnsupportedModelError
from quill.export.graph.prepare import check_exportable
from quill.model.network.config import ModelConfig, Recurrence
from quill.model.network.networks import make_network
from tests.export.tiny import export, make_checkpoint
from tests.operators import OWN, needs_operators

RECURRENT = ModelConfig(
    family="seq2seq",
    vocab_size=272,
    context=64,
    d_model=64,
    num_layers=2,
    num_encoder_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_size=64,
    d_ff=64,
    positions="none",
    norm="layer",
    activation="relu",
    output_bias=True,
    tied_embeddings=False,
    recurrence=Recurrence(cell="lstm", context="bahdanau"),
)


@needs_operators
def test_graphs_are_proven_against_pytorch_states_and_all(tmp_path: Path) -> None:
    manifest = export(tmp_path / "bundle", make_checkpoint(RECURRENT), "fp32", *OWN[:1]).manifest
    for graphs in manifest.graphs:
        assert graphs.one_token_steps
        assert graphs.cache_type == "float32", "a state that is rounded is rounded again and again"
        assert graphs.verification is not None
        assert graphs.invariance is not None
        assert graphs.invariance.holds
    with torch.device("meta"):
        expected = make_network(RECURRENT).num_parameters()
    assert manifest.sizes.num_parameters == expected


def test_a_state_that_the_operators_cannot_halve_is_refused() -> None:
    config = dataclasses.replace(RECURRENT, d_model=48, head_size=48, d_ff=48)
    with pytest.raises(UnsupportedModelError, match=r"d_model is 48; .* a multiple of 32"):
        check_exportable(config)
