"""Reads the text settings of a Hugging Face directory: tokenizer, chat template, defaults; how a
sentence-embedding directory pools hidden states to one embedding.

Knows: tokenizer.json, tokenizer_config.json, generation_config.json and their older spellings;
that Marian has source.spm and vocab.json in the place of the first; modules.json and the pooling's
config.json of sentence-transformers.
Does not know: tensors, the shape of the model.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from quill.model.checkpoint.checkpoint import Pooling
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.data.sentencepiece import marian_tokenizer
from quill.model.data.tokenizer import SpecialTokens, Tokenizer
from quill.model.errors import CheckpointError, UnsupportedError

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "max_new_tokens", "num_beams", "length_penalty")
# What a request may have, too: a default outside would fail every request that doesn't say it.
_WITHIN = {
    "temperature": (0.0, 1e9),
    "top_k": (0, 1 << 31),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "max_new_tokens": (1, 1 << 31),
}

MODULES = "modules.json"
# Of sentence-transformers' module Transformer, by kinds of models; it reads the first.
_SENTENCE_FILES = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
_POOLINGS: dict[str, Pooling] = {
    "cls_token": "first",
    "cls": "first",
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
}


class Text(NamedTuple):
    """The directory's text settings."""

    tokenizer: Tokenizer | None
    special_tokens: SpecialTokens
    prepend_bos: bool
    append_eos: bool
    stop_ids: tuple[int, ...]
    chat_template: str | None
    generation: dict[str, float | int]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def read_text(
    directory: Path, settings: TypedValues, vocab_size: int, *, masked: bool, embeds: bool
) -> Text:
    """`masked`: whether the model finds masked tokens; else no token is its mask.
    `embeds`: whether bos and eos are what the tokenizer puts around every text."""
    generation = read_json(directory / "generation_config.json")
    tokenizer_config = read_json(directory / "tokenizer_config.json")
    tokenizer_json, marian = read_json(directory / "tokenizer.json"), None
    if not tokenizer_json and (directory / "source.spm").exists():
        marian = marian_tokenizer(directory)
        tokenizer_json = json.loads(marian.to_str())
    ids = _added_tokens(tokenizer_json)
    _check_ids(ids, vocab_size)
    special = _special_tokens(tokenizer_config, ids, settings, vocab_size)
    special = special if masked else replace(special, mask=None)
    first, last = (_placed_id(tokenizer_json, ids, place) for place in (0, -1))
    translates = settings.flag("is_encoder_decoder", False)
    if translates:
        start = generation.get("decoder_start_token_id", settings.get("decoder_start_token_id"))
        special = replace(
            special,
            bos=min(_ids(start, vocab_size), default=special.bos),
            source_bos=first,
        )
    stop_ids = _ids(generation.get("eos_token_id"), vocab_size)
    stop_ids = stop_ids or _ids(settings.get("eos_token_id"), vocab_size)
    if special.eos is None and stop_ids:
        special = replace(special, eos=min(stop_ids))
    stop_ids |= _ids(special.eos, vocab_size)
    if embeds:
        bos, eos = special.bos if first is None else first, special.eos if last is None else last
        special = replace(special, bos=bos, eos=eos)
    tokenizer = None
    if tokenizer_json:
        path = directory / "tokenizer.json"
        tokenizer = Tokenizer.load(path, special) if marian is None else Tokenizer(marian, special)
        _check_ids(tokenizer.vocabulary, vocab_size)
    return Text(
        tokenizer=tokenizer,
        special_tokens=special,
        # For seq2seq bos begins the answer, whatever its texts begin with.
        prepend_bos=not translates and first is not None and special.bos == first,
        append_eos=last is not None and special.eos == last,
        stop_ids=tuple(sorted(stop_ids)),
        chat_template=_chat_template(directory, tokenizer_config),
        generation=_defaults(generation, samples=not translates),
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


def _special_tokens(
    tokenizer_config: dict[str, Any], ids: dict[str, int], settings: TypedValues, vocab_size: int
) -> SpecialTokens:
    """Each by its text in the tokenizer's config, else by its id in the model's; a mask that
    neither has by its usual text."""
    found: dict[str, int | None] = {}
    # BERT's names for what begins and ends a text stand in for the usual ones.
    others = {"bos": "cls", "eos": "sep"}
    for part in ("bos", "eos", "pad", "unk", "mask"):
        named: set[int] = set()
        for name in (part, others.get(part, part)):
            token = tokenizer_config.get(f"{name}_token")
            token = str(token.get("content") if isinstance(token, dict) else token)
            named = named or ({ids[token]} if token in ids else set())
        numbered = _ids(settings.get(f"{part}_token_id"), vocab_size)
        found[part] = min(named or numbered, default=None)
    if found["mask"] is None:
        found["mask"] = ids.get("[MASK]", ids.get("<mask>"))
    return SpecialTokens(**found)


def _ids(value: object, vocab_size: int) -> set[int]:
    """The ids in a number or a list of them. Ids beyond the vocabulary are dropped."""
    listed = value if isinstance(value, list) else [value]
    return {index for index in listed if type(index) is int and 0 <= index < vocab_size}


def _placed_id(tokenizer_json: dict[str, Any], ids: dict[str, int], place: int) -> int | None:
    """The token that the tokenizer itself puts before every text (place 0) or after it (-1), if
    it does."""
    processor = tokenizer_json.get("post_processor") or {}
    try:
        for step in processor.get("processors", [processor]):
            # Older spellings, of [text, id].
            if step.get("type") in ("BertProcessing", "RobertaProcessing"):
                return ids.get(step["sep" if place else "cls"][0])
            template = step.get("single", [])
            if template and "SpecialToken" in template[place]:
                return ids.get(template[place]["SpecialToken"]["id"])
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"tokenizer.json has a strange post_processor: {error}") from error
    return None


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """A separate file is the newest format and has priority."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8", errors="replace")
    template = read_json(directory / "chat_template.json").get("chat_template")
    template = template or tokenizer_config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _defaults(generation: dict[str, Any], samples: bool) -> dict[str, float | int]:
    """The author's settings. Without sampling the answer is greedy: temperature 0.

    `samples`: whether the model samples if the author doesn't specify it.
    """
    greedy = not generation.get("do_sample", samples)
    names = _PENALTIES if greedy else (*_SAMPLING, *_PENALTIES)
    defaults: dict[str, float | int] = {"temperature": 0.0} if greedy else {}
    for name in names:
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_default(name, value)
            defaults[name] = value
    return defaults


def _check_default(name: str, value: float) -> None:
    if name not in _WITHIN:
        return
    low, high = _WITHIN[name]
    if not low <= value <= high or (isinstance(low, int) and not isinstance(value, int)):
        raise CheckpointError(
            f"generation_config.json has {name} {value}; it must be from {low} to {high}. Correct "
            "it, or take it out: then nothing is set"
        )


@dataclass(frozen=True)
class Sentence:
    """Pooling and normalization of embeddings, if the directory has them."""

    pooling: Pooling | None = None
    normalize: bool = False
    model: Path | None = None  # where the model's own files are; None: the directory isn't such
    max_tokens: int | None = None  # where sentence-transformers cuts texts off; None: unsaid


def read_sentence(directory: Path) -> Sentence:
    modules = _modules(directory / MODULES)
    if not modules:
        return Sentence()
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedError(
            f"{directory / MODULES} lists {', '.join(kinds)}; Quill knows a Transformer, then "
            "Pooling, then Normalize or nothing"
        )
    model, pooling = (directory / path for _, path in modules[:2])
    files = [path for name in _SENTENCE_FILES if (path := model / name).exists()]
    settings = TypedValues(read_json(files[0]) if files else {}, str(files[0]) if files else "")
    _refuse_changed_texts(directory, model, settings)
    max_tokens = _max_tokens(settings, read_json(model / "tokenizer_config.json"))
    normalize = kinds[-1] == "Normalize"
    return Sentence(_pooling(pooling / "config.json"), normalize, model, max_tokens)


def _max_tokens(settings: TypedValues, tokenizer_config: dict[str, Any]) -> int | None:
    """With the tokens around a text."""
    if settings.get("max_seq_length") is not None:
        max_tokens = settings.integer("max_seq_length")
        if max_tokens < 1:
            raise CheckpointError(f"max_seq_length is {max_tokens}; it must be positive")
        return max_tokens
    found = tokenizer_config.get("model_max_length")  # 1e30 where there is no limit
    return found if type(found) is int and found > 0 else None


def _modules(path: Path) -> list[tuple[str, str]]:
    """The last word of each module's type, and its folder."""
    if not path.exists():
        return []
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        ordered = sorted(listed, key=lambda module: module["idx"])
        modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in ordered]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"can't read {path}: {error!r}") from error
    outside = [folder for _, folder in modules if Path(folder).is_absolute() or ".." in folder]
    if outside:
        raise CheckpointError(f"{path} names {outside[0]!r}, which isn't inside the directory")
    return modules


