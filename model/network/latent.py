"""Multi-head latent attention: what is kept of a token is one small vector for all heads.

Knows: projections. Does not know: how attention finds its keys (model/network/attention.py).

A head's key and value are up_k·c and up_v·c of the latent c. They are never made: q·(up_k·c) is
(up_kᵀ·q)·c, so queries are brought to the latent's size before they look, and what they found is
brought to the value's size afterwards. All heads then look at the same key, which is the latent
with a part for positions, and the values are the latents themselves.
"""

import torch
from torch import Tensor, nn

from quill.model.network.attention import Attending
from quill.model.network.config import Latent, ModelConfig

# B rows · T new tokens · N heads · D model size · C size of the latent · P of the turned part
# U of a head's part that isn't turned · V of a head's values

NORM_EPS = 1e-6  # DeepSeek's, whatever the other norms have


def by_head(x_BTE: Tensor, weight_NIO: Tensor) -> Tensor:
    """A matrix for each head: (…, heads x inputs) becomes (…, heads x outputs)."""
    heads_BTNI = torch.unflatten(x_BTE, -1, (len(weight_NIO), -1))
    return torch.einsum("...ni,nio->...no", heads_BTNI, weight_NIO).flatten(-2)


class LatentAttention(nn.Module):
    """In the place of a layer's self-attention."""

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
        # Of each head, first what keys are made with, then what values are.
        self.up = nn.Linear(
            latent.rank, num_heads * (latent.nope_size + latent.value_size), bias=False
        )
        self.out = nn.Linear(
            num_heads * latent.value_size, config.d_model, bias=config.attention_out_bias
        )

    def forward(self, x_BTD: Tensor, layer: int, attending: Attending) -> Tensor:
        sizes = self.sizes
        latent_BTC, turned_BTP = self.latent(x_BTD).split([sizes.rank, sizes.rope_size], dim=-1)
        latent_BTC = self.latent_norm(latent_BTC)
        if sizes.query_rank:
            x_BTD = self.query_norm(self.query_down(x_BTD))
        heads = self.query(x_BTD).unflatten(-1, (self.num_heads, -1))
        still, turning = heads.split([sizes.nope_size, sizes.rope_size], dim=-1)
        still = torch.unflatten(self.into_latent(still.flatten(-2)), -1, (self.num_heads, -1))
        queries_BTE = torch.cat((still, turning), dim=-1).flatten(-2)
        qkv_BTE = torch.cat((queries_BTE, latent_BTC, turned_BTP, latent_BTC), dim=-1)
        found_BTE = attending.self_attention(layer, qkv_BTE)
        y_BTD: Tensor = self.out(self.out_of_latent(found_BTE))
        return y_BTD

    def into_latent(self, still_BTE: Tensor) -> Tensor:
        return by_head(still_BTE, self.key_NUC)

    def out_of_latent(self, found_BTE: Tensor) -> Tensor:
        return by_head(found_BTE, self.value_NCV)

    @property
    def key_NUC(self) -> Tensor:
        return self._parts()[0]

    @property
    def value_NCV(self) -> Tensor:
        return self._parts()[1].transpose(1, 2)

    def _parts(self) -> tuple[Tensor, ...]:
        of_heads = torch.unflatten(self.up.weight, 0, (self.num_heads, -1))
        return torch.split(of_heads, [self.sizes.nope_size, self.sizes.value_size], dim=1)
