"""Multi-head latent attention (MLA): the KV cache has one small vector a token for all heads.

Knows: projections. Does not know: how attention is computed (model/network/attention.py).

A head's key and value are up_k·c and up_v·c of the latent c. They are never computed: q·(up_k·c) is
(up_kᵀ·q)·c, so queries are projected to the latent's size before attention, and the result to the
value's size after it. All heads then attend to the same key, which is the latent with a rotary
part, and the values are the latents themselves.
"""

import torch
from torch import Tensor, nn

from quill.model.network.attention import AttentionImplementation
from quill.model.network.config import Latent, ModelConfig

# B batch · T new tokens · N heads · D model size · C size of the latent · P of the rotary part
# U of a head's part without positions · V of a head's values

NORM_EPS = 1e-6  # DeepSeek's, whatever the other norms have


def by_head(x_BTE: Tensor, weight_NIO: Tensor) -> Tensor:
    """A matrix for each head: (…, heads x inputs) becomes (…, heads x outputs)."""
    heads_BTNI = torch.unflatten(x_BTE, -1, (len(weight_NIO), -1))
    return torch.einsum("...ni,nio->...no", heads_BTNI, weight_NIO).flatten(-2)


class LatentAttention(nn.Module):
    """Replaces a layer's self-attention."""

    def __init__(self, config: ModelConfig, latent: Latent) -> None:
        super().__init__()
        self.sizes = latent
        self.num_heads = num_heads = config.num_heads
        inputs = config.d_model
        if latent.query_rank:
            inputs = latent.query_rank
            self.query_down = nn.Linear(config.d_model, inputs, bias=False)
            self.query_norm = nn.RMSNorm(inputs, eps=NORM_EPS)
        self.query = nn.Linear(inputs, num_heads * config.head_size, bias=False)
        self.latent = nn.Linear(config.d_model, latent.rank + latent.rope_size, bias=False)
        self.latent_norm = nn.RMSNorm(latent.rank, eps=NORM_EPS)
        # Of each head: first the keys' matrix, then the values'.
        self.up = nn.Linear(
            latent.rank, num_heads * (latent.nope_size + latent.value_size), bias=False
        )
        self.out = nn.Linear(
            num_heads * latent.value_size, config.d_model, bias=config.attention_out_bias
        )

    def forward(self, x_BTD: Tensor, layer: int, attn_impl: AttentionImplementation) -> Tensor:
        sizes = self.sizes
        latent_BTC, rotary_BTP = self.latent(x_BTD).split([sizes.rank, sizes.rope_size], dim=-1)
        latent_BTC = self.latent_norm(latent_BTC)
        if sizes.query_rank:
            x_BTD = self.query_norm(self.query_down(x_BTD))
        heads = self.query(x_BTD).unflatten(-1, (self.num_heads, -1))
        nope, rope = heads.split([sizes.nope_size, sizes.rope_size], dim=-1)
        nope = torch.unflatten(self.into_latent(nope.flatten(-2)), -1, (self.num_heads, -1))
        queries_BTE = torch.cat((nope, rope), dim=-1).flatten(-2)
        qkv_BTE = torch.cat((queries_BTE, latent_BTC, rotary_BTP, latent_BTC), dim=-1)
        attended_BTE = attn_impl.self_attention(layer, qkv_BTE)
        y_BTD: Tensor = self.out(self.out_of_latent(attended_BTE))
        return y_BTD

    def into_latent(self, nope_BTE: Tensor) -> Tensor:
        return by_head(nope_BTE, self.key_NUC)

    def out_of_latent(self, attended_BTE: Tensor) -> Tensor:
        return by_head(attended_BTE, self.value_NCV)

    @property
    def key_NUC(self) -> Tensor:
        return self._parts()[0]

    @property
    def value_NCV(self) -> Tensor:
        return self._parts()[1].transpose(1, 2)

    def _parts(self) -> tuple[Tensor, ...]:
        of_heads = torch.unflatten(self.up.weight, 0, (self.num_heads, -1))
        return torch.split(of_heads, [self.sizes.nope_size, self.sizes.value_size], dim=1)


class SplitLatentAttention(LatentAttention):
    """The same with a module for each of the two matrices in `up`, whose numbers it was made of."""

    def __init__(self, of: LatentAttention, keys: nn.Module, values: nn.Module) -> None:
        nn.Module.__init__(self)
        self.sizes, self.num_heads = of.sizes, of.num_heads
        for name, child in of.named_children():
            if name != "up":
                setattr(self, name, child)
        self.keys, self.values = keys, values

    def into_latent(self, nope_BTE: Tensor) -> Tensor:
        x_BTE: Tensor = self.keys(nope_BTE)
        return x_BTE

    def out_of_latent(self, attended_BTE: Tensor) -> Tensor:
        x_BTE: Tensor = self.values(attended_BTE)
        return x_BTE
