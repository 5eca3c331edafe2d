"""Recurrent translators from before the Transformer (RNN, GRU, LSTM).

Knows: cells, a bidirectional encoder, additive attention (Bahdanau, Cho and Bengio, 2014), a
decoder. Does not know: training, files, how a state is kept from step to step.

Each encoder layer scans the source in both directions, each with half of the state. The last
layer's state at a token is the token's annotation. The decoder starts from the final annotations
(the last of the forward scan, the first of the backward scan). With every token it gets a context:
the same final annotations (`fixed`: the source in one vector), or a mean of all annotations,
weighted by attention from the previous state (`bahdanau`).

As with attention, the network is written once: a `RecurrentStateAccess` finds and keeps states, and
export has one that emits operators (export/graph/recurrent.py).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quill.model.network.attention import CrossKeyValue, KeyValue, split_heads
from quill.model.network.config import CellKind, ModelConfig
from quill.model.network.network import Network

# B batch · T new tokens · S source tokens · D model size · H state size of a cell · I inputs
# G = gates x H · V vocabulary

NUM_GATES: dict[CellKind, int] = {"rnn": 1, "gru": 3, "lstm": 4}


class State(NamedTuple):
    """A cell's state after all tokens so far. Only an LSTM's c differs from h."""

    h: Tensor
    c: Tensor


def update(kind: CellKind, input_G: Tensor, state_G: Tensor, before: State) -> State:
    """The state after one more token. The gates: the input's part and the state's part of each."""
    if kind == "rnn":
        h = torch.tanh(input_G + state_G)
        return State(h, h)
    if kind == "gru":
        (reset, keep, new), (of_reset, of_keep, of_new) = input_G.chunk(3, -1), state_G.chunk(3, -1)
        keep = torch.sigmoid(keep + of_keep)
        new = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
        h = new + keep * (before.h - new)
        return State(h, h)
    write, keep, new, show = (input_G + state_G).chunk(4, -1)
    c = torch.sigmoid(keep) * before.c + torch.sigmoid(write) * torch.tanh(new)
    return State(torch.sigmoid(show) * torch.tanh(c), c)


class Cell(nn.Module):
    """A recurrent cell: `input` and `state` project a token and the previous state to the gates."""

    def __init__(self, kind: CellKind, num_inputs: int, size: int) -> None:
        super().__init__()
        self.kind: CellKind = kind
        self.size = size
        self.input = nn.Linear(num_inputs, NUM_GATES[kind] * size)
        self.state = nn.Linear(size, NUM_GATES[kind] * size)

    def initialize(self) -> None:
        """Orthogonal matrices keep the length of a state, and of the gradients through it."""
        for gate_HH in self.state.weight.chunk(NUM_GATES[self.kind]):
            nn.init.orthogonal_(gate_HH)
        nn.init.xavier_uniform_(self.input.weight)
        for bias in (self.input.bias, self.state.bias):
            nn.init.zeros_(bias)
        if self.kind == "lstm":  # the forget gate starts open
            nn.init.ones_(self.input.bias[self.size : 2 * self.size])

    def scan(self, x_BSI: Tensor) -> Tensor:
        """The states after each token, from a zero state: PyTorch's loop over the same formulas."""
        h_1BH = x_BSI.new_zeros(1, x_BSI.shape[0], self.size)
        weights = [self.input.weight, self.state.weight, self.input.bias, self.state.bias]
        settings = (True, 1, 0.0, self.training, False, True)  # biases, layers …, batch first
        if self.kind == "lstm":
            return torch.lstm(x_BSI, (h_1BH, h_1BH), weights, *settings)[0]
        loop = torch.gru if self.kind == "gru" else torch.rnn_tanh
        return loop(x_BSI, h_1BH, weights, *settings)[0]


