"""Texts become tokens beside everybody else's work."""

from quill.model.data.tokenizer import train_bpe
from quill.server.text.tokenizer import Text
from tests.turns import NEVER_S, num_turns_of_others

TEXT = Text(train_bpe(["the cat sat on the mat"] * 3, 280)._json)
LONG = "the cat sat on the mat, " * 4000


def test_others_go_on_while_a_long_text_is_read() -> None:
    assert num_turns_of_others(lambda: TEXT.encode(LONG), NEVER_S) > 0
    assert num_turns_of_others(lambda: TEXT.encode_rendered(LONG), NEVER_S) > 0


def test_others_go_on_while_many_tokens_become_text() -> None:
    ids = TEXT.encode(LONG)
    assert num_turns_of_others(lambda: TEXT.decode(ids), NEVER_S) > 0
