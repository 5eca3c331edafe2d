"""Turns the forms that clients ask for into grammars over a model's tokens.

Knows: llguidance, what may be asked of it, threads. Does not know: protobuf, requests, answers.

Whoever asks may be hostile: forms are limited in bytes, depth and width before the library sees
them, and in work by the library itself. They are compiled by threads of their own, for so long and
no longer. Errors name the place of the mistake and go to the client only: they may quote the form.
"""

import asyncio
import functools
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import llguidance

from quill.server.errors import InvalidFieldError
from quill.server.grammar.calendar import add_calendar
from quill.server.grammar.matcher import Grammar, panics_are_errors
from quill.server.grammar.patterns import escapes, narrow_patterns
from quill.server.grammar.schema_check import check_grammar, check_schema
from quill.server.grammar.schema_places import place_of
from quill.server.machine.priority import be_nice

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "tools"]

MAX_BYTES = 2**16
MAX_CACHED = 64  # grammars: each may learn up to 12 MB
MAX_CACHED_BYTES = 2**22  # of the forms that they were made from
MAX_COMPILE_S = 1.0
NUM_THREADS = 2
# Three threads on two cores double a step's time. A niceness of 5 leaves the model's threads most
# of it, and a large form is compiled within its second all the same; with 15 it wasn't.
NICENESS = 5
MAX_SAID = 300  # characters of the library's own words
# Of work that the library does at once. Fuel is about 14,000 a millisecond, items 1,500.
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=20_000,  # of all answers that share a grammar; 600 bytes each
    max_grammar_size=100_000,
    verbose_errors=False,
)
FIELD = "constraint"


@dataclass(frozen=True)
class Form:
    """What a client asked for. Of choices, the text is a JSON list; of tools, a grammar of ours."""

    kind: Kind
    text: str
    schemas: tuple[tuple[str, str], ...] = ()  # of tools: each with its field's name

    def __post_init__(self) -> None:
        num_bytes = len(self.text.encode())
        if num_bytes > MAX_BYTES and self.kind != "tools":  # whose schemas are what is limited
            rule = f"it may have {MAX_BYTES} at most"
            raise InvalidFieldError(self.field, f"has {num_bytes} bytes; {rule}")
        if not self.text:
            raise InvalidFieldError(self.field, "is empty")

    @property
    def field(self) -> str:
        return "tools" if self.kind == "tools" else f"{FIELD}.{self.kind}"

    @property
    def key(self) -> bytes:
        return hashlib.sha256(f"{self.kind}\0{self.text}".encode()).digest()


class Compiler:
    """For one tokenizer. Raises ValueError if the library can't follow its tokens."""

    def __init__(self, tokenizer_json: str, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer = _tokenizer(tokenizer_json, vocab_size, tuple(stop_ids))
        self._cache = _Cache()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars", be_nice, (NICENESS,))

    def known(self, form: Form) -> Grammar | None:
        """One that was asked for before, and isn't worn out."""
        found = self._cache.get(form)
        return None if found is None or found.is_worn_out else found

    async def compile(self, form: Form) -> Grammar:
        """From the cache, or made by another thread."""
        found = self.known(form)
        if found is not None:
            return found
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self.compile_now, form)
        try:
            return await asyncio.wait_for(work, MAX_COMPILE_S)
        except TimeoutError:
            rule = f"takes longer than {MAX_COMPILE_S:g} s to prepare. Ask for something simpler"
            raise InvalidFieldError(form.field, rule) from None

    def compile_now(self, form: Form) -> Grammar:
        """In the caller's thread. May take long."""
        found = self.known(form)
        if found is None:
            found = self._compile_or_blame(form)
            self._cache.put(form, found)
        return found

    def _compile_or_blame(self, form: Form) -> Grammar:
        """The one of several schemas that can't be kept to is named."""
        try:
            return self._compile(form)
        except InvalidFieldError:
            for field, schema in form.schemas:
                self._blame(field, schema)
            raise

    def _blame(self, field: str, schema: str) -> None:
        try:
            self._compile(Form("json_schema", schema))
        except InvalidFieldError as error:
            raise InvalidFieldError(field, error.reason) from None

    def _compile(self, form: Form) -> Grammar:
        try:
            return self._try(_source(form))
        except ValueError as error:
            said = str(error)
            raise _refusal(form, said, self._place(form, said)) from None

    def _place(self, form: Form, said: str) -> str:
        """Of a mistake in a schema. In other forms the library tells it itself."""
        try:
            schema = json.loads(form.text) if form.kind == "json_schema" else None
        except (ValueError, RecursionError):
            schema = None
        return place_of(said, schema, self._problem) if isinstance(schema, dict) else ""

    def _problem(self, schema: dict[str, Any]) -> str | None:
        try:
            self._try(schema_source(json.dumps(schema)))
        except (ValueError, RecursionError) as error:
            return str(error)
        return None

    def _try(self, source: str) -> Grammar:
        make = functools.partial(
            llguidance.LLMatcher, self._tokenizer, source, log_level=0, limits=LIMITS
        )
        with panics_are_errors():
            grammar = Grammar(make, self._tokenizer.vocab_size)
            if not grammar.fresh.is_error():
                _look(grammar.fresh)
        if grammar.fresh.is_error():
            raise ValueError(grammar.fresh.get_error())
        return grammar


