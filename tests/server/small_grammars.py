"""Grammars over fifty tokens, whose sequences the engine's tests constrain; and over bytes."""

import functools
import json
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from quill.server.grammar.compiler import Compiler
from quill.server.grammar.matcher import TokenGrammar
from quill.server.request import Constraint, ConstraintKind
from tests.server.fake_session import VOCAB_SIZE
from tests.server.running import make_grammars

EOS = 1
CHARACTERS = 'abcdefglnrstu0123456789{}[]":,._- '.replace(" ", "Ġ")
PIECES = ["<unk>", "<eos>", *CHARACTERS, *("ab", "tr", "ue", '":', '{"', "Ġ1", ",Ġ", "12", "fa")]
PIECES += [f"<{number}>" for number in range(VOCAB_SIZE - len(PIECES))]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 300},
        "b": {"enum": ["ab", "trust", None]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, tuple[ConstraintKind, str]] = {
    "schema": ("json_schema", json.dumps(SCHEMA)),
    "object": ("json_object", "true"),
    "regex": ("regex", "[a-f]{2,9}(12|1[0-9]{2,30})"),
    "choice": ("choice", '["ab", "abc", "true", "trust"]'),
    "lark": ("lark", 'start: item ("," item)*\nitem: "[" start "]" | /[0-9]+/'),
}


def small_tokenizer() -> str:
    merges = [(chunk[0], chunk[1]) for chunk in PIECES if len(chunk) == 2]
    vocabulary = {chunk: id for id, chunk in enumerate(PIECES)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    special = [chunk for chunk in PIECES if chunk[0] == "<"]
    inner.add_special_tokens([AddedToken(chunk, special=True) for chunk in special])
    return inner.to_str()


@functools.cache
def small_compiler() -> Compiler:
    return Compiler(small_tokenizer(), VOCAB_SIZE, [EOS])


def small_grammar(kind: ConstraintKind, text: str) -> TokenGrammar:
    return small_compiler().compile_now(Constraint(kind, text))


def byte_grammar(kind: ConstraintKind, text: str) -> TokenGrammar:
    """Over the bytes of the scripted session's tokenizer."""
    return make_grammars().compile_now(Constraint(kind, text))


def allows(schema: dict[str, Any], text: str) -> bool:
    """Whether output under this schema may begin so."""
    tokens = [byte + 1 for byte in text.encode()]
    matcher = byte_grammar("json_schema", json.dumps(schema)).matcher()
    return matcher.num_allowed(tokens) == len(tokens)


def text_of(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens if token != EOS).replace("Ġ", " ")