class Additive(nn.Module):
    """Bahdanau's attention: a small network scores each annotation against a state."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size, bias=False)
        self.score = nn.Parameter(torch.empty(size))

    def weights(self, query_BD: Tensor, keys_BSD: Tensor, mask_BS: Tensor) -> Tensor:
        scores_BS = torch.tanh(query_BD.unsqueeze(1) + keys_BSD) @ self.score
        return scores_BS.masked_fill(~mask_BS, -math.inf).softmax(dim=-1)


class RecurrentScan(Protocol):
    """How a cell scans sources."""

    def scan(self, cell: Cell, x: Tensor, *, backwards: bool) -> Tensor:
        """The states at each token."""


class RecurrentStateAccess(Protocol):
    """How the decoder reads and writes the states of its cells, and reads the source."""

    def steps(self, x: Tensor) -> Sequence[Tensor]:
        """New tokens in steps, so that each finds the state before it."""

    def stack(self, steps: Sequence[Tensor]) -> Tensor:
        """The results of all steps, in the layout of new tokens."""

    def final_annotations(self) -> Tensor:
        """The source's last annotation forwards and first one backwards."""

    def attend(self, attention: Additive, query: Tensor) -> Tensor:
        """The weighted mean of annotations for a step's tokens."""

    def previous(self, layer: int) -> State: ...

    def update(self, cell: Cell, layer: int, input_G: Tensor, before: State) -> Tensor:
        """Computes and writes the new state; returns its h."""

    def tanh(self, x: Tensor) -> Tensor: ...


class PaddedScan:
    """Scans a padded batch of sources of different lengths."""

    def __init__(self, mask_BS: Tensor) -> None:
        place_S = torch.arange(mask_BS.shape[1], device=mask_BS.device)
        last_B1 = mask_BS.sum(dim=1, keepdim=True) - 1
        self._reversed_BS = torch.where(place_S <= last_B1, last_B1 - place_S, place_S)

    def scan(self, cell: Cell, x_BSI: Tensor, *, backwards: bool) -> Tensor:
        if not backwards:
            return cell.scan(x_BSI)
        return self._reverse(cell.scan(self._reverse(x_BSI)))

    def _reverse(self, x_BSI: Tensor) -> Tensor:
        return x_BSI.gather(1, self._reversed_BS.unsqueeze(-1).expand_as(x_BSI))


class CachedStates:
    """The states after every token of a batch, for training and for decoding."""

    def __init__(self, config: ModelConfig, cross: CrossKeyValue) -> None:
        self._cross = cross
        self._head_size = config.head_size
        self._states: list[list[State]] = [[] for _ in range(config.num_layers)]
        self.weights: list[Tensor] = []  # of each step's attention: (B, S)

    def steps(self, x_BTD: Tensor) -> Sequence[Tensor]:
        return x_BTD.unbind(1)

    def stack(self, steps: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(steps), dim=1)

    def final_annotations(self) -> Tensor:
        annotations_BSD = self._cross.layers[0].v_BKSH.squeeze(1)
        half = annotations_BSD.shape[-1] // 2
        last_B11 = (self._cross.mask_BS.sum(dim=1) - 1).view(-1, 1, 1).expand(-1, 1, half)
        forwards_BH = annotations_BSD[..., :half].gather(1, last_B11).squeeze(1)
        return torch.cat((forwards_BH, annotations_BSD[:, 0, half:]), dim=-1)

    def attend(self, attention: Additive, query_BD: Tensor) -> Tensor:
        keys_BSD, annotations_BSD = (side.squeeze(1) for side in self._cross.layers[0])
        weights_BS = attention.weights(query_BD, keys_BSD, self._cross.mask_BS)
        self.weights.append(weights_BS)
        return (weights_BS.unsqueeze(1) @ annotations_BSD).squeeze(1)

    def previous(self, layer: int) -> State:
        if self._states[layer]:
            return self._states[layer][-1]
        initial_BD = self.final_annotations()
        return State(initial_BD, torch.zeros_like(initial_BD))

    def update(self, cell: Cell, layer: int, input_BG: Tensor, before: State) -> Tensor:
        state = update(cell.kind, input_BG, cell.state(before.h), before)
        self._states[layer].append(state)
        return state.h

    def tanh(self, x_BTD: Tensor) -> Tensor:
        return torch.tanh(x_BTD)

    def key_value(self, layer: int) -> KeyValue:
        """h as keys, c as values."""
        sides = (torch.stack(list(side), dim=1) for side in zip(*self._states[layer], strict=True))
        return KeyValue(*(split_heads(side_BTD, self._head_size) for side_BTD in sides))

    def reorder(self, order_B: Tensor) -> None:
        self._states = [
            [State(h_BD[order_B], c_BD[order_B]) for h_BD, c_BD in states]
            for states in self._states
        ]
        self._cross = self._cross.reordered(order_B)


