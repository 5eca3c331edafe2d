"""The network: cached or not, padded or not, it computes the same."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from quill.model.network.attention import EncoderAttention
from quill.model.network.config import ModelConfig
from quill.model.network.transformer import Transformer
from tests.tiny_networks import randomized, tiny

SMALL = tiny(23, 16, num_kv_heads=4)
SEQ2SEQ = dataclasses.replace(SMALL, family="seq2seq", num_encoder_layers=2)


def build(config: ModelConfig, **changes: Any) -> Transformer:
    return randomized(dataclasses.replace(config, **changes))


def tokens(num_sequences: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SMALL.vocab_size, (num_sequences, length), generator=generator)


POSITIONS = ("sinusoidal", "learned", "rotary")
NORMS = ("layer", "rms")
PLACEMENTS = ("pre", "post")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "swiglu")


def source(num_sequences: int) -> tuple[Tensor, Tensor]:
    """Source tokens and a mask that hides the end of the last row."""
    mask = torch.ones(num_sequences, 7, dtype=torch.bool)
    mask[-1, 5:] = False
    return tokens(num_sequences, 7, seed=1), mask


@torch.no_grad()
def assert_cached_agrees(model: Transformer) -> None:
    ids = tokens(2, 10)
    cross = model.encode(*source(2)) if model.config.family == "seq2seq" else None
    uncached = model(ids, cross)
    attn_impl = model.cached(cross)
    steps = [
        model.project(model.hidden(part, attn_impl)) for part in torch.split(ids, [5, 1, 1, 3], 1)
    ]
    assert torch.allclose(torch.cat(steps, dim=1), uncached, atol=1e-4)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("base", [SMALL, SEQ2SEQ], ids=["causal", "seq2seq"])
def test_cached_and_uncached_agree_for_every_kind_of_network(
    base: ModelConfig, positions: str
) -> None:
    for norm, placement, activation in itertools.product(NORMS, PLACEMENTS, ACTIVATIONS):
        biased = norm == "layer"
        for num_kv_heads in (4, 2, 1):
            model = build(
                base,
                positions=positions,
                norm=norm,
                norm_placement=placement,
                activation=activation,
                num_kv_heads=num_kv_heads,
                qkv_bias=biased,
                attention_out_bias=biased,
                ff_bias=biased,
                tied_embeddings=biased,
                scale_embeddings=placement == "post",
            )
            assert_cached_agrees(model)


def test_cached_and_uncached_agree_where_scores_have_a_bias_by_distance() -> None:
    relative = {"relative_buckets": 8, "relative_distance": 12, "attention_scale": 1.0}
    assert_cached_agrees(build(SEQ2SEQ, positions="none", embedding_norm=True, **relative))


def test_cached_and_uncached_agree_where_heads_are_wider_than_the_model() -> None:
    assert_cached_agrees(build(SMALL, num_heads=6, num_kv_heads=3, head_size=10))


@torch.no_grad()
def test_cached_rows_can_change_places() -> None:
    model = build(SEQ2SEQ)
    ids, rows = tokens(3, 6), torch.tensor([2, 0, 0, 1])
    cross = model.encode(*source(3))
    attn_impl = model.cached(cross)
    model.hidden(ids[:, :5], attn_impl)
    attn_impl.reorder(rows)
    moved = model.hidden(ids[rows, 5:], attn_impl)
    stayed = model.hidden(ids, model.uncached(cross))[:, 5:]
    assert torch.allclose(moved, stayed[rows], atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_token_sees_its_past_and_not_its_future(positions: str) -> None:
    model = build(SMALL, positions=positions)
    ids = tokens(1, 8)
    changed = ids.clone()
    changed[0, 4] = (ids[0, 4] + 1) % SMALL.vocab_size
    difference = (model(ids) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:4].max().item() == 0.0
    assert difference[4:].min().item() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("positions", POSITIONS)
def test_the_order_of_earlier_tokens_matters(positions: str) -> None:
    # One layer: with more, even a network without positions knows how much each token saw.
    model = build(SMALL, positions=positions, num_layers=1)
    ids = torch.tensor([[1, 2, 3, 4], [3, 1, 2, 4]])
    forward, shuffled = model(ids)[:, -1]
    assert not torch.allclose(forward, shuffled, atol=1e-3)


@torch.no_grad()
def test_every_token_of_a_source_sees_all_of_it() -> None:
    model = build(SEQ2SEQ)
    source_ids, _ = source(1)
    changed = source_ids.clone()
    changed[0, -1] = (source_ids[0, -1] + 1) % SMALL.vocab_size
    mask = torch.ones_like(source_ids, dtype=torch.bool)
    keys, changed_keys = (model.encode(ids, mask).layers[0].k_BKSH for ids in (source_ids, changed))
    assert (keys - changed_keys).abs().amax(dim=(0, 1, 3)).min().item() > 1e-3


@torch.no_grad()
def test_padding_of_a_source_changes_nothing() -> None:
    model = build(SEQ2SEQ)
    source_ids, mask = source(2)
    ids = tokens(2, 4)
    padded = model(ids, model.encode(source_ids, mask))[1:]
    alone = model(ids[1:], model.encode(source_ids[1:, :5], mask[1:, :5]))
    assert torch.allclose(padded, alone, atol=1e-5)


@torch.no_grad()
def test_a_seq2seq_answer_depends_on_its_source() -> None:
    model = build(SEQ2SEQ)
    source_ids, mask = source(2)
    first, second = (model(tokens(1, 4), model.encode(source_ids[[n]], mask[[n]])) for n in (0, 1))
    assert not torch.allclose(first, second, atol=1e-2)


def test_tied_embeddings_are_one_tensor_counted_once() -> None:
    tied, untied = build(SMALL), build(SMALL, tied_embeddings=False)
    extra = SMALL.vocab_size * SMALL.d_model
    assert untied.num_parameters() - tied.num_parameters() == extra
    assert tied.output_weight_VD is tied.embedding.weight
    assert untied.output_weight_VD is not untied.embedding.weight


@pytest.mark.parametrize("base", [SMALL, SEQ2SEQ], ids=["causal", "seq2seq"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_parameter_takes_part(base: ModelConfig, placement: str) -> None:
    model = build(base, norm_placement=placement, norm="layer", positions="learned", ff_bias=True)
    cross = model.encode(*source(2)) if base.family == "seq2seq" else None
    model(tokens(2, SMALL.context), cross).square().sum().backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert unused == []


def test_dropout_acts_in_training_only() -> None:
    model = build(SMALL, dropout=0.5)
    ids = tokens(1, 8)
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


def test_a_fresh_network_knows_nothing() -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(SMALL, vocab_size=1000, d_model=64)
    log_probs = Transformer(config)(tokens(4, 16)).log_softmax(dim=-1)
    assert log_probs.mean().item() == pytest.approx(-6.9078, abs=0.1)  # log(1 / 1000)


ENCODER = dataclasses.replace(
    SMALL,
    family="encoder",
    num_layers=0,
    num_encoder_layers=2,
    positions="learned",
    num_segments=2,
    embedding_norm=True,
    masked_head=True,
    output_bias=True,
)


def test_an_encoders_tokens_see_both_ways_and_no_padding() -> None:
    torch.manual_seed(0)
    model = Transformer(ENCODER).eval()
    ids = torch.randint(ENCODER.vocab_size, (1, 6))
    with torch.no_grad():
        whole = model.hidden_states(ids)
        changed = ids.clone()
        changed[0, 5] = (changed[0, 5] + 1) % ENCODER.vocab_size
        assert not torch.allclose(model.hidden_states(changed)[0, 0], whole[0, 0])
        padded = torch.cat((ids, ids), dim=1)[:, :8]
        mask = torch.arange(8)[None] < 6
        torch.testing.assert_close(model.hidden_states(padded, mask)[:, :6], whole)
        assert model.project(whole).shape == (1, 6, ENCODER.vocab_size)


def test_without_segments_all_tokens_are_of_the_first() -> None:
    torch.manual_seed(0)
    model = Transformer(ENCODER).eval()
    ids = torch.randint(ENCODER.vocab_size, (1, 6))
    attn_impl = EncoderAttention(ENCODER, None, None)
    with torch.no_grad():
        first = model.memory(ids, attn_impl, torch.zeros_like(ids))
        assert torch.equal(model.hidden_states(ids), first)
        assert not torch.allclose(model.memory(ids, attn_impl, torch.ones_like(ids)), first)
