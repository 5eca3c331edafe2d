"""Compiles constraints into grammars over a model's tokens, and caches them.

Knows: llguidance, its limits, threads. Does not know: protobuf, requests, what is generated.

The cache is asked with a hash of what the client sent, before anything is parsed. Clients may be
attackers: constraints are limited in bytes, depth and width before the library sees them, and in
work by the library itself. That doesn't bound memory and time, so the grammar worker compiles each
constraint first (server/grammar/checker.py), and the engine's threads only those that passed.
Errors name the place of the mistake and go to the client only: they may quote the constraint.
"""

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance

from quill.server.errors import InvalidFieldError
from quill.server.grammar.constraint_source import schema_source, source_of, tool_schemas
from quill.server.grammar.job_queue import JobQueue
from quill.server.grammar.json_schema import Schema, locate, parse_schema
from quill.server.grammar.matcher import TokenGrammar, panics_are_errors
from quill.server.machine.resources import lower_priority
from quill.server.request import Constraint, Grammar

MAX_CACHED = 64  # grammars: each may grow to 12 MB
MAX_CACHED_BYTES = 2**22  # of the constraints that they were compiled from
NUM_THREADS = 2
# Three threads on two cores double a step's time. A niceness of 5 leaves the model's threads most
# of it, and a large constraint is compiled within its second all the same; with 15 it wasn't.
NICENESS = 5
MAX_REASON = 300  # characters of the library's own message
MAX_DETERMINED = 4096  # tokens at the beginning: 50,000 hold the interpreter's lock for 40 ms
# Of work that the library does at once. Fuel is about 14,000 a millisecond, items 1,500.
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=20_000,  # of all sequences that share a grammar; 600 bytes each
    max_grammar_size=100_000,
    verbose_errors=False,
)


