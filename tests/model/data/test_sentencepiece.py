"""Marian's two files become a tokenizer: the same pieces as SentencePiece cuts."""

import json
import struct
from pathlib import Path

import pytest

from quill.model.data.sentencepiece import marian_tokenizer, read_unigram
from quill.model.errors import CheckpointError, UnsupportedError

SCORES = {"▁": -3.0, "▁a": -2.0, "b": -2.5, "ab": -2.2, "▁ab": -6.0, "|": -4.0, "▁|": -4.5}
VOCABULARY = ["</s>", "<unk>", "▁a", "b", "▁", "ab", "▁ab", "▁abb", "é", ">>fra<<", "<pad>"]


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def piece(text: str, score: float, kind: int) -> bytes:
    number = bytes([2 << 3 | 5]) + struct.pack("<f", score)
    return field(1, field(1, text.encode()) + number + field(3, kind))


def write(directory: Path, model_type: int = 1, lacks: str = "") -> Path:
    pieces = [piece("<unk>", 0.0, 2), piece("</s>", 0.0, 3)]
    pieces += [piece(text, score, 1) for text, score in SCORES.items()]
    content = b"".join(pieces) + field(2, field(3, model_type) + field(4, 100)) + field(3, b"")
    (directory / "source.spm").write_bytes(content)
    tokens = [token for token in VOCABULARY if token != lacks]
    (directory / "vocab.json").write_text(json.dumps({each: i for i, each in enumerate(tokens)}))
    return directory


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ab", ["▁a", "b"]),  # -4.5 is more than -6 and than -5.2
        ("  a   abb ", ["▁a", "▁a", "b", "b"]),  # "▁abb" is a piece of answers alone
        ("a |b", ["▁a", "<unk>", "b"]),  # one piece, which has no id
        ("| a", ["<unk>", "▁a"]),
        ("aé", ["▁a", "é"]),  # no piece of texts has it, and answers have
        ("xyz", ["▁", "<unk>"]),
        (">>fra<< ab", [">>fra<<", "▁a", "b"]),
    ],
)
def test_a_text_is_cut_as_the_sources_pieces_have_it(
    tmp_path: Path, text: str, tokens: list[str]
) -> None:
    ids = marian_tokenizer(write(tmp_path)).encode(text).ids
    assert [VOCABULARY[each] for each in ids] == tokens


def test_an_answer_has_the_pieces_of_both(tmp_path: Path) -> None:
    assert marian_tokenizer(write(tmp_path)).decode([7, 8, 2, 0]) == "abbé a"


def test_other_models_and_damage_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"\(2, 1, 1, 1\); Quill reads \(1, 1, 1, 1\)"):
        marian_tokenizer(write(tmp_path, model_type=2))
    with pytest.raises(UnsupportedError, match="lacks ab, pieces of"):
        marian_tokenizer(write(tmp_path, lacks="ab"))
    with pytest.raises(CheckpointError, match="no token <unk>"):
        marian_tokenizer(write(tmp_path, lacks="<unk>"))
    path = write(tmp_path) / "source.spm"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="longer than its message"):
        read_unigram(path)
    path.write_bytes(b"\xff" * 20 + b"\x01")  # a number whose bytes don't end would take for ever
    with pytest.raises(CheckpointError, match="more than 64 bits"):
        read_unigram(path)
