"""Every option of a request in one table: type, range, default, and its name on each wire.

Knows: names, types, ranges, help texts. Imports nothing but the errors: no grpc, protobuf, numpy.
Does not know: models, prompts, how a wire is parsed. Limits of a model are passed to `check`.

How to use it:
- `GENERATE`, `EMBED`, `SCORE`, `FILL_MASK` are the options of one call each, by `Field.name`, which
  is the name in generation.proto, in `Request`, in the Python client and in error details.
- `field.json_name` is the name in OpenAI's JSON and in KServe's parameters (vLLM's names).
- Command line: `parser.add_argument(field.flag, type=field.parse, metavar="N", help=field.help)`;
  booleans take `action="store_true"`, fields with `is_list` take `action="append"`.
- `field.check(value)` raises InvalidFieldError with `field.name`; `field.rule()` words the rule.
- `Choices` maps an enum's values to their names in generation.proto and in JSON.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quill.server.errors import InvalidFieldError

Type = Literal["integer", "number", "boolean", "strings", "integers", "bias", "choice"]
MAX_SEED = 2**64 - 1
MAX_PRIORITY = 10


@dataclass(frozen=True)
class Choices:
    """An enum. Its proto names are `{prefix}_{VALUE}`; `unset` is the proto's UNSPECIFIED value."""

    prefix: str
    values: tuple[str, ...]
    unset: str = ""  # empty: UNSPECIFIED is the model's own choice, and no value
    json: Mapping[Any, str] | None = None  # what JSON has for each; None: the values themselves

    def proto_name(self, value: str) -> str:
        return f"{self.prefix}_{'UNSPECIFIED' if value == self.unset else value.upper()}"


EARLY_STOPPING = Choices(
    "EARLY_STOPPING",
    ("heuristic", "at_once", "never"),
    unset="heuristic",
    json={False: "heuristic", True: "at_once", "never": "never"},
)
POOLING = Choices("POOLING", ("mean", "first", "last"))
TOOL_MODE = Choices("TOOL_MODE", ("auto", "none", "required"))
FINISH_REASON = Choices("FINISH_REASON", ("stop", "eos", "length", "cancelled", "deadline"))
# Why an answer ended, as OpenAI and vLLM name it. Neither has a name for a deadline.
OPENAI_FINISH_REASON = {"stop": "stop", "eos": "stop", "length": "length", "deadline": "length"}
VLLM_FINISH_REASON = OPENAI_FINISH_REASON | {"cancelled": "abort", "deadline": "abort"}
FAMILY = Choices("FAMILY", ("causal", "seq2seq", "encoder"))


@dataclass(frozen=True, kw_only=True)
class Field:
    """One option. An option that a client leaves out is `default`; None: model or server decide."""

    name: str
    type: Type
    help: str
    minimum: float | None = None
    maximum: float | None = None
    is_open: bool = False  # the minimum itself is not allowed
    off: Any = None  # the value that switches it off; None: there is none
    default: Any = None
    is_model_default: bool = False  # a bundle may have a default of its own
    is_sampling: bool = False  # changes how tokens are sampled: not with beam search
    max_items: int | None = None  # of a list or a mapping
    json_name: str = ""
    json_aliases: tuple[str, ...] = ()  # later ones go before
    from_json: Callable[[Any], Any] | None = None  # JSON's convention to ours
    flag: str = ""
    choices: Choices | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "json_name", self.json_name or self.name)
        object.__setattr__(self, "flag", self.flag or f"--{self.name.replace('_', '-')}")

    @property
    def is_list(self) -> bool:
        return self.type in ("strings", "integers", "bias")

    @property
    def parse(self) -> Callable[[str], Any]:
        """Reads one value from a command line or a KServe parameter. Raises ValueError."""
        return _PARSERS[self.type]

    def rule(self, maximum: float | None = None) -> str:
        """What is allowed, in words. `maximum`: the model's, where the table has none."""
        most = self.maximum if maximum is None else maximum
        off = "" if self.off is None else f", where {self.off} is off"
        least = "" if self.minimum is None else str(self.minimum)
        if most is None:
            return f"{'finite and ' if self.type == 'number' else ''}at least {least}{off}"
        if self.is_open:
            return f"above {least} and at most {most}{off}"
        return f"from {least} to {most}{off}"

    def check(self, value: Any, maximum: float | None = None) -> None:
        """Raises InvalidFieldError unless the number, or each entry of a list, is in range."""
        if self.is_list:
            self._check_entries(value)
        elif self.type in ("integer", "number") and not self._allows(value, maximum):
            rule = f"it must be {self.rule(maximum)}"
            raise InvalidFieldError(self.name, f"is {value}; {rule}")

    def _allows(self, value: float, maximum: float | None = None) -> bool:
        most = self.maximum if maximum is None else maximum
        if not math.isfinite(value) or (most is not None and value > most):
            return False
        return (
            self.minimum is None
            or value > self.minimum
            or (value == self.minimum and not self.is_open)
        )

    def _check_entries(self, entries: Any) -> None:
        if self.max_items is not None and len(entries) > self.max_items:
            rule = f"at most {self.max_items} are allowed"
            raise InvalidFieldError(self.name, f"has {len(entries)} entries; {rule}")
        if self.type == "strings":
            for length in (len(each.encode()) for each in entries):
                if not self._allows(length):
                    rule = f"each must have {self.rule()}"
                    raise InvalidFieldError(self.name, f"has an entry of {length} bytes; {rule}")
        elif self.type == "bias":
            for token, bias in entries.items():
                if not self._allows(bias):
                    given = f"of token {token} is {bias}"
                    raise InvalidFieldError(self.name, f"{given}; it must be {self.rule()}")


