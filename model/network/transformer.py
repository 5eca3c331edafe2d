"""The Transformer: one stack of layers, three families.

Knows: embeddings, positions, the order of the layers, initialization.
Does not know: what a layer is made of (model/network/layers.py), how attention is computed
(model/network/attention.py), training, files.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quill.model.network.attention import (
    AttentionImplementation,
    CachedAttention,
    CrossKeyValue,
    EncoderAttention,
    UncachedAttention,
    soft_capped,
)
from quill.model.network.config import ModelConfig
from quill.model.network.experts import ExpertFeedForward
from quill.model.network.latent import LatentAttention
from quill.model.network.layers import (
    ClassHead,
    CrossAttention,
    DecoderLayer,
    EncoderLayer,
    MaskedHead,
    ShortConvolution,
    make_norm,
)
from quill.model.network.network import Network
from quill.model.network.positions import (
    RotaryTables,
    relative_buckets,
    rotary_tables,
    sinusoidal_table,
)

Side = Literal["encoder", "decoder"]

# B batch · T new tokens · S source tokens · P positions · D model size · V vocabulary
# N heads · R distances


class Transformer(Network):
    """A causal decoder, an encoder, or both."""

    position_PD: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context, config.d_model)
        if config.num_segments:
            self.segment_embedding = nn.Embedding(config.num_segments, config.d_model)
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        if config.family == "seq2seq":  # each side has its own
            if config.positions == "learned":
                self.decoder_position_embedding = nn.Embedding(config.context, config.d_model)
            if config.embedding_norm:
                self.decoder_embedding_norm = make_norm(config)
        for side in self._relative_sides():
            table = nn.Embedding(config.relative_buckets, config.num_heads)
            self.add_module(f"{side}_relative", table)
        self.compute_tables()
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.decoder = nn.ModuleList(self.make_layer(i) for i in range(config.num_layers))
        # With the norm after each sum the last layer's output is normalized already.
        ends_normed = config.norm_placement == "post"
        self.encoder_norm = nn.Identity() if ends_normed or not self.encoder else make_norm(config)
        self.decoder_norm = nn.Identity() if ends_normed or not self.decoder else make_norm(config)
        self.head: nn.Module = MaskedHead(config) if config.masked_head else nn.Identity()
        if config.num_classes:
            self.head = ClassHead(config)
        self.projection: nn.Linear | None = None
        if not config.tied_embeddings:
            self.projection = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.output_bias: nn.Parameter | None = None
        if config.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self._initialize()

    def compute_tables(self) -> None:
        """Fills the position tables; also after a model was built on the meta device."""
        config = self.config
        if config.positions == "sinusoidal":
            table_PD = sinusoidal_table(config.context, config.d_model)
            self.register_buffer("position_PD", table_PD, persistent=False)
        elif config.positions == "rotary":
            tables = rotary_tables(config)
            self.register_buffer("rotary_cos_PF", tables.cos_PF, persistent=False)
            self.register_buffer("rotary_sin_PF", tables.sin_PF, persistent=False)
            if tables.local is not None:
                self.register_buffer("local_cos_PF", tables.local.cos_PF, persistent=False)
                self.register_buffer("local_sin_PF", tables.local.sin_PF, persistent=False)

        for side in self._relative_sides():
            bucket_R = relative_buckets(config, causal=side == "decoder")
            self.register_buffer(f"{side}_bucket_R", bucket_R, persistent=False)

    def _relative_sides(self) -> list[Side]:
        """The stacks whose attention has a bias by distance."""
        sides: dict[Side, int] = {
            "encoder": self.config.num_encoder_layers,
            "decoder": self.config.num_layers,
        }
        return [side for side, num in sides.items() if num and self.config.relative_buckets]

    def relative(self, side: Side) -> Tensor | None:
        """The bias of each head by distance, (N, R), which all layers of a stack share."""
        if not self.config.relative_buckets:
            return None
        weight = self.get_parameter(f"{side}_relative.weight")
        return F.embedding(self.get_buffer(f"{side}_bucket_R"), weight).T.contiguous()

    @property
    def rotary(self) -> RotaryTables | None:
        if self.config.positions != "rotary":
            return None
        local = None
        if self.config.local_rotary_base is not None:
            local = RotaryTables(self.get_buffer("local_cos_PF"), self.get_buffer("local_sin_PF"))
        cos_PF, sin_PF = self.get_buffer("rotary_cos_PF"), self.get_buffer("rotary_sin_PF")
        return RotaryTables(cos_PF, sin_PF, local)

    def _initialize(self) -> None:
        """GPT-2's initialization; the paper's embedding size where embeddings are scaled up."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if self.config.norm_placement == "post":
            self._initialize_post_norm()
        if self.config.scale_embeddings:
            nn.init.normal_(self.embedding.weight, std=self.config.d_model**-0.5)
        std = 0.02 / math.sqrt(2 * max(self.config.num_layers, self.config.num_encoder_layers))
        if self.config.norm_placement == "pre":
            for name, parameter in self.named_parameters():
                if name.endswith(("out.weight", "down.weight")):
                    nn.init.normal_(parameter, std=std)

    def _initialize_post_norm(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def encode(self, source_BS: Tensor, mask_BS: Tensor) -> CrossKeyValue:
        """Encodes the source once: keys and values for each decoder layer."""
        memory_BSD = self.hidden_states(source_BS, mask_BS)
        layers = [cross.source_key_value(memory_BSD) for cross in self.cross_attentions()]
        return CrossKeyValue(layers, mask_BS)

    def memory(
        self, source: Tensor, attn_impl: AttentionImplementation, segments: Tensor | None = None
    ) -> Tensor:
        """The encoder's last hidden state at every token, of a batch or of packed texts. Without
        `segments` all tokens are of the first."""
        x = self.embed(source, attn_impl, segments)
        for index, layer in enumerate(self.encoder):
            x = layer(x, index, attn_impl)
        y: Tensor = self.encoder_norm(x)
        return y

    def hidden_states(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """The encoder's hidden states of a batch. Without a mask there is no padding."""
        bias_NR = self.relative("encoder")
        return self.memory(ids_BT, EncoderAttention(self.config, self.rotary, mask_BT, bias_NR))

    def cross_attentions(self) -> list[CrossAttention]:
        """The cross-attention of each decoder layer."""
        layers = [layer for layer in self.decoder if isinstance(layer, DecoderLayer)]
        return [layer.cross for layer in layers if layer.cross is not None]

    def hidden(self, ids_BT: Tensor, attn_impl: AttentionImplementation) -> Tensor:
        """The decoder's last hidden state at every new token."""
        x_BTD = self.embed(ids_BT, attn_impl, side="decoder")
        for index, layer in enumerate(self.decoder):
            x_BTD = layer(x_BTD, index, attn_impl)
        y_BTD: Tensor = self.decoder_norm(x_BTD)
        return y_BTD

    @property
    def output_weight_VD(self) -> Tensor:
        return self.embedding.weight if self.projection is None else self.projection.weight

    def project(self, x_BTD: Tensor) -> Tensor:
        """Hidden states become logits over the vocabulary, or over classes."""
        if self.config.num_classes:
            logits_BTC: Tensor = self.head(x_BTD)
            return logits_BTC
        logits_BTV = F.linear(self.head(x_BTD), self.output_weight_VD, self.output_bias)
        cap = self.config.logit_soft_cap
        return soft_capped(logits_BTV, cap) if cap else logits_BTV

    def uncached(self, cross: CrossKeyValue | None = None) -> UncachedAttention:
        return UncachedAttention(self.config, self.rotary, cross, self.relative("decoder"))

    def cached(self, cross: CrossKeyValue | None = None) -> CachedAttention:
        return CachedAttention(self.config, self.rotary, cross, self.relative("decoder"))

    def embed(
        self,
        ids_BT: Tensor,
        attn_impl: AttentionImplementation,
        segments: Tensor | None = None,
        side: Side = "encoder",
    ) -> Tensor:
        own = "decoder_" if side == "decoder" and self.config.family == "seq2seq" else ""
        x_BTD = self.embedding(ids_BT)
        positions = attn_impl.begin(ids_BT)
        if self.config.embedding_scale is not None:
            x_BTD = x_BTD * self.config.embedding_scale
        elif self.config.scale_embeddings:
            x_BTD = x_BTD * math.sqrt(self.config.d_model)
        if self.config.positions == "learned":
            x_BTD = x_BTD + self.get_submodule(f"{own}position_embedding")(positions)
        elif self.config.positions == "sinusoidal":
            x_BTD = x_BTD + F.embedding(positions, self.position_PD)
        if self.config.num_segments:
            segments = torch.zeros_like(ids_BT) if segments is None else segments
            x_BTD = x_BTD + self.segment_embedding(segments)
        if self.config.embedding_norm:
            x_BTD = self.get_submodule(f"{own}embedding_norm")(x_BTD)
        y_BTD: Tensor = self.dropout(x_BTD)
        return y_BTD

    def make_layer(self, index: int) -> DecoderLayer:
        """A layer of the decoder, with weights of its own."""
        config, feed_forward = self.config, None
        attention: nn.Module | None = None
        if config.latent is not None:
            attention = LatentAttention(config, config.latent)
        elif config.short_conv is not None and config.is_conv(index):
            attention = ShortConvolution(config, config.short_conv)
        experts = config.experts
        if experts is not None and index >= experts.dense_layers:
            feed_forward = ExpertFeedForward(config, experts)
        return DecoderLayer(config, attention, feed_forward)

    def expert_layers(self) -> list[ExpertFeedForward]:
        """The mixtures of experts that training keeps balanced."""
        modules = [module for module in self.modules() if isinstance(module, ExpertFeedForward)]
        return [module for module in modules if module.experts.balanced]
