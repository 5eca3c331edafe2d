"""The benchmark of embedding, on a small bundle and without peers."""

from pathlib import Path

import numpy as np
import pytest

from quill.__main__ import main
from quill.loadtest.bench.contenders.padded_encoder import Padded
from quill.loadtest.bench.contenders.quill_encoder import Quill
from quill.loadtest.bench.embed import least_cosine, read_texts
from quill.loadtest.errors import OptionError
from tests.server.tiny_bundle import CONTEXT, TinyBundle


def test_padding_changes_nothing_but_the_time(tiny_encoder: TinyBundle) -> None:
    texts = read_texts(tiny_encoder.directory, None, limit=40)
    assert texts == read_texts(tiny_encoder.directory, None, limit=40)
    assert max(map(len, texts)) <= CONTEXT
    packed = Quill(tiny_encoder.directory, "fp32", 1).embed(texts)
    padded = Padded(tiny_encoder.directory, "fp32", 1, 8).embed(texts)
    assert least_cosine(np.array(packed.vectors), np.array(padded.vectors)) > 0.999999
    assert 0 < packed.seconds < 60


def test_lines_are_read_with_the_tokens_around_them(
    tiny_encoder: TinyBundle, tmp_path: Path
) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("abc\n\n" + "x" * 200)
    short, long = read_texts(tiny_encoder.directory, path, limit=10)
    special = tiny_encoder.manifest.special_tokens
    assert (short[0], short[-1], len(short)) == (special.bos, special.eos, 5)
    assert len(long) == CONTEXT


def test_bench_embed_shows_a_table(
    tiny_encoder: TinyBundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quill.loadtest.bench.embed.PAUSE_S", 0.0)
    given = [str(tiny_encoder.directory), "--threads", "1", "--rounds", "1", "--limit", "20"]
    assert main(["bench", "embed", *given]) == 0
    said = capsys.readouterr().out
    assert "20 texts" in said
    assert "Quill fp32" in said
    assert "ONNX Runtime fp32, padded batches of 32" in said


def test_only_encoders_are_taken(tiny_translator: TinyBundle) -> None:
    with pytest.raises(OptionError, match="isn't an encoder's"):
        read_texts(tiny_translator.directory, None, limit=1)
