"""Benchmarks on a checkpoint: PyTorch, in this process.

Knows: networks, tokenizers. Does not know: servers, benchmarks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from quill.model.benchmarks.backend import BackendError, Sampling
from quill.model.benchmarks.bfcl import ToolCall
from quill.model.benchmarks.items import ScoreRequest
from quill.model.benchmarks.metrics import Likelihood, cut
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.errors import ConfigError
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters
from quill.server.text.chat_template import ChatTemplate

# B requests · T tokens · D model size · V vocabulary


class TorchBackend:
    max_concurrency = 1  # PyTorch's own threads use the cores

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        if checkpoint.tokenizer is None or checkpoint.config.family != "causal":
            raise ConfigError("benchmarks need a causal model with a tokenizer")
        self._checkpoint = checkpoint
        self._tokenizer = checkpoint.tokenizer
        self._device = device
        self._model = checkpoint.build().to(device)

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest]) -> list[Likelihood]:
        """All at once, padded at the end, where a causal model doesn't look. The continuation's
        tokens are those after as many as the context has by itself."""
        contexts = [self._encode(each.context) for each in requests]
        wholes = [self._encode(each.context + each.continuation) for each in requests]
        ids_BT = pad_sequence([torch.tensor(ids) for ids in wholes], batch_first=True)
        ids_BT = ids_BT.to(self._device)
        hidden_BTD = self._model.hidden(ids_BT[:, :-1], self._model.uncached())
        found = []
        for row, (context, whole) in enumerate(zip(contexts, wholes, strict=True)):
            start = min(len(context), len(whole) - 1)
            logits_TV = self._model.project(hidden_BTD[row, start - 1 : len(whole) - 1])
            targets_T = ids_BT[row, start : len(whole)]
            loss = F.cross_entropy(logits_TV.float(), targets_T, reduction="sum")
            is_greedy = bool((logits_TV.argmax(-1) == targets_T).all())
            found.append(Likelihood(-loss.item(), is_greedy))
        return found

    def _encode(self, text: str, parse_special: bool = False) -> list[int]:
        ids = self._tokenizer.encode(text, parse_special)
        bos = self._tokenizer.special.bos
        if self._checkpoint.prepend_bos and bos is not None and not parse_special:
            ids = [bos, *ids]
        if len(ids) > self._checkpoint.config.context:
            raise BackendError(
                f"the text has {len(ids)} tokens; the model's context is "
                f"{self._checkpoint.config.context}. Use fewer --shots"
            )
        return ids

    def generate(self, prompt: str, is_chat: bool, sampling: Sampling) -> str:
        """Generates no further than a stop string; so that it is found, the text is decoded in
        steps of 32 tokens."""
        ids = self._encode(self._render(prompt), True) if is_chat else self._encode(prompt)
        text, generated, num_tokens = "", 0, 32 if sampling.stop else sampling.max_new_tokens
        while cut(text, sampling.stop) == text and generated < sampling.max_new_tokens:
            num_tokens = min(2 * num_tokens, sampling.max_new_tokens)
            parameters = SamplingParameters(
                temperature=sampling.temperature,
                max_new_tokens=num_tokens,
                stop_ids=frozenset(self._checkpoint.stop_ids),
            )
            answer = generate(self._model, ids, parameters, sampling.seed, cached=True)
            text = self._tokenizer.decode(answer.token_ids, skip_special=True)
            generated = num_tokens if answer.finish_reason == "length" else sampling.max_new_tokens
        return cut(text, sampling.stop)

    def _render(self, message: str) -> str:
        if self._checkpoint.chat_template is None:
            raise ConfigError("the model has no chat template; leave --chat out")
        ids = vars(self._checkpoint.special_tokens)
        names = {
            f"{part}_token": self._tokenizer.decode([token])
            for part, token in ids.items()
            if token is not None
        }
        template = ChatTemplate(self._checkpoint.chat_template, names)
        return template.render([{"role": "user", "content": message}])

    def call_tools(
        self, question: str, tools: Sequence[dict[str, Any]], choice: str, sampling: Sampling
    ) -> list[ToolCall]:
        raise ConfigError("tool calls need a server, which parses and constrains them: --server")
