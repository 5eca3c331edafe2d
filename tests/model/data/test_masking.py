"""Hidden tokens: BERT's shares, never a mark, and a pure function of (seed, step)."""

import pytest
import torch

from quill.model.data.batches import IGNORED, TextBatches
from quill.model.data.masking import CUTS, MaskedBatches, MaskingTokens, framed, mask_tokens
from quill.model.data.tokenizer import ENCODER_SPECIAL_TOKENS, SpecialTokens, byte_tokenizer
from quill.model.errors import CorpusError

MARKS = MaskingTokens(first=0, last=1, mask=2, vocab_size=500)


def make(seed: int = 0) -> MaskedBatches:
    ids = 3 + torch.arange(2000, dtype=torch.int32) % 497
    return MaskedBatches(TextBatches(ids, context=12, num_sequences=4, seed=seed), MARKS, seed)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    seen = {step: make().batch(step) for step in range(6)}
    again = make()
    for step in reversed(range(6)):
        batch = again.batch(step)
        assert torch.equal(batch.inputs_BT, seen[step].inputs_BT)
        assert torch.equal(batch.targets_BT, seen[step].targets_BT)
    assert not torch.equal(make(seed=1).batch(0).targets_BT, seen[0].targets_BT)


def test_shares_are_those_of_the_paper() -> None:
    ids_BT = torch.randint(3, 500, (200, 500), generator=torch.Generator().manual_seed(0))
    batch = mask_tokens(ids_BT, MARKS, torch.Generator().manual_seed(1))
    chosen = batch.targets_BT != IGNORED
    masked = batch.inputs_BT == MARKS.mask
    kept = chosen & (batch.inputs_BT == ids_BT)
    num = int(chosen.sum())
    assert num / ids_BT.numel() == pytest.approx(0.15, abs=0.005)
    assert int(masked.sum()) / num == pytest.approx(0.8, abs=0.02)
    assert int(kept.sum()) / num == pytest.approx(0.1, abs=0.02)
    assert torch.equal(batch.targets_BT[chosen], ids_BT[chosen])
    assert torch.equal(batch.inputs_BT[~chosen], ids_BT[~chosen]), "the others stay"


def test_every_text_is_framed_and_has_something_to_find() -> None:
    lengths = set()
    for step in range(40):
        batch = make().batch(step)
        lengths.add(batch.inputs_BT.shape[1])
        assert (batch.inputs_BT[:, 0] == MARKS.first).all()
        assert (batch.inputs_BT[:, -1] == MARKS.last).all()
        assert ((batch.targets_BT != IGNORED).sum(dim=1) >= 1).all()
    assert lengths == {12 // cut + 2 for cut in CUTS}, "long texts and short ones"


def test_marks_are_never_hidden() -> None:
    ids_BT = framed(torch.tensor([[MARKS.first, 7, MARKS.mask, MARKS.last]]), MARKS)
    for seed in range(20):
        batch = mask_tokens(ids_BT, MARKS, torch.Generator().manual_seed(seed))
        assert (batch.targets_BT != IGNORED).nonzero().tolist() == [[0, 2]]


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    special = byte_tokenizer(ENCODER_SPECIAL_TOKENS).special
    assert special == SpecialTokens(bos=0, eos=1, mask=2)
    assert MaskingTokens.of(special, 259).mask == 2
    with pytest.raises(CorpusError, match=r"no \[CLS\], \[SEP\] and \[MASK\]"):
        MaskingTokens.of(byte_tokenizer().special, 257)
