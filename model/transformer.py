"""The Transformer: one set of blocks, two families.

Knows: projections, norms, feed-forward, residuals, embeddings.
Does not know: how attention finds its keys (see model/attention.py), training, files.
"""

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import (
    Attending,
    Cached,
    CrossKeyValue,
    EncoderAttending,
    KeyValue,
    Uncached,
    split_heads,
)
from model.config import ModelConfig
from model.positions import RotaryTables, rotary_tables, sinusoidal_table

# B rows · T new tokens · S source tokens · D model size · V vocabulary · E = heads x head size


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps)


class Residual(nn.Module):
    """x + sublayer(x), with the norm before the sublayer (pre) or after the sum (post)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self._pre = config.norm_placement == "pre"

    def forward(self, x_BTD: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        y_BTD: Tensor
        if self._pre:
            y_BTD = x_BTD + self.dropout(sublayer(self.norm(x_BTD)))
        else:
            y_BTD = self.norm(x_BTD + self.dropout(sublayer(x_BTD)))
        return y_BTD


class SelfAttention(nn.Module):
    """Projects to queries, keys and values in one go, attends, projects back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num_heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(config.d_model, num_heads * config.head_size, bias=config.qkv_bias)
        self.out = nn.Linear(
            config.num_heads * config.head_size, config.d_model, bias=config.attention_out_bias
        )

    def forward(self, x_BTD: Tensor, layer: int, attending: Attending) -> Tensor:
        y_BTD: Tensor = self.out(attending.self_attention(layer, self.qkv(x_BTD)))
        return y_BTD


