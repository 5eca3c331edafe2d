"""Attention as one operator with the KV cache inside, over packed tokens and blocks.

Knows: Quill's attention operators and com.microsoft::PagedAttention, their inputs and limits.
Does not know: layers, precisions, files.

Each class is an `AttentionImplementation` (model/network/attention.py). It computes nothing: it
emits operators into the graph that torch.onnx is tracing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from quill.export.graph.quill_layers import Attributes, emit
from quill.model.network.config import ModelConfig
from quill.model.network.positions import RotaryTables, tables_of

# S sequences · T new tokens of all · B blocks of the longest · E heads x head size

# The operators' limits (export/operators/kernels/sequences.h).
HEAD_SIZE_STEP = 16
MAX_HEAD_SIZE = 640
MAX_GROUP = 128
# Blocks may be float32 or float16: the runtime chooses a kernel by the types.
ATTENTION = "quill::Attention"
CROSS_ATTENTION = "quill::CrossAttention"
ENCODER_ATTENTION = "quill::EncoderAttention"
SHORT_CONV = "quill::ShortConv"
STORE = "quill::Store"
PAGED = "com.microsoft::PagedAttention"


def attention_attributes(config: ModelConfig, layer: int = 0) -> Attributes:
    num_kv_heads, key_size, value_size = config.cached
    attributes: dict[str, int | float] = {
        "heads": config.num_heads,
        "kv_heads": num_kv_heads,
        "head_size": key_size,
        "scale": config.scale,
    }
    # Omitted where they are the default: older versions of the operators don't know them.
    if window := config.window_of(layer):
        attributes["window"] = window
    if config.attention_soft_cap:
        attributes["soft_cap"] = config.attention_soft_cap
    if config.latent is not None:
        attributes["value_size"] = value_size
    if config.rotary_size != key_size:
        attributes["rotary_size"] = config.rotary_size
    return attributes


def conv_attributes(config: ModelConfig, layer: int) -> Attributes:
    assert config.short_conv is not None
    num_heads, size, _ = config.cached_of(layer)
    attributes: dict[str, int | float] = {"heads": num_heads, "kv_heads": num_heads}
    return attributes | {"head_size": size, "scale": 1.0, "taps": config.short_conv.taps}


class Layer(NamedTuple):
    """One layer's blocks."""

    keys: Tensor
    values: Tensor


@dataclass
class Pool:
    """The blocks of all layers, and the operators' outputs in their place."""

    layers: Sequence[Layer]
    extended: list[Layer] = field(default_factory=list)

    def replace(self, layer: int, sides: Sequence[Tensor]) -> None:
        assert len(self.extended) == layer, "layers run in order, each once"
        self.extended.append(Layer(*sides))

    def flat(self) -> list[Tensor]:
        return [side for layer in self.extended for side in layer]


class Packed(NamedTuple):
    """The positions of the new tokens, and where each sequence begins."""

    positions_T: Tensor
    starts_S: Tensor  # one more than there are sequences


class Source(NamedTuple):
    """The blocks of each sequence's source."""

    lengths_S: Tensor
    table_SB: Tensor