class Compiler:
    """For one tokenizer. Raises ValueError if the library can't follow its tokens."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        stop_ids: Sequence[int],
    ) -> None:
        self._tokenizer = _tokenizer(tokenizer_json, vocab_size, tuple(stop_ids))
        self._cache = _Cache()
        threads = ThreadPoolExecutor(NUM_THREADS, "grammars", lower_priority, (NICENESS,))
        self._queue: JobQueue[Grammar] = JobQueue(self.compile_now, threads)

    def cached(self, constraint: Constraint) -> TokenGrammar | None:
        """One that was compiled before, and whose lexer isn't full."""
        found = self._cache.get(constraint)
        return None if found is None or found.is_worn_out else found

    def start(self, constraint: Constraint, owner: str) -> Future[Grammar]:
        """Done already, if the grammar is cached; else by another thread."""
        found = self.cached(constraint)
        if found is None:
            return self._queue.put(constraint, owner)
        done: Future[Grammar] = Future()
        done.set_result(found)
        return done

    def compile_now(self, constraint: Constraint) -> TokenGrammar:
        """In the caller's thread. May take long."""
        found = self.cached(constraint)
        if found is None:
            found = self._compile(constraint)
            self._cache.put(constraint, found)
        return found

    def _compile(self, constraint: Constraint) -> TokenGrammar:
        try:
            if constraint.kind == "choice":
                self._check_choices(constraint.text)
            return self._try(source_of(constraint))
        except ValueError as error:
            for field, schema in tool_schemas(constraint).items():  # which of them is it?
                self._check_alone(field, schema)
            reason = str(error)
            raise _error(constraint.field, reason, self._place(constraint, reason)) from None

    def _check_choices(self, choices: str) -> None:
        for text in json.loads(choices):
            for token in self._tokenizer.tokenize_str(text):
                if self._tokenizer.is_special_token(token):
                    raise self._not_a_text(token)

    def _check_alone(self, field: str, schema: str) -> None:
        try:
            self._compile(Constraint("json_schema", schema))
        except InvalidFieldError as error:
            raise InvalidFieldError(field, error.reason) from None

    def _place(self, constraint: Constraint, reason: str) -> str:
        """Of a mistake in a schema. In other kinds the library tells it itself."""
        try:
            schema = json.loads(constraint.text) if constraint.kind == "json_schema" else None
        except (ValueError, RecursionError):
            schema = None
        return locate(reason, schema, self._problem) if isinstance(schema, dict) else ""

    def _problem(self, schema: Schema) -> str | None:
        try:
            self._try(schema_source(parse_schema(json.dumps(schema))))
        except (ValueError, RecursionError) as error:
            return str(error)
        return None

    def _try(self, source: str) -> TokenGrammar:
        make = functools.partial(
            llguidance.LLMatcher, self._tokenizer, source, log_level=0, limits=LIMITS
        )
        with panics_are_errors():
            grammar = TokenGrammar(make, self._tokenizer.vocab_size)
            if not grammar.fresh.is_error():
                self._warm_up(grammar.fresh)
        if grammar.fresh.is_error():
            raise ValueError(grammar.fresh.get_error())
        return grammar

    def _warm_up(self, matcher: llguidance.LLMatcher) -> None:
        """The first mask takes longest, and copies needn't repeat it. The mask goes first: the
        library frees the interpreter's lock for it, and the jump-forward tokens use what it found.
        """
        matcher.compute_bitmask()
        jump_forward = matcher.compute_ff_tokens()
        is_special = self._tokenizer.is_special_token
        if jump_forward and not is_special(jump_forward[0]):
            trial = matcher.deep_copy()
            trial.consume_token(jump_forward[0])
            if trial.is_error():
                raise ValueError("the text that it requires has no end, or is too long to compute")
        if len(jump_forward) > MAX_DETERMINED:
            num = len(jump_forward)
            raise ValueError(f"{num} tokens without a choice; {MAX_DETERMINED} at most")
        if any(map(is_special, jump_forward)):  # from a token of the grammar, or from a text?
            num_valid = matcher.deep_copy().validate_tokens(jump_forward)
            rejected = jump_forward[num_valid : num_valid + 1]
            if any(map(is_special, rejected)):
                raise self._not_a_text(*rejected)

    def _not_a_text(self, token: int) -> ValueError:
        name = self._tokenizer.decode_str([token])
        rule = f"Leave it out, or write it as a token in a Lark grammar: <[{token}]>"
        return ValueError(f"the added token {name} (id {token}) can't be matched as text. {rule}")


@functools.lru_cache(maxsize=1)
def _tokenizer(
    tokenizer_json: str, vocab_size: int, stop_ids: tuple[int, ...]
) -> llguidance.LLTokenizer:
    """Takes half a second and holds the interpreter's lock: a reload mostly has the same one."""
    with panics_are_errors():
        return llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(stop_ids))


class _Cache:
    """Least recently used first out."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[bytes, tuple[TokenGrammar, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, constraint: Constraint) -> TokenGrammar | None:
        with self._lock:
            if constraint.key not in self._grammars:
                return None
            self._grammars.move_to_end(constraint.key)
            return self._grammars[constraint.key][0]

    def put(self, constraint: Constraint, grammar: TokenGrammar) -> None:
        key, num_bytes = constraint.key, len(constraint.text)
        with self._lock:
            self._num_bytes += 0 if key in self._grammars else num_bytes
            self._grammars[key] = grammar, num_bytes
            self._grammars.move_to_end(key)
            while len(self._grammars) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
                _, (_, num_bytes) = self._grammars.popitem(last=False)
                self._num_bytes -= num_bytes


def _error(field: str, reason: str, place: str) -> InvalidFieldError:
    reason = " ".join(reason.replace("<non-verbose/>", "").split())
    if reason.startswith("NoExtension"):
        reason = "no text satisfies it"
    reason = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "…"
    return InvalidFieldError(field, f"can't be kept to: {reason}{f', at {place}' if place else ''}")
