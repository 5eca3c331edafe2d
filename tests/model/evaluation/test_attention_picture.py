"""Pictures of attention: labels that a person can read, sizes that a person can open."""

from pathlib import Path

import numpy as np
import pytest

from quill.model.data.tokenizer import byte_tokenizer
from quill.model.errors import RequestError
from quill.model.evaluation.attention_picture import (
    AttentionGrid,
    draw,
    picture_size,
    token_labels,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b\n\tc", ["a", "·", "b", "↵", "→", "c"]),
        ("é!", ["é 1/2", "é 2/2", "!"]),  # tokens that share a character
        ("日", ["U+65E5 1/3", "U+65E5 2/3", "U+65E5 3/3"]),  # which the font lacks
        ("\x07", ["U+0007"]),
    ],
)
def test_labels_can_be_read(text: str, expected: list[str]) -> None:
    tokenizer = byte_tokenizer()
    assert token_labels(tokenizer, tokenizer.encode(text)) == expected


def test_bytes_that_never_make_a_character_have_a_label_each() -> None:
    tokenizer = byte_tokenizer()
    half = tokenizer.encode("é")[:1]
    assert token_labels(tokenizer, [*half, *half, *tokenizer.encode("a")]) == ["�", "�", "a"]


def test_special_tokens_show_their_names_cut_to_size() -> None:
    assert token_labels(byte_tokenizer(["</s>", "<|a-very-long-name|>"]), [0, 1]) == [
        "</s>",
        "<|a-very-long…",
    ]


def test_a_picture_that_nobody_could_open_is_refused() -> None:
    with pytest.raises(RequestError, match=r"30 layers, 9 heads and 500 tokens; choose fewer"):
        picture_size(30, 9, 500, 500)


def test_cells_shrink_with_the_number_of_tokens_but_labels_stay_legible() -> None:
    sizes = [picture_size(1, 1, num_tokens, num_tokens) for num_tokens in (5, 20, 100, 300)]
    cells = [size.cell for size in sizes]
    assert cells == sorted(cells, reverse=True)
    assert cells[-1] * 72 > 6  # points
    assert sizes[0].width < sizes[-1].width


def grid() -> AttentionGrid:
    return AttentionGrid(
        title="a $x$ \n title" * 50,
        row_caption="rows",
        column_caption="columns",
        row_labels=["$_", "b"],
        column_labels=["$^$", "%", "c"],
        layers=[0, 4],
        heads=[1],
        weights=[np.full((2, 2, 3), 1 / 3, dtype=np.float32)] * 2,
    )


def test_texts_are_never_taken_for_formulas(tmp_path: Path) -> None:
    draw(grid(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_another_format_or_without_a_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"a\.svg should end in \.png"):
        draw(grid(), tmp_path / "a.svg")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RequestError, match="can't write the picture"):
        draw(grid(), tmp_path / "file" / "a.png")
