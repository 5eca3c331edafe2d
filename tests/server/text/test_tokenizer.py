"""Texts become tokens beside everybody else's work."""

from collections.abc import Callable

from quill.model.data.tokenizer import train_bpe
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