class Recurrent(Network):
    """Embeddings, a bidirectional encoder, a decoder with a context."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.recurrence is not None
        self.config = config
        kind, size = config.recurrence.cell, config.d_model
        self.embedding = nn.Embedding(config.vocab_size, size)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(
            nn.ModuleList(Cell(kind, size, size // 2) for _ in ("forwards", "backwards"))
            for _ in range(config.num_encoder_layers)
        )
        self.decoder = nn.ModuleList(Cell(kind, size, size) for _ in range(config.num_layers))
        self.context = nn.Linear(size, NUM_GATES[kind] * size, bias=False)
        self.attention = Additive(size) if config.recurrence.context == "bahdanau" else None
        self.out = nn.Linear(3 * size, size)
        self.projection: nn.Linear | None = None
        if not config.tied_embeddings:
            self.projection = nn.Linear(size, config.vocab_size, bias=False)
        self.output_bias: nn.Parameter | None = None
        if config.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Cell):
                module.initialize()
        nn.init.normal_(self.embedding.weight, std=self.config.d_model**-0.5)
        if self.attention is not None:
            nn.init.normal_(self.attention.score, std=self.config.d_model**-0.5)

    def compute_tables(self) -> None:
        """There are none."""

    def encode(self, source_BS: Tensor, mask_BS: Tensor) -> CrossKeyValue:
        """The attention's keys and the annotations; only the first layer's are used."""
        memory_BSD = self.memory(source_BS, PaddedScan(mask_BS))
        first = [self.keys(memory_BSD), memory_BSD]
        first = [split_heads(each, self.config.head_size) for each in first]
        zeros = [torch.zeros_like(each) for each in first]
        others = [KeyValue(*zeros)] * (self.config.num_layers - 1)
        return CrossKeyValue([KeyValue(*first), *others], mask_BS)

    def memory(self, source: Tensor, scan: RecurrentScan) -> Tensor:
        """The annotations, of a batch or of packed sources."""
        x = self._embed(source)
        for number, layer in enumerate(self.encoder):
            assert isinstance(layer, nn.ModuleList)
            x = self.dropout(x) if number else x
            both = [
                scan.scan(_cell(cell), x, backwards=backwards)
                for cell, backwards in zip(layer, (False, True), strict=True)
            ]
            x = torch.cat(both, dim=-1)
        return x

    def keys(self, memory: Tensor) -> Tensor:
        """What attention compares queries with."""
        if self.attention is None:
            return memory
        keys: Tensor = self.attention.key(memory)
        return keys

    def hidden(self, ids: Tensor, state_access: RecurrentStateAccess) -> Tensor:
        """The decoder at every new token."""
        x = self._embed(ids)
        fixed = state_access.final_annotations() if self.attention is None else None
        states, contexts = [], []
        for gates in state_access.steps(_cell(self.decoder[0]).input(x)):
            context = fixed
            if self.attention is not None:
                last = state_access.previous(len(self.decoder) - 1)
                context = state_access.attend(self.attention, self.attention.query(last.h))
            assert context is not None
            states.append(self._step(gates + self.context(context), state_access))
            contexts.append(context)
        seen = torch.cat((state_access.stack(states), state_access.stack(contexts), x), dim=-1)
        y: Tensor = self.dropout(state_access.tanh(self.out(seen)))
        return y

    def _step(self, gates: Tensor, state_access: RecurrentStateAccess) -> Tensor:
        """One token through all layers."""
        h = gates
        for number, layer in enumerate(self.decoder):
            cell, before = _cell(layer), state_access.previous(number)
            gates = cell.input(h) if number else gates
            h = self.dropout(state_access.update(cell, number, gates, before))
        return h

    @property
    def output_weight_VD(self) -> Tensor:
        return self.embedding.weight if self.projection is None else self.projection.weight

    def project(self, x_BTD: Tensor) -> Tensor:
        return F.linear(x_BTD, self.output_weight_VD, self.output_bias)

    def uncached(self, cross: CrossKeyValue | None = None) -> CachedStates:
        return self.cached(cross)

    def cached(self, cross: CrossKeyValue | None = None) -> CachedStates:
        assert cross is not None, "a recurrent decoder needs an encoded source"
        return CachedStates(self.config, cross)

    def _embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.config.scale_embeddings:
            x = x * math.sqrt(self.config.d_model)
        y: Tensor = self.dropout(x)
        return y


def _cell(module: nn.Module) -> Cell:
    assert isinstance(module, Cell)
    return module
