"""Texts become tokens beside everybody else's work."""

import json
from collections.abc import Callable

import tokenizers

from quill.model.data.tokenizer import Tokenizer, train_bpe
from quill.server.text.tokenizer import Text
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
