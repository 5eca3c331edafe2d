"""Batches: pure functions of (seed, step) that miss nothing and repeat nothing in an epoch."""

import pytest
import torch

from quill.model.data.batches import (
    IGNORED,
    PairBatches,
    PairTokens,
    TextBatches,
    TokenPair,
    collate,
    mix,
)
from quill.model.errors import CorpusError

SPECIAL = PairTokens(bos=1, eos=2, pad=0)


def make_text(seed: int = 0) -> TextBatches:
    return TextBatches(
        torch.arange(1000, dtype=torch.int32), context=16, num_sequences=3, seed=seed
    )


def make_pairs(seed: int = 0, batch_tokens: int = 40) -> PairBatches:
    pairs = [TokenPair([10 + i] * (1 + i % 7), [10 + i] * (1 + (i * 3) % 9)) for i in range(50)]
    return PairBatches(pairs, batch_tokens, SPECIAL, seed)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    forwards, backwards = make_text(), make_text()
    steps = range(2 * forwards.steps_per_epoch)
    seen = {step: forwards.batch(step).inputs_BT for step in steps}
    for step in reversed(steps):
        assert torch.equal(backwards.batch(step).inputs_BT, seen[step])
    assert not torch.equal(make_text(seed=1).batch(0).inputs_BT, seen[0])


def test_targets_are_the_inputs_one_token_on() -> None:
    batch = make_text().batch(5)
    assert torch.equal(batch.targets_BT, batch.inputs_BT + 1)


def test_an_epoch_of_text_sees_no_token_twice_and_nearly_all_of_them() -> None:
    batches = make_text()
    seen = torch.cat([batches.batch(s).inputs_BT.flatten() for s in range(batches.steps_per_epoch)])
    assert len(set(seen.tolist())) == len(seen)
    assert len(seen) >= 1000 - 4 * 16


def test_too_little_text_is_refused_with_the_numbers() -> None:
    with pytest.raises(CorpusError, match=r"33 tokens.*at least 65"):
        TextBatches(torch.arange(33), context=16, num_sequences=3, seed=0)


def test_an_epoch_of_pairs_sees_each_pair_once() -> None:
    batches = make_pairs()
    for epoch in range(2):
        first = epoch * batches.steps_per_epoch
        sources = [
            row[0].item()
            for step in range(first, first + batches.steps_per_epoch)
            for row in batches.batch(step).source_BS  # type: ignore[union-attr]
        ]
        assert sorted(sources) == [10 + i for i in range(50)]


def test_pairs_are_batched_by_token_count() -> None:
    batches = make_pairs()
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        assert batch.source_BS is not None
        rows = batch.inputs_BT.shape[0]
        longest = max(batch.inputs_BT.shape[1], batch.source_BS.shape[1])
        assert rows * longest <= 40 or rows == 1


def test_a_pair_is_framed_as_the_decoder_needs_it() -> None:
    batch = collate([TokenPair([7], [8, 9]), TokenPair([5, 6], [4])], SPECIAL)
    assert batch.source_BS is not None
    assert batch.source_mask_BS is not None
    assert batch.source_BS.tolist() == [[7, 2, 0], [5, 6, 2]]
    assert batch.source_mask_BS.tolist() == [[True, True, False], [True, True, True]]
    assert batch.inputs_BT.tolist() == [[1, 8, 9], [1, 4, 0]]
    assert batch.targets_BT.tolist() == [[8, 9, 2], [4, 2, IGNORED]]
    assert batch.num_targets == 5


def test_pieces_part_a_batch_without_loss() -> None:
    batch = make_pairs().batch(3)
    parts = [batch.micro_batch(index, 2) for index in range(2)]
    assert sum(part.num_targets for part in parts) == batch.num_targets
    assert torch.equal(parts[1].inputs_BT, batch.inputs_BT[1::2])


def test_mixed_seeds_differ_with_every_number() -> None:
    seeds = {mix(a, b, c) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125


def test_mixed_seeds_stay_what_they_were_or_old_runs_would_resume_on_other_batches() -> None:
    assert mix(1, 2, 3) == 0x6AE515C1C0AC7E37
