"""A plain GPT and its training step, as nanoGPT writes them: what training speed is measured by.

After github.com/karpathy/nanoGPT (MIT): LayerNorm, GELU, learned positions, one fused qkv
projection, PyTorch's attention, AdamW as `configure_optimizers` makes it, gradient clipping.
Knows: nothing of Quill's network. Only `quill train-speed` and its test use it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.ln_1 = nn.LayerNorm(d_model, bias=False)
        self.c_attn = nn.Linear(d_model, 3 * d_model, bias=False)
        self.c_proj = nn.Linear(d_model, d_model, bias=False)
        self.ln_2 = nn.LayerNorm(d_model, bias=False)
        self.c_fc = nn.Linear(d_model, 4 * d_model, bias=False)
        self.mlp_proj = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        y: Tensor = x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))
        return y

    def attention(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = torch.split(self.c_attn(x), c, dim=2)
        k = k.view(b, t, self.num_heads, c // self.num_heads).transpose(1, 2)
        q = q.view(b, t, self.num_heads, c // self.num_heads).transpose(1, 2)
        v = v.view(b, t, self.num_heads, c // self.num_heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return out


class NanoGPT(nn.Module):
    def __init__(
        self, vocab_size: int, context: int, d_model: int, num_layers: int, num_heads: int
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, d_model)
        self.wpe = nn.Embedding(context, d_model)
        self.h = nn.ModuleList(Block(d_model, num_heads) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(d_model, bias=False)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


class NanoLoop:
    """One training step after another on random windows of a token stream."""

    def __init__(self, model: NanoGPT, ids: Tensor, context: int, num_sequences: int) -> None:
        self._model = model
        self._ids = ids.numpy()
        self._context = context
        self._num_sequences = num_sequences
        decay = [p for p in model.parameters() if p.dim() >= 2]
        no_decay = [p for p in model.parameters() if p.dim() < 2]
        # nanoGPT uses the fused optimizer on CUDA only.
        self._optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
            lr=1e-3,
            betas=(0.9, 0.95),
        )

    def run_step(self) -> float:
        x, y = self._get_batch()
        loss: Tensor = self._model(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _get_batch(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self._ids) - self._context, (self._num_sequences,)).tolist()
        rows = [torch.from_numpy(self._ids[i : i + self._context + 1]).long() for i in starts]
        return torch.stack([r[:-1] for r in rows]), torch.stack([r[1:] for r in rows])