def _boolean(text: str) -> bool:
    known = {"true": True, "false": False, "1": True, "0": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def _bias(text: str) -> tuple[int, float]:
    """As in 42:-100."""
    token, _, bias = text.partition(":")
    return int(token), float(bias)


_PARSERS: dict[Type, Callable[[str], Any]] = {
    "integer": int,
    "number": float,
    "boolean": _boolean,
    "strings": str,
    "integers": int,
    "bias": _bias,
    "choice": str,
}


def _table(*fields: Field) -> Mapping[str, Field]:
    return {field.name: field for field in fields}


def _number(name: str, low: float, high: float | None, help: str, **rest: Any) -> Field:
    return Field(name=name, type="number", minimum=low, maximum=high, help=help, **rest)


def _integer(name: str, low: int, high: int | None, help: str, **rest: Any) -> Field:
    return Field(name=name, type="integer", minimum=low, maximum=high, help=help, **rest)


_SAMPLING: dict[str, Any] = {"is_sampling": True}
_DEFAULTED: dict[str, Any] = {"is_sampling": True, "is_model_default": True}
PRIORITY = _integer(
    "priority",
    -MAX_PRIORITY,
    MAX_PRIORITY,
    "which of a caller's own requests goes first; -10 to 10, default 0. gRPC and the command "
    "line: higher is sooner; HTTP and KServe: lower is sooner, as in vLLM",
    default=0,
    from_json=lambda priority: -priority,
)
# A row an option: name, minimum, maximum (None: the model's, or none), help; then what is special.
# fmt: off
GENERATE = _table(
    _integer("max_new_tokens", 1, None, "how many tokens to generate at most, at least 1",
             json_name="max_tokens", json_aliases=("max_completion_tokens",)),
    _number("temperature", 0, None,
            "0 is greedy: always the likeliest token; above 1 flattens the distribution",
            **_DEFAULTED),
    _number("top_p", 0, 1,
            "sample from the likeliest tokens that together reach this probability; 1 is off",
            is_open=True, off=1, **_DEFAULTED),
    _integer("top_k", 0, None,
             "sample from the k likeliest tokens; 0 is off, and over HTTP -1, too",
             off=0, from_json=lambda k: 0 if k == -1 else k, **_DEFAULTED),
    _number("min_p", 0, 1,
            "drop tokens below this share of the likeliest token's probability; 0 is off",
            off=0, **_DEFAULTED),
    _number("repetition_penalty", 0.01, 100,
            "above 1: tokens of prompt and answer are less likely to come again; 1 is off",
            off=1, **_DEFAULTED),
    _number("frequency_penalty", -2, 2,
            "subtracted from a token's logit for each time the answer has it; -2 to 2, default 0",
            default=0.0, **_SAMPLING),
    _number("presence_penalty", -2, 2,
            "subtracted from a token's logit once the answer has it; -2 to 2, default 0",
            default=0.0, **_SAMPLING),
    Field(name="logit_bias", type="bias", minimum=-100, maximum=100, max_items=1024,
          help="added to the logits of single tokens, from -100 to 100 by token id", **_SAMPLING),
    _integer("seed", 0, MAX_SEED,
             "the same seed, request and bundle give the same tokens (default: the server picks "
             "one)", from_json=lambda seed: seed % (MAX_SEED + 1)),  # negative ones are legal
    Field(name="stop", type="strings", minimum=1, maximum=256, max_items=16,
          help="strings that end an answer; they aren't part of it"),
    Field(name="stop_token_ids", type="integers", max_items=64, flag="--stop-token-id",
          help="tokens that end an answer"),
    Field(name="ignore_eos", type="boolean", default=False,
          help="go on after the model's own end-of-text tokens"),
    _integer("min_new_tokens", 0, None, "no token ends the answer before so many; default 0",
             default=0, json_name="min_tokens"),
    _integer("num_sequences", 1, None, "how many answers; default 1", default=1, json_name="n"),
    _integer("logprobs", 0, 20,
             "log-probabilities of the answer, and of the n likeliest tokens at each position; "
             "0 to 20"),
    _integer("prompt_logprobs", 0, 20, "the same for the prompt; 0 to 20"),
    Field(name="echo", type="boolean", default=False, help="put the prompt before the answer"),
    PRIORITY,
    _integer("num_beams", 1, None,
             "beam search with so many beams instead of sampling; 1 is off",
             off=1, flag="--beams"),
    _number("length_penalty", -10, 10,
            "of beam search: above 0 favors long answers; -10 to 10, default 1", default=1.0),
    Field(name="early_stopping", type="choice", default="heuristic", choices=EARLY_STOPPING,
          help="of beam search: when it may end"),
)
EMBED = _table(
    Field(name="pooling", type="choice", choices=POOLING,
          help="how a text's hidden states become one embedding (default: the model's own)"),
    Field(name="normalize", type="boolean",
          help="scale embeddings to the length 1 (default: the model's own)"),
    _integer("dimensions", 1, None, "only the first so many numbers of each embedding"),
    PRIORITY,
)
SCORE = _table(PRIORITY)
FILL_MASK = _table(
    _integer("top_k", 1, 20, "how many tokens to report for each mask; 1 to 20, default 5",
             default=5),
    PRIORITY,
)
# fmt: on
SAMPLING = tuple(name for name, field in GENERATE.items() if field.is_sampling)
# A bundle may have a default of its own for these.
MODEL_DEFAULTS = tuple(name for name, field in GENERATE.items() if field.is_model_default)
