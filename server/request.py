"""A client's request, as the engine takes it, and the limits that it must fit in.

Knows: token ids, limits, how tokens are sampled, constraints as they were sent, what the engine
needs of a grammar (Grammar, Matcher).
Does not know: protobuf, text, memory. The engine's outputs are in server/outputs.py.

A request is plain data: it crosses from a frontend's process to the engine's.

The ranges stand in server/fields.py and are checked here; an error has the name of its field there.
Whether a prompt fits the model is checked by server/frontend/prompts.py, which knows the
field it came from.
"""

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from quill.server.errors import InvalidFieldError
from quill.server.fields import GENERATE, MAX_SEED, SAMPLING
from quill.server.outputs import FinishReason


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled. By default from the model's own distribution."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in SAMPLING:
            GENERATE[name].check(getattr(self, name))

    @property
    def adjusts(self) -> bool:
        """Whether any logit is adjusted before sampling."""
        penalties = (self.frequency_penalty, self.presence_penalty)
        return self.repetition_penalty != 1 or any(penalties) or bool(self.logit_bias)


EarlyStopping = Literal["heuristic", "at_once", "never"]


@dataclass(frozen=True, kw_only=True)
class BeamParams:
    """How wide to search, how to score long answers, when to stop."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "heuristic"

    def __post_init__(self) -> None:
        assert self.num_beams >= 2, "one beam is no search"
        GENERATE["length_penalty"].check(self.length_penalty)


Pooling = Literal["mean", "first", "last"]


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Texts that aren't continued: for an embedding of each, or for what masks stand for."""

    texts: tuple[tuple[int, ...], ...]
    method: Pooling = "mean"
    ranges: tuple[range, ...] = ()  # of each text: the tokens that are pooled; none: all
    masks: tuple[int, ...] = ()  # places in the only text, ascending; then there is no embedding

    def __post_init__(self) -> None:
        assert self.texts, "RequestReader rejects these"
        assert all(self.texts)
        assert len(self.ranges) in (0, len(self.texts))
        assert not self.masks or len(self.texts) == 1


ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "tools"]
MAX_CONSTRAINT_BYTES = 2**16


@dataclass(frozen=True)
class Constraint:
    """What a client asked for, exactly as it was sent: nothing is parsed before the cache is asked.

    For choice, `text` is a JSON list; for tools, server/grammar's `tool_constraint` writes it.
    """

    kind: ConstraintKind
    text: str

    def __post_init__(self) -> None:
        num_bytes = len(self.text.encode())
        # Of tools, the parameters are what is limited.
        if num_bytes > MAX_CONSTRAINT_BYTES and self.kind != "tools":
            rule = f"it may have {MAX_CONSTRAINT_BYTES} at most"
            raise InvalidFieldError(self.field, f"has {num_bytes} bytes; {rule}")
        if not self.text:
            raise InvalidFieldError(self.field, "is empty")

    @property
    def field(self) -> str:
        return "tools" if self.kind == "tools" else f"constraint.{self.kind}"

    @functools.cached_property
    def key(self) -> bytes:
        """What its grammar is cached by."""
        return hashlib.sha256(f"{self.kind}\0{self.text}".encode()).digest()


Masks = npt.NDArray[np.uint32]  # a row for each position, a bit for each token, the lowest first


class Matcher(Protocol):
    """How far one sequence has come in its grammar: a function of the sequence's tokens alone.

    Used by one thread at a time.
    """

    @property
    def has_failed(self) -> bool:
        """The grammar became too complex to follow: no mask is known any more."""

    @property
    def num_computed(self) -> int:
        """Jump-forward tokens that were computed so far, needed or not: 1,000 take 2 ms."""

    def jump_forward(self) -> list[int]:
        """The next tokens, as far as the grammar allows only one."""

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first, the grammar allows one after another."""

    def masks(self, draft: Sequence[int], stop_ids: Collection[int], num_unended: int) -> Masks:
        """The tokens that are allowed next, and after each of the draft tokens, which are allowed.

        In the first `num_unended` positions the stop ids are forbidden where there is any other
        token. There may be fewer masks, if a draft token leads too far; there is at least one.
        """

    def accept(self, token: int) -> None:
        """The sequence has one token more."""


class Grammar(Protocol):
    """A compiled constraint. Used by any thread. It never leaves the engine's process."""

    def matcher(self) -> Matcher:
        """For a new sequence."""


