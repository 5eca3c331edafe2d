"""Texts become tokens beside everybody else's work."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quill.model.data.tokenizer import Tokenizer, train_bpe
from quill.model.errors import CheckpointError
from quill.server.errors import StartError
from quill.server.text.tokenizer import Text
from quill.tokenizer_growth import read_checked
from tests.turns import NEVER_S, num_turns_of_others

TEXT = Text(train_bpe(["the cat sat on the mat"] * 3, 280)._json)
LONG = "the cat sat on the mat, " * 4000


def others_go_on(work: Callable[[], object]) -> bool:
    """Sooner or later: on a busy machine another thread may miss its turn."""
    return any(num_turns_of_others(work, NEVER_S) for _ in range(100))


def test_others_go_on_while_a_long_text_is_read() -> None:
    assert others_go_on(lambda: TEXT.encode(LONG))
    assert others_go_on(lambda: TEXT.encode_rendered(LONG))


def test_others_go_on_while_many_tokens_become_text() -> None:
    ids = TEXT.encode(LONG)
    assert others_go_on(lambda: TEXT.decode(ids))


def test_a_tokenizers_dropout_is_off() -> None:
    """BPE leaves merges out at random with it: the same text would have other tokens each time."""
    settings = json.loads(train_bpe(["the cat sat on the mat"] * 3, 280)._json)
    settings["model"]["dropout"] = 1.0
    with_dropout = json.dumps(settings)
    assert tokenizers.Tokenizer.from_str(with_dropout).encode("the cat").ids != TEXT.encode(
        "the cat"
    )
    assert Text(with_dropout).encode("the cat") == TEXT.encode("the cat")
    loaded = Tokenizer(tokenizers.Tokenizer.from_str(with_dropout))
    assert loaded.encode("the cat") == TEXT.encode("the cat")


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def precompiled(text: str) -> dict[str, Any]:
    charsmap = bytes(4) + b"short\0" + text.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}


@pytest.mark.parametrize(
    "rules",
    [
        [replace("a" * 130, String="aa")],
        [replace("aa", String="a")] * 7,
        [replace("a" * 64, Regex="(?=a)")],
        [{"type": "Prepend", "prepend": "a" * 64}],
        [{"type": "Sequence", "normalizers": [replace("a" * 9, String="a")] * 2}],
        [precompiled("a" * 65)],
    ],
)
def test_a_tokenizer_whose_rules_multiply_texts_is_refused(
    rules: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = json.loads(train_bpe(["the cat sat on the mat"] * 3, 280)._json)
    settings["normalizer"] = {"type": "Sequence", "normalizers": rules}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(settings))
    with pytest.raises(StartError, match="times as long; at most 64 times is allowed"):
        Text.load(path, None)
    with pytest.raises(CheckpointError, match="times as long; at most 64 times is allowed"):
        Tokenizer.load(path)
    with pytest.raises(ValueError, match="of its decoder can"):
        read_checked(json.dumps({"decoder": {"type": "Sequence", "decoders": rules}}))


def test_rules_of_common_tokenizers_are_allowed() -> None:
    llama = [{"type": "Prepend", "prepend": "▁"}, replace("▁", String=" ")]
    xlm_roberta = [precompiled("صلى الله عليه وسلم"), replace(" ", Regex=" {2,}")]
    albert = [replace('"', String="``"), replace('"', String="''"), {"type": "NFKD"}]
    for rules in (llama, xlm_roberta, albert, [*albert, *xlm_roberta]):
        read_checked(
            json.dumps({"normalizer": {"type": "Sequence", "normalizers": rules}, "decoder": None})
        )
