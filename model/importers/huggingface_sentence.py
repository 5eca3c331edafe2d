"""Reads a sentence-embedding directory: how hidden states are pooled to one embedding.

Knows: modules.json, the pooling's config.json, and the spellings of sentence-transformers.
Does not know: tensors, tokens, the shape of the model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quill.model.checkpoint.checkpoint import Pooling
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import CheckpointError, UnsupportedError
from quill.model.importers.huggingface_text import read_json

MODULES = "modules.json"
_POOLINGS: dict[str, Pooling] = {
    "cls_token": "first",
    "cls": "first",
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
}


@dataclass(frozen=True)
class Sentence:
    """Pooling and normalization of embeddings, if the directory has them."""

    pooling: Pooling | None = None
    normalize: bool = False
    model: Path | None = None  # where the model's own files are; None: the directory isn't such


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
    _refuse_changed_texts(directory, model)
    return Sentence(_pooling(pooling / "config.json"), kinds[-1] == "Normalize", model)


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


def _refuse_changed_texts(directory: Path, model: Path) -> None:
    """What their library does to a text before its tokenizer sees it."""
    prompt = read_json(directory / "config_sentence_transformers.json").get("default_prompt_name")
    if prompt is not None:
        raise UnsupportedError(
            f"the model puts its prompt {prompt!r} before every text (default_prompt_name in "
            "config_sentence_transformers.json); Quill takes texts as they are"
        )
    lowers = read_json(model / "sentence_bert_config.json").get("do_lower_case", False)
    normalizer: Any = read_json(model / "tokenizer.json").get("normalizer")
    if lowers and '"lowercase": true' not in json.dumps(normalizer):
        raise UnsupportedError(
            "the model's texts are put into lower case before its tokenizer reads them "
            "(do_lower_case in sentence_bert_config.json); Quill takes texts as they are"
        )
