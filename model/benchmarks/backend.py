"""What a benchmark needs of a model, wherever the model runs.

Knows: the interface. Does not know: PyTorch, gRPC, HTTP, benchmarks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quill.model.benchmarks.bfcl import ToolCall
from quill.model.benchmarks.items import ScoreRequest
from quill.model.benchmarks.metrics import Likelihood
from quill.model.errors import ModelError


class BackendError(ModelError):
    """A request that the model or the server can't execute."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an answer is generated. The defaults: greedy."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()


class Backend(Protocol):
    """Its errors are ModelErrors. A server's is used by several threads."""

    max_concurrency: int

    def score(self, requests: Sequence[ScoreRequest]) -> list[Likelihood]: ...

    def generate(self, prompt: str, is_chat: bool, sampling: Sampling) -> str:
        """The continuation of a text, or the answer to a user's message."""

    def call_tools(
        self, question: str, tools: Sequence[dict[str, Any]], choice: str, sampling: Sampling
    ) -> list[ToolCall]: ...
