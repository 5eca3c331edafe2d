"""Reads what a Hugging Face directory says about text: tokenizer, chat template, defaults.

Knows: tokenizer.json, tokenizer_config.json, generation_config.json and their older spellings.
Does not know: tensors, the shape of the model.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import CheckpointError
from model.tokenizer import SpecialTokens, Tokenizer
from model.typed_values import TypedValues

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "max_new_tokens", "num_beams", "length_penalty")


class Text(NamedTuple):
    """Everything that the directory says about text."""

    tokenizer: Tokenizer | None
    special_tokens: SpecialTokens
    prepend_bos: bool
    stop_ids: tuple[int, ...]
    chat_template: str | None
    generation: dict[str, float | int]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def read_text(directory: Path, settings: TypedValues, vocab_size: int) -> Text:
    generation = read_json(directory / "generation_config.json")
    tokenizer_config = read_json(directory / "tokenizer_config.json")
    tokenizer_json = read_json(directory / "tokenizer.json")
    ids = _added_tokens(tokenizer_json)
    _check_ids(ids, vocab_size)
    special = SpecialTokens(
        bos=_part(tokenizer_config, "bos_token", ids, settings),
        eos=_part(tokenizer_config, "eos_token", ids, settings),
        pad=_part(tokenizer_config, "pad_token", ids, settings),
        unk=_part(tokenizer_config, "unk_token", ids, settings),
    )
    stop_ids = _ids(generation.get("eos_token_id")) or _ids(settings.get("eos_token_id"))
    if special.eos is None and stop_ids:
        special = replace(special, eos=min(stop_ids))
    tokenizer = Tokenizer.load(directory / "tokenizer.json", special) if tokenizer_json else None
    return Text(
        tokenizer=tokenizer,
        special_tokens=special,
        prepend_bos=special.bos is not None and special.bos == _first_id(tokenizer_json, ids),
        stop_ids=tuple(sorted({*stop_ids, *_ids(special.eos)})),
        chat_template=_chat_template(directory, tokenizer_config),
        generation=_defaults(generation),
    )


def _added_tokens(tokenizer_json: dict[str, Any]) -> dict[str, int]:
    added = tokenizer_json.get("added_tokens", [])
    try:
        return {str(token["content"]): int(token["id"]) for token in added}
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"tokenizer.json has added_tokens of a strange form: {error}"
        ) from error


def _check_ids(ids: dict[str, int], vocab_size: int) -> None:
    outside = [token for token, index in ids.items() if not 0 <= index < vocab_size]
    if outside:
        raise CheckpointError(
            f"the tokenizer has the token {outside[0]!r} with the id {ids[outside[0]]}, but the "
            f"model has only {vocab_size} embeddings. Resize the model's embeddings to the "
            "tokenizer, or remove the token"
        )


def _part(
    tokenizer_config: dict[str, Any], name: str, ids: dict[str, int], settings: TypedValues
) -> int | None:
    """A special token's id: by its text in the tokenizer's config, else from the model's."""
    token = tokenizer_config.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str) and token in ids:
        return ids[token]
    return next(iter(sorted(_ids(settings.get(f"{name}_id")))), None)


def _ids(value: object) -> set[int]:
    listed = value if isinstance(value, list) else [value]
    return {index for index in listed if type(index) is int}


def _first_id(tokenizer_json: dict[str, Any], ids: dict[str, int]) -> int | None:
    """The token that the tokenizer itself puts before every text, if it does."""
    processor = tokenizer_json.get("post_processor") or {}
    try:
        for step in processor.get("processors", [processor]):
            template = step.get("single", [])
            if template and "SpecialToken" in template[0]:
                return ids.get(template[0]["SpecialToken"]["id"])
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"tokenizer.json has a strange post_processor: {error}") from error
    return None


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """A file of its own is the newest spelling and wins."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = read_json(directory / "chat_template.json").get("chat_template")
    template = template or tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _defaults(generation: dict[str, Any]) -> dict[str, float | int]:
    """The author's settings. Without sampling the answer is greedy: temperature 0."""
    greedy = generation.get("do_sample") is False
    names = _PENALTIES if greedy else (*_SAMPLING, *_PENALTIES)
    defaults: dict[str, float | int] = {"temperature": 0.0} if greedy else {}
    for name in names:
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[name] = value
    return defaults