def _look(matcher: llguidance.LLMatcher) -> None:
    """The first look is the longest, and copies needn't repeat it. The mask is first: for that the
    library frees the interpreter's lock, and what else it finds out meanwhile it knows afterwards.
    """
    matcher.compute_bitmask()
    forced = matcher.compute_ff_tokens()
    if forced:
        trial = matcher.deep_copy()
        trial.consume_token(forced[0])
        if trial.is_error():
            raise ValueError("what must be said has no end, or none that can be foreseen")


@functools.lru_cache(maxsize=1)
def _tokenizer(
    tokenizer_json: str, vocab_size: int, stop_ids: tuple[int, ...]
) -> llguidance.LLTokenizer:
    """Takes half a second, and holds everybody up meanwhile: a reload mostly has the same one."""
    with panics_are_errors():
        return llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(stop_ids))


class _Cache:
    """The last that were used."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[bytes, tuple[Grammar, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, form: Form) -> Grammar | None:
        with self._lock:
            if form.key not in self._grammars:
                return None
            self._grammars.move_to_end(form.key)
            return self._grammars[form.key][0]

    def put(self, form: Form, grammar: Grammar) -> None:
        with self._lock:
            if form.key not in self._grammars:
                self._num_bytes += len(form.text)
            self._grammars[form.key] = grammar, len(form.text)
            self._grammars.move_to_end(form.key)
            while len(self._grammars) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
                _, (_, num_bytes) = self._grammars.popitem(last=False)
                self._num_bytes -= num_bytes


def _source(form: Form) -> str:
    """The grammar in the library's own words."""
    matcher = llguidance.LLMatcher
    if form.kind == "regex":
        return str(matcher.grammar_from_regex(form.text))
    if form.kind == "lark":
        check_grammar(form.text)
        return str(llguidance.grammar_from("grammar", form.text))  # llama.cpp's notation, too
    if form.kind == "choice":
        # As one lexeme: of rules that begin alike, 1,000 are too many.
        texts = " | ".join(json.dumps(text) for text in json.loads(form.text))
        return str(matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
    if form.kind == "tools":
        return form.text
    return schema_source(form.text if form.kind == "json_schema" else '{"type": "object"}')


def schema_source(schema: str) -> str:
    """Raises ValueError if it isn't one, or too large."""
    parsed = check_schema(schema)
    if add_calendar(parsed) | narrow_patterns(parsed):
        schema = json.dumps(parsed)
    return str(
        llguidance.LLMatcher.grammar_from_json_schema(
            schema,
            # As most JSON is written that models have read, and no room for endless white space.
            defaults={
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
            },
            overrides={
                "lenient": False,  # all of a schema counts
                "coerce_one_of": False,
                "json_allowed_escapes": escapes(parsed),
            },
        )
    )


def _refusal(form: Form, said: str, place: str) -> InvalidFieldError:
    said = " ".join(said.replace("<non-verbose/>", "").split())
    if said.startswith("NoExtension"):
        said = "no text satisfies it"
    said = said if len(said) <= MAX_SAID else said[:MAX_SAID] + "…"
    where = f", at {place}" if place else ""
    return InvalidFieldError(form.field, f"can't be kept to: {said}{where}")
