"""Scores: every token counts once, and a uniform model costs log2(V) bits a token."""

import math

import pytest
import torch

from quill.model.data.batches import IGNORED
from quill.model.network.transformer import Transformer
from quill.model.training.scoring import Score, score_text, text_batches
from tests.tiny_networks import tiny

CONFIG = tiny(32, 8, num_layers=1, num_heads=2, head_size=8, d_ff=16)


@pytest.mark.parametrize("length", [2, 8, 9, 10, 17, 33, 40])
@pytest.mark.parametrize("stride", [1, 3, 4, 8])
def test_every_token_but_the_first_counts_once(length: int, stride: int) -> None:
    ids = torch.arange(100, 100 + length)
    counted = [
        token
        for batch in text_batches(ids, 8, stride, num_sequences=2)
        for token in batch.targets_BT[batch.targets_BT != IGNORED].tolist()
    ]
    assert sorted(counted) == list(range(101, 100 + length))


def test_overlapping_windows_give_each_token_more_past() -> None:
    ids = torch.arange(100, 140)
    for batch in text_batches(ids, 8, 4, num_sequences=1)[1:]:
        first_counted = int((batch.targets_BT[0] != IGNORED).nonzero()[0])
        assert first_counted == 4


def test_a_uniform_model_costs_log2_of_the_vocabulary() -> None:
    model = Transformer(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ids = torch.randint(0, 32, (50,), generator=torch.Generator().manual_seed(0))
    score = score_text(model, ids, num_bytes=98, device=torch.device("cpu"), stride=4)
    assert score.num_tokens == 49
    assert score.perplexity == pytest.approx(32, rel=1e-5)
    assert score.bits_per_byte == pytest.approx(5 * 49 / 98, rel=1e-5)


def test_a_sample_of_windows_estimates_the_bytes_it_stands_for() -> None:
    model = Transformer(CONFIG).eval()
    ids = torch.randint(0, 32, (81,), generator=torch.Generator().manual_seed(0))
    score = score_text(model, ids, num_bytes=160, device=torch.device("cpu"), stride=16)
    assert score.num_tokens == 40
    assert score.num_bytes == pytest.approx(80)


def test_bits_per_byte_and_perplexity_follow_their_definitions() -> None:
    score = Score(nats=math.log(2) * 30, num_tokens=10, num_bytes=20)
    assert score.bits_per_byte == pytest.approx(1.5)
    assert score.perplexity == pytest.approx(8)
