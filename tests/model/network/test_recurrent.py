"""Recurrent networks: a step by hand, PyTorch's own cells, padding, caches, attention."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from quill.model.network.config import CellKind, ContextKind, ModelConfig, Recurrence
from quill.model.network.presets import preset
from quill.model.network.recurrent import Additive, Cell, Recurrent, State, update

CELLS: list[CellKind] = ["rnn", "gru", "lstm"]
CONTEXTS: list[ContextKind] = ["fixed", "bahdanau"]
VOCAB_SIZE = 40


def make_model(cell: CellKind, context: ContextKind, num_layers: int = 2) -> Recurrent:
    config: ModelConfig = dataclasses.replace(
        preset("gru-bahdanau-tiny"),
        vocab_size=VOCAB_SIZE,
        d_model=16,
        head_size=16,
        d_ff=16,
        num_layers=num_layers,
        num_encoder_layers=num_layers,
        recurrence=Recurrence(cell=cell, context=context),
    )
    torch.manual_seed(1)
    model = Recurrent(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def ids(*shape: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_plain_recurrent_step_by_hand() -> None:
    """h' = tanh(W x + U h + b), with numbers that a person can follow.

    W x = (1·1 + 0·2, 2·1 - 1·2) = (1, 0); U h = (½·4 + 0·2, 0·4 + ½·2) = (2, 1); b = (-3, 0).
    Their sum is (0, 1), and the tanh of that is (0, 0.7616).
    """
    cell = Cell("rnn", num_inputs=2, size=2)
    with torch.no_grad():
        cell.input.weight.copy_(torch.tensor([[1.0, 0.0], [2.0, -1.0]]))
        cell.input.bias.copy_(torch.tensor([-3.0, 0.0]))
        cell.state.weight.copy_(torch.tensor([[0.5, 0.0], [0.0, 0.5]]))
        cell.state.bias.zero_()
    x, h = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 2.0]])
    after = update("rnn", cell.input(x), cell.state(h), State(h, h))
    assert cell.input(x).tolist() == [[-2.0, 0.0]]
    assert cell.state(h).tolist() == [[2.0, 1.0]]
    assert after.h.tolist() == [[0.0, pytest.approx(0.7615942)]]


@torch.no_grad()
@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_token_by_token_is_pytorchs_own_loop(kind: CellKind) -> None:
    torch.manual_seed(0)
    cell, x_BSI = Cell(kind, 6, 8), torch.randn(3, 7, 6)
    zeros = torch.zeros(3, 8)
    state = State(zeros, zeros)
    for step, x_BI in enumerate(x_BSI.unbind(1)):
        state = update(kind, cell.input(x_BI), cell.state(state.h), state)
        assert torch.allclose(state.h, cell.scan(x_BSI)[:, step], atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_padding_beside_longer_sources_changes_nothing(
    cell: CellKind, context: ContextKind
) -> None:
    model, source, target = make_model(cell, context), ids(2, 9), ids(2, 5)
    mask = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])
    together = model(target, model.encode(source, mask))
    for row, length in enumerate((9, 4)):
        own = source[row : row + 1, :length]
        alone = model(target[row : row + 1], model.encode(own, torch.ones_like(own).bool()))
        assert torch.allclose(together[row], alone[0], atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_state_that_was_kept_gives_the_logits_of_reading_all_again(
    cell: CellKind, context: ContextKind
) -> None:
    model, target = make_model(cell, context), ids(2, 6)
    source = ids(2, 5)
    cross = model.encode(source, torch.ones_like(source).bool())
    whole, memory = model(target, cross), model.cached(cross)
    pieces = [model.hidden(piece, memory) for piece in torch.tensor_split(target, (1, 4), dim=1)]
    assert torch.allclose(model.project(torch.cat(pieces, dim=1)), whole, atol=1e-5)
    assert memory.key_value(1).k_BKSH.shape == (2, 1, 6, 16)
    # Rows change places: what follows is as if the other had been there from the beginning.
    memory.reorder(torch.tensor([1, 1]))
    after = model.project(model.hidden(ids(2, 1), memory))
    assert torch.equal(after[0], after[1]) == torch.equal(ids(2, 1)[0], ids(2, 1)[1])
    longer = torch.cat((target[1:], ids(2, 1)[:1]), dim=1)
    own = model.encode(source[1:], torch.ones_like(source[1:]).bool())
    assert torch.allclose(after[0, -1], model(longer, own)[0, -1], atol=1e-5)


@torch.no_grad()
def test_attention_weighs_the_real_tokens_and_a_fixed_context_none() -> None:
    model, source, mask = make_model("gru", "bahdanau"), ids(1, 4), torch.ones(1, 4).bool()
    mask[0, 3] = False
    memory = model.cached(model.encode(source, mask))
    model.hidden(ids(1, 3), memory)
    weights = torch.stack(memory.weights)
    assert weights.shape == (3, 1, 4)
    assert torch.allclose(weights.sum(-1), torch.ones(3, 1))
    assert (weights[..., 3] == 0).all()
    fixed = make_model("gru", "fixed")
    memory = fixed.cached(fixed.encode(source, mask))
    fixed.hidden(ids(1, 3), memory)
    assert not memory.weights


@torch.no_grad()
def test_additive_attention_by_hand() -> None:
    """Scores are v·tanh(q + k): with v = (ln 3, 0) and tanh of 0 and of far above, weights are
    1 : 3."""
    attention = Additive(2)
    attention.score.copy_(torch.tensor([3.0, 1.0]).log())
    keys = torch.tensor([[[0.0, 5.0], [50.0, 5.0]]])
    weights = attention.weights(torch.zeros(1, 2), keys, torch.ones(1, 2).bool())
    assert torch.allclose(weights, torch.tensor([[0.25, 0.75]]))


def test_a_state_begins_by_keeping_its_length() -> None:
    cell = Cell("lstm", 8, 8)
    cell.initialize()
    with torch.no_grad():
        for gate in cell.state.weight.chunk(4):
            assert torch.allclose(gate @ gate.T, torch.eye(8), atol=1e-5)
        assert cell.input.bias.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16