class CrossAttention(nn.Module):
    """Queries from the decoder, keys and values from the encoder, computed once a source."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._head_size = config.head_size
        width = config.num_heads * config.head_size
        kv_width = config.num_kv_heads * config.head_size
        self.query = nn.Linear(config.d_model, width, bias=config.qkv_bias)
        self.key_value = nn.Linear(config.d_model, 2 * kv_width, bias=config.qkv_bias)
        self.out = nn.Linear(width, config.d_model, bias=config.attention_out_bias)

    def park(self, memory_BSD: Tensor) -> KeyValue:
        k_BSE, v_BSE = self.key_value(memory_BSD).chunk(2, dim=-1)
        return KeyValue(split_heads(k_BSE, self._head_size), split_heads(v_BSE, self._head_size))

    def forward(self, x_BTD: Tensor, layer: int, attending: Attending) -> Tensor:
        y_BTD: Tensor = self.out(attending.cross_attention(layer, self.query(x_BTD)))
        return y_BTD


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """Widens, bends, narrows. SwiGLU computes its gate and its value in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._gated = config.activation == "swiglu"
        self._bend = ACTIVATIONS["silu" if self._gated else config.activation]
        width = config.d_ff * (2 if self._gated else 1)
        self.up = nn.Linear(config.d_model, width, bias=config.ff_bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.ff_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.up(x_BTD)
        if self._gated:
            gate_BTF, value_BTF = h_BTF.chunk(2, dim=-1)
            h_BTF = self._bend(gate_BTF) * value_BTF
        else:
            h_BTF = self._bend(h_BTF)
        y_BTD: Tensor = self.down(h_BTF)
        return y_BTD


class EncoderLayer(nn.Module):
    """Self-attention in both directions, then feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_residual = Residual(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x_BTD: Tensor, layer: int, attending: Attending) -> Tensor:
        x_BTD = self.attention_residual(x_BTD, lambda x: self.attention(x, layer, attending))
        y_BTD: Tensor = self.feed_forward_residual(x_BTD, self.feed_forward)
        return y_BTD


class DecoderLayer(EncoderLayer):
    """An encoder layer that may also look at an encoded source, between its two halves."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.cross: CrossAttention | None = None
        if config.family == "seq2seq":
            self.cross = CrossAttention(config)
            self.cross_residual = Residual(config)

    def forward(self, x_BTD: Tensor, layer: int, attending: Attending) -> Tensor:
        x_BTD = self.attention_residual(x_BTD, lambda x: self.attention(x, layer, attending))
        if self.cross is not None:
            cross = self.cross
            x_BTD = self.cross_residual(x_BTD, lambda x: cross(x, layer, attending))
        y_BTD: Tensor = self.feed_forward_residual(x_BTD, self.feed_forward)
        return y_BTD


class Transformer(nn.Module):
    """Token ids in, logits out. `hidden` and `project` are apart so that a caller who needs one
    position's logits doesn't pay for all."""

    position_PD: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context, config.d_model)
        self.compute_tables()
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        # With the norm after each sum the last layer's output is normalised already.
        ends_normed = config.norm_placement == "post"
        self.encoder_norm = nn.Identity() if ends_normed or not self.encoder else make_norm(config)
        self.decoder_norm = nn.Identity() if ends_normed else make_norm(config)
        self.projection: nn.Linear | None = None
        if not config.tied_embeddings:
            self.projection = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._initialise()

    def compute_tables(self) -> None:
        """Fills in the position tables; again after a model was built without memory for them."""
        config = self.config
        if config.positions == "sinusoidal":
            table_PD = sinusoidal_table(config.context, config.d_model)
            self.register_buffer("position_PD", table_PD, persistent=False)
        elif config.positions == "rotary":
            tables = rotary_tables(config)
            self.register_buffer("rotary_cos_PF", tables.cos_PF, persistent=False)
            self.register_buffer("rotary_sin_PF", tables.sin_PF, persistent=False)

    @property
    def rotary(self) -> RotaryTables | None:
        if self.config.positions != "rotary":
            return None
        return RotaryTables(self.get_buffer("rotary_cos_PF"), self.get_buffer("rotary_sin_PF"))

    def _initialise(self) -> None:
        """GPT-2's initialisation; the paper's embedding size where embeddings are scaled up."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if self.config.norm_placement == "post":
            self._initialise_post_norm()
        if self.config.scale_embeddings:
            nn.init.normal_(self.embedding.weight, std=self.config.d_model**-0.5)
        std = 0.02 / math.sqrt(2 * self.config.num_layers)
        if self.config.norm_placement == "pre":
            for name, parameter in self.named_parameters():
                if name.endswith(("out.weight", "down.weight")):
                    nn.init.normal_(parameter, std=std)

    def _initialise_post_norm(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def encode(self, source_BS: Tensor, mask_BS: Tensor) -> CrossKeyValue:
        """Reads the source once and parks, for each decoder layer, what it will look at."""
        attending = EncoderAttending(self.config, self.rotary, mask_BS)
        return CrossKeyValue(self.park(source_BS, attending), mask_BS)

    def park(self, source_BS: Tensor, attending: Attending) -> list[KeyValue]:
        """Each decoder layer's keys and values of a source."""
        x_BSD = self._embed(source_BS, attending)
        for index, layer in enumerate(self.encoder):
            x_BSD = layer(x_BSD, index, attending)
        memory_BSD = self.encoder_norm(x_BSD)
        parked = []
        for layer in self.decoder:
            assert isinstance(layer, DecoderLayer)
            assert layer.cross is not None
            parked.append(layer.cross.park(memory_BSD))
        return parked

    def hidden(self, ids_BT: Tensor, attending: Attending) -> Tensor:
        """The decoder's last hidden state at every new token."""
        x_BTD = self._embed(ids_BT, attending)
        for index, layer in enumerate(self.decoder):
            x_BTD = layer(x_BTD, index, attending)
        y_BTD: Tensor = self.decoder_norm(x_BTD)
        return y_BTD

    @property
    def output_weight_VD(self) -> Tensor:
        return self.embedding.weight if self.projection is None else self.projection.weight

    def project(self, x_BTD: Tensor) -> Tensor:
        """Hidden states become logits over the vocabulary."""
        return F.linear(x_BTD, self.output_weight_VD)

    def forward(self, ids_BT: Tensor, cross: CrossKeyValue | None = None) -> Tensor:
        """The logits at every position, with no cache."""
        return self.project(self.hidden(ids_BT, self.uncached(cross)))

    def uncached(self, cross: CrossKeyValue | None = None) -> Uncached:
        return Uncached(self.config, self.rotary, cross)

    def cached(self, cross: CrossKeyValue | None = None) -> Cached:
        return Cached(self.config, self.rotary, cross)

    def _embed(self, ids_BT: Tensor, attending: Attending) -> Tensor:
        x_BTD = self.embedding(ids_BT)
        positions = attending.begin(ids_BT)
        if self.config.scale_embeddings:
            x_BTD = x_BTD * math.sqrt(self.config.d_model)
        if self.config.positions == "learned":
            x_BTD = x_BTD + self.position_embedding(positions)
        elif self.config.positions == "sinusoidal":
            x_BTD = x_BTD + self.position_PD[positions]
        y_BTD: Tensor = self.dropout(x_BTD)
        return y_BTD

    def num_parameters(self) -> int:
        """How many numbers training changes; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())