class GrammarCompiler(Protocol):
    """What the engine needs of server/grammar/compiler.py."""

    def start(self, constraint: Constraint, owner: str) -> Future[Grammar]:
        """Done already, if the grammar is cached; else by another thread."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt with the options of its answers; or texts to pool."""

    request_id: str
    prompt_ids: tuple[int, ...] = ()  # what the answer continues; for seq2seq the token before it
    pooling: PoolingParams | None = None  # instead of a prompt
    source_ids: tuple[int, ...] | None = None  # what a seq2seq encoder reads; None for causal
    sampling: SamplingParams = field(default_factory=SamplingParams)
    beams: BeamParams | None = None  # None: answers are sampled, each by itself
    constraint: Constraint | None = None  # what the answers must match; not with beams
    seed: int = 0
    max_new_tokens: int = 256  # for each sequence; 0: the prompt is only scored
    min_new_tokens: int = 0  # before so many, no token that ends a sequence is chosen
    eos_ids: frozenset[int] = frozenset()  # the model's own; empty with ignore_eos
    stop_ids: frozenset[int] = frozenset()  # the client's
    num_sequences: int = 1
    logprobs: int | None = None  # how many alternatives to report; None: no logprobs at all
    prompt_logprobs: int | None = None
    priority: int = 0  # higher is sooner
    deadline_s: float | None = None  # on the engine's clock, time.monotonic
    owner: str = ""  # whose request it is: owners take turns; empty if keys aren't used
    cache_scope: str = ""  # prefixes are shared within it, and never across

    def __post_init__(self) -> None:
        assert bool(self.prompt_ids) != (self.pooling is not None), "PromptReader rejects these"
        assert self.pooling is None or not self.max_new_tokens
        assert self.source_ids is None or len(self.prompt_ids) == 1
        assert 0 <= self.seed <= MAX_SEED
        assert self.constraint is None or self.beams is None, "RequestReader rejects these"
        self._require("max_new_tokens", self.max_new_tokens >= 0, "at least 0")
        min_allowed = 0 <= self.min_new_tokens <= self.max_new_tokens
        rule = f"from 0 to max_new_tokens, which is {self.max_new_tokens}"
        self._require("min_new_tokens", min_allowed, rule)
        self._require("num_sequences", self.num_sequences >= 1, "at least 1")
        if self.beams is not None:
            most = self.beams.num_beams
            allowed = self.num_sequences <= most
            self._require("num_sequences", allowed, f"at most num_beams, which is {most}")
        GENERATE["priority"].check(self.priority)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                GENERATE[name].check(getattr(self, name))

    @property
    def num_prompt(self) -> int:
        """Tokens that the client gave."""
        if self.pooling is not None:
            return sum(map(len, self.pooling.texts))
        return len(self.prompt_ids if self.source_ids is None else self.source_ids)

    @property
    def num_before(self) -> int:
        """Positions before the first token of an answer; of several texts, those of the longest."""
        if self.pooling is not None:
            return max(map(len, self.pooling.texts))
        return len(self.prompt_ids)

    @property
    def all_stop_ids(self) -> frozenset[int]:
        """All tokens that end a sequence."""
        return self.eos_ids | self.stop_ids

    def finish_reason(self, token_ids: Sequence[int], max_tokens: int) -> FinishReason | None:
        """Why an answer of these tokens is complete; None while it isn't."""
        last = token_ids[-1] if token_ids else None
        if last in self.eos_ids:
            return "eos"
        if last in self.stop_ids:
            return "stop"
        return "length" if len(token_ids) >= max_tokens else None

    @property
    def num_seqs(self) -> int:
        """Answers, or beams: how many of the server's sequences the request takes."""
        return self.num_sequences if self.beams is None else self.beams.num_beams

    def _require(self, name: str, allowed: bool, rule: str) -> None:
        if not allowed:
            raise InvalidFieldError(name, f"is {getattr(self, name)}; it must be {rule}")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many sequences run at once, how long they are, how many blocks they share."""

    max_num_seqs: int
    context: int  # tokens of prompt and answer together
    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = True
    speculative: bool = True
    max_prefill_tokens: int = 1024  # of prompts and sources, in a step
    whole_prompts: bool = False  # each prompt in one chunk, as encoders need
    one_token_steps: bool = False  # one token of each sequence, and no speculation

    def num_blocks_of(self, request: Request, num_tokens: int) -> int:
        """For a request's sequences after so many tokens each: they share the prompt's blocks."""
        num_prompt, size = request.num_before, self.block_size
        num_shared = num_prompt // size
        num_own = -(-(num_prompt + num_tokens) // size) - num_shared
        return num_shared + request.num_seqs * num_own + self.num_source_blocks(request)

    def num_source_blocks(self, request: Request) -> int:
        return -(-len(request.source_ids or ()) // self.block_size)

    def fits(self, request: Request) -> bool:
        """Whether there are sequences and blocks enough for the request alone."""
        max_tokens = min(request.max_new_tokens, self.context - request.num_before)
        fits_blocks = self.num_blocks_of(request, max(0, max_tokens)) <= self.num_blocks
        return request.num_seqs <= self.max_num_seqs and fits_blocks


def encoder_limits(*, max_num_seqs: int, context: int, max_prefill_tokens: int = 1024) -> Limits:
    """An encoder has no KV cache: a block is a place in a step, for one text."""
    return Limits(
        max_num_seqs=max_num_seqs,
        context=context,
        num_blocks=max_prefill_tokens,
        block_size=context,
        prefix_caching=False,
        speculative=False,
        max_prefill_tokens=max_prefill_tokens,
        whole_prompts=True,
    )
