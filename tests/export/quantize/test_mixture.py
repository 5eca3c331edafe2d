"""Which kind each matrix gets."""

import torch
from torch import Tensor

from quill.export.quantize.mixture import (
    FREE_BITS,
    MAX_BITS,
    Option,
    Statistics,
    choose,
    finer_rows,
    options,
)
from quill.export.quantize.quantizers import FoundKind
from quill.export.quantize.quill_layout import layout_bits

LOSSES: dict[FoundKind, float] = {"q4_0": 8, "q4_1": 5, "q5_0": 2, "q5_1": 1.5, "q8_0": 0.02}


def matrix(name: str, sensitivity: float, num_weights: float = 1000) -> list[Option]:
    return [
        Option(name, kind, layout_bits(kind) * num_weights, sensitivity * loss)
        for kind, loss in LOSSES.items()
    ]


def test_the_bits_that_are_free_go_where_they_save_the_most() -> None:
    found = choose([matrix("plain", 1), matrix("touchy", 100)], max_loss=1e9)
    assert found.kinds == {"plain": "q4_0", "touchy": "q5_0"}
    assert found.bits == FREE_BITS
    assert found.loss == 8 + 200


def test_more_bits_are_spent_as_long_as_too_much_is_lost() -> None:
    matrices = [matrix("plain", 1), matrix("touchy", 100)]
    found = choose(matrices, max_loss=100)
    assert found.loss <= 100
    assert found.bits > FREE_BITS
    assert found.kinds["touchy"] == "q8_0"


def test_what_can_not_be_reached_ends_at_the_most_bits() -> None:
    found = choose([matrix(str(i), 1) for i in range(20)], max_loss=0)
    assert MAX_BITS - 0.5 < found.bits <= MAX_BITS


def test_a_step_that_does_not_fit_leaves_bits_to_smaller_ones() -> None:
    found = choose([matrix("huge", 10, 1e6), matrix("small", 0.001)], max_loss=1e9)
    assert found.kinds == {"huge": "q4_0", "small": "q8_0"}


def test_kinds_that_are_not_worth_their_bits_are_passed_over() -> None:
    # From q4_0 to q5_0 each half a bit saves 3, and from q4_1 the same: q4_1 may be passed over,
    # and q5_1 saves little of what q8_0 does.
    assert choose([matrix("one", 1)], max_loss=3).kinds == {"one": "q5_0"}


def tried(name: str, sensitivity: Tensor) -> list[Option]:
    generator = torch.Generator().manual_seed(0)
    weight_NI = torch.randn(len(sensitivity), 64, generator=generator)
    return options(name, weight_NI, Statistics(sensitivity, torch.eye(64).unsqueeze(0)))


def test_the_few_tokens_that_matter_get_8_bits() -> None:
    sensitivity = torch.full((1024,), 1e-6)
    sensitivity[5::64] = 1.0
    found = choose([tried("embedding.weight", sensitivity)], max_loss=1e9)
    assert (found.kinds, found.num_finer) == (
        {"embedding.weight": "q4_0"},
        {"embedding.weight": 16},
    )
    assert found.bits == 4.5 + 8.5 / 64
    plain = {option.kind: option.loss for option in tried("decoder.0.x.weight", sensitivity)}
    assert found.loss < 0.02 * plain["q4_0"]
    rows_M = finer_rows(Statistics(sensitivity, torch.empty(0)), 16)
    assert rows_M.tolist() == list(range(5, 1024, 64))


def test_tokens_that_matter_alike_get_the_same_kind() -> None:
    found = choose([tried("embedding.weight", torch.ones(1024))], max_loss=1e9)
    assert not found.num_finer
