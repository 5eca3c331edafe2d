"""Recurrent networks as graphs: states in the blocks of keys and values.

Knows: Quill's operators for states. Does not know: the cells' formulas, precisions, files.

The state after the token at position p is at position p of its sequence's blocks: h among the keys,
c among the values. Code that shares, copies or frees blocks needn't know the difference. A source's
blocks have the annotations as values and, for attention, the keys; only the first layer's are used.
A step has one token of a sequence: the previous token must have written its state.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from quill.export.graph.attention import Packed, Pool, Source, attention_attributes, store
from quill.export.graph.quill_layers import emit
from quill.model.network.config import CellKind, ModelConfig
from quill.model.network.recurrent import Additive, Cell, Recurrent, State

# S sequences · T new tokens of all, as many · B blocks of the longest · D model size
# H state size of a cell · G gates x H

KINDS: dict[CellKind, int] = {"rnn": 0, "gru": 1, "lstm": 2}


class StateProduct(nn.Module):
    """A cell's matrix for states, transposed for the operator's loop: states x gates."""

    weight_HG: Tensor
    bias_G: Tensor

    def __init__(self, state: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight_HG", state.weight.detach().t().contiguous())
        self.register_buffer("bias_G", state.bias.detach())


class PackedScan:
    """Scans packed sources, each from a zero state."""

    def __init__(self, starts_S: Tensor) -> None:
        self._starts_S = starts_S

    def scan(self, cell: Cell, x_TD: Tensor, *, backwards: bool) -> Tensor:
        state = cell.state
        assert isinstance(state, StateProduct)
        input_TG = cell.input(x_TD)
        inputs = [input_TG, state.weight_HG, state.bias_G, self._starts_S]
        attributes = {"kind": KINDS[cell.kind], "size": cell.size, "backwards": int(backwards)}
        shape = [input_TG.shape[0], cell.size]
        return emit("quill::Recurrence", inputs, attributes, shape)[0]


class PackedStateAccess:
    """One new token of each sequence, whose previous state is in its blocks."""

    def __init__(
        self,
        config: ModelConfig,
        packed: Packed,
        past_S: Tensor,
        table_SB: Tensor,
        pool: Pool,
        source: Source,
    ) -> None:
        self._config = config
        self._starts_S = packed.starts_S
        self._where = (packed.starts_S, past_S, table_SB)
        self._pool = pool
        self._source = source
        self._shape = [packed.positions_T.shape[0], config.d_model]
        self._final: Tensor | None = None
        self._previous: dict[int, State] = {}

    def steps(self, x_TD: Tensor) -> Sequence[Tensor]:
        return [x_TD]

    def stack(self, steps: Sequence[Tensor]) -> Tensor:
        return steps[0]

    def final_annotations(self) -> Tensor:
        if self._final is None:
            inputs = [self._pool.layers[0].values, self._starts_S, *self._source]
            self._final = self._emit("quill::Ends", inputs, 1)[0]
        return self._final

    def attend(self, attention: Additive, query_TD: Tensor) -> Tensor:
        where = (self._starts_S, *self._source)
        inputs = [query_TD, attention.score, *self._pool.layers[0], *where]
        return self._emit("quill::AdditiveAttention", inputs, 1)[0]

    def previous(self, layer: int) -> State:
        if layer not in self._previous:
            inputs = [self.final_annotations(), *self._pool.layers[layer], *self._where]
            self._previous[layer] = State(*self._emit("quill::Recall", inputs, 2))
        return self._previous[layer]

    def update(self, cell: Cell, layer: int, input_TG: Tensor, before: State) -> Tensor:
        state = self._update(cell.kind, [input_TG, cell.state(before.h), *before])
        starts_S, past_S, table_SB = self._where
        store(self._config, self._pool, layer, state, (starts_S, table_SB, past_S))
        return state.h

    def tanh(self, x_TD: Tensor) -> Tensor:
        return self._update("rnn", [x_TD, None, None, None]).h

    def _update(self, kind: CellKind, inputs: Sequence[Tensor | None]) -> State:
        attributes = {"kind": KINDS[kind], "size": self._config.d_model}
        return State(*emit("quill::Update", inputs, attributes, *[self._shape] * 2))

    def _emit(self, operator: str, inputs: Sequence[Tensor], num_outputs: int) -> Sequence[Tensor]:
        attributes = attention_attributes(self._config)
        return emit(operator, inputs, attributes, *[self._shape] * num_outputs)


def write_source_states(
    model: Recurrent, source_ids_T: Tensor, pool: Pool, where: tuple[Tensor, Tensor]
) -> None:
    """Writes sources' keys and annotations to blocks. `where`: starts and block table."""
    memory_TD = model.memory(source_ids_T, PackedScan(where[0]))
    store(model.config, pool, 0, (model.keys(memory_TD), memory_TD), where)
    for number, layer in enumerate(pool.layers[1:], 1):  # unchanged
        pool.replace(number, layer)


def loop_products(model: Recurrent) -> None:
    """Keeps the matrices of the encoder's loops in float32: they run once a source, not a step."""
    for layer in model.encoder:
        for cell in layer.children():
            assert isinstance(cell, Cell)
            cell.state = StateProduct(cell.state)  # type: ignore[assignment]