class PackedEncoderAttention:
    """Bidirectional attention within each packed text."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTables | None,
        packed: Packed,
        bias_NR: Tensor | None = None,
    ) -> None:
        self._config = config
        self._rotary = rotary
        self._packed = packed
        self._bias = () if bias_NR is None else (bias_NR,)

    def begin(self, ids_T: Tensor) -> Tensor:
        return self._packed.positions_T

    def self_attention(self, layer: int, qkv_TE: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        inputs = [qkv_TE, self._packed.starts_S, *self._tables(layer), *self._bias]
        return _write(ENCODER_ATTENTION, inputs, attention_attributes(self._config), self._width)[0]

    def cross_attention(self, layer: int, q_TE: Tensor) -> Tensor:
        raise AssertionError("an encoder has no cross-attention")

    def short_conv(
        self, layer: int, x_TD: Tensor, kernel_LD: Tensor, bias_D: Tensor | None
    ) -> Tensor:
        raise AssertionError("an encoder has no short convolutions")

    def _tables(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        tables = tables_of(self._rotary, self._config, layer)
        return (None, None) if tables is None else (tables.cos_PF, tables.sin_PF)

    @property
    def _width(self) -> int:
        return self._config.num_heads * self._config.cached.value_size


class PackedAttention(PackedEncoderAttention):
    """Causal attention of new tokens to blocks that the operator extends in place."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTables | None,
        packed: Packed,
        past_S: Tensor,
        table_SB: Tensor,
        pool: Pool,
        source: Source | None = None,
        bias_NR: Tensor | None = None,
    ) -> None:
        super().__init__(config, rotary, packed, bias_NR)
        self._where = (packed.starts_S, past_S, table_SB)
        self._pool = pool
        self._source = source

    def self_attention(self, layer: int, qkv_TE: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        """`qkv_TE`: queries, keys and values in one tensor, as the fused projection has them."""
        # They are float16 when a CUDA graph is verified on the CPU.
        tables = [None if each is None else each.float() for each in self._tables(layer)]
        blocks = self._pool.layers[layer]
        inputs = [qkv_TE.float(), *blocks, *self._where, *tables]
        if sinks_N is not None or self._bias:
            inputs += [None if sinks_N is None else sinks_N.float(), *self._bias]
        attributes = attention_attributes(self._config, layer)
        out_TE, *extended = _write(ATTENTION, inputs, attributes, self._width, blocks)
        self._pool.replace(layer, extended)
        return out_TE.to(qkv_TE.dtype)

    def short_conv(
        self, layer: int, x_TD: Tensor, kernel_LD: Tensor, bias_D: Tensor | None
    ) -> Tensor:
        """`kernel_LD`: as the operator has it, the oldest token's weights first."""
        blocks = self._pool.layers[layer]
        inputs = [x_TD, kernel_LD, *blocks, *self._where, *([] if bias_D is None else [bias_D])]
        attributes = conv_attributes(self._config, layer)
        y_TD, *extended = _write(SHORT_CONV, inputs, attributes, self._config.d_model, blocks)
        self._pool.replace(layer, extended)
        return y_TD

    def cross_attention(self, layer: int, q_TE: Tensor) -> Tensor:
        """Attends to the source's blocks, which are in the same pool."""
        assert self._source is not None, "a decoder with cross-attention needs a source"
        inputs = [q_TE, *self._pool.extended[layer], self._packed.starts_S, *self._source]
        return _write(CROSS_ATTENTION, inputs, attention_attributes(self._config), self._width)[0]


class PagedAttention(PackedAttention):
    """The same by the runtime's CUDA operator. It writes into the blocks that it reads, so there is
    no cross-attention."""

    def self_attention(self, layer: int, qkv_TE: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        tables = [each for each in self._tables(layer) if each is not None]
        attributes: dict[str, int | float] = {
            "num_heads": self._config.num_heads,
            "kv_num_heads": self._config.num_kv_heads,
            "do_rotary": int(bool(tables)),
            "scale": self._config.scale,
        }
        if self._config.attention_soft_cap:
            attributes["softcap"] = self._config.attention_soft_cap
        blocks = self._pool.layers[layer]
        inputs = [qkv_TE, None, None, *blocks, *self._where]
        inputs += tables
        out_TE, *extended = _write(PAGED, inputs, attributes, self._width, blocks)
        self._pool.replace(layer, extended)
        return out_TE

    def cross_attention(self, layer: int, q_TE: Tensor) -> Tensor:
        raise AssertionError("CUDA has no cross-attention (export/exportability.py)")


def store(
    config: ModelConfig,
    pool: Pool,
    layer: int,
    key_value: Sequence[Tensor],
    where: Sequence[Tensor],
) -> None:
    """Writes keys and values to blocks. `where`: starts and block table, and past lengths if the
    sequences have any."""
    blocks = pool.layers[layer]
    shapes, dtypes = [side.shape for side in blocks], [side.dtype for side in blocks]
    inputs = [*key_value, *blocks, *where]
    pool.replace(layer, emit(STORE, inputs, attention_attributes(config), *shapes, dtypes=dtypes))


def _write(
    operator: str,
    inputs: Sequence[Tensor | None],
    attributes: Attributes,
    width: int,
    blocks: Sequence[Tensor] = (),
) -> Sequence[Tensor]:
    """Emits the operator. Returns the attention's output and the extended blocks."""
    x_TE = inputs[0]
    assert x_TE is not None
    dtypes = [x_TE.dtype, *(side.dtype for side in blocks)]
    shapes = [[x_TE.shape[0], width], *(side.shape for side in blocks)]
    return emit(operator, inputs, attributes, *shapes, dtypes=dtypes)
