"""Turning the residual stream changes no answer, and leaves no loud channel."""

import dataclasses

import pytest
import torch

from export.rotation import can_turn, turn
from model.config import ModelConfig
from model.transformer import Transformer
from tests.export.tiny import GPT, LLAMA, SEQ2SEQ, make_checkpoint

IDS = torch.arange(3, 43).unsqueeze(0)


def own_model(config: ModelConfig) -> Transformer:
    checkpoint = make_checkpoint(config)
    own = {name: weight.clone() for name, weight in checkpoint.weights.items()}
    return dataclasses.replace(checkpoint, weights=own).build()


@torch.no_grad()
def hidden(model: Transformer) -> torch.Tensor:
    return model.hidden(IDS, model.uncached(None))


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_the_logits_are_the_same_afterwards(tied: bool) -> None:
    model = own_model(dataclasses.replace(LLAMA, tied_embeddings=tied))
    before = model.project(hidden(model))
    projection_VD = turn(model)
    after = hidden(model) @ projection_VD.T
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_one_loud_channel_becomes_a_little_of_all() -> None:
    model = own_model(LLAMA)
    model.embedding.weight[:, 7] *= 50
    loud_D = model.embedding(IDS).abs().amax(dim=(0, 1))
    turn(model)
    turned_D = model.embedding(IDS).abs().amax(dim=(0, 1))
    assert loud_D.max() > 20 * loud_D.median()
    assert turned_D.max() < 4 * turned_D.median()


def test_only_networks_whose_norms_do_not_mind_are_turned() -> None:
    assert can_turn(own_model(LLAMA))
    assert not can_turn(own_model(GPT))
    assert not can_turn(own_model(SEQ2SEQ))