def _pooling(path: Path) -> Pooling:
    settings = read_json(path)
    values = TypedValues(settings, str(path))
    prefix = "pooling_mode_"
    chosen = [
        name.removeprefix(prefix)
        for name in settings
        if name.startswith(prefix) and values.flag(name, False)
    ]
    if "pooling_mode" in settings:  # newer versions name it
        chosen = [values.text("pooling_mode")]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise UnsupportedError(
            f"{path} sets pooling by {', '.join(chosen) or 'nothing'}; Quill supports one of "
            f"{', '.join(_POOLINGS)}"
        )
    return _POOLINGS[chosen[0]]


def _refuse_changed_texts(directory: Path, model: Path, settings: TypedValues) -> None:
    """What their library does to a text before its tokenizer sees it."""
    prompt = read_json(directory / "config_sentence_transformers.json").get("default_prompt_name")
    if prompt is not None:
        raise UnsupportedError(
            f"the model puts its prompt {prompt!r} before every text (default_prompt_name in "
            "config_sentence_transformers.json); Quill takes texts as they are"
        )
    lowers = settings.flag("do_lower_case", False)
    normalizer: Any = read_json(model / "tokenizer.json").get("normalizer")
    if lowers and '"lowercase": true' not in json.dumps(normalizer):
        raise UnsupportedError(
            "the model's texts are put into lower case before its tokenizer reads them "
            "(do_lower_case of its Transformer); Quill takes texts as they are"
        )
