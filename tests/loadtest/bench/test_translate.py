"""The benchmarks of translation models and encoders, on small bundles and without peers."""

import json
from pathlib import Path

import numpy as np
import pytest

from quill.__main__ import main
from quill.loadtest.bench.backends.padded_onnx import PaddedOnnx
from quill.loadtest.bench.backends.protocol import MAX_NEW_TOKENS
from quill.loadtest.bench.backends.quill_engine import QuillEngine
from quill.loadtest.bench.translate import least_cosine, read_sources, read_texts
from quill.model.data.splits import Pair
from quill.model.data.tokenizer import SpecialTokens, Tokenizer
from quill.model.evaluation.translation import evaluate_translation, write_answers
from quill.model.reference.beam_search import BeamParameters, beam_search
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters
from tests.server.tiny_bundle import CONTEXT, EOS, TinyBundle

LINES = ["Stop", "Restart the server", "", "a", "Open the door", "on"]
PAIRS = [
    Pair("Stop", "Halt"),
    Pair("Restart the server", "Starte den Server neu"),
    Pair("a", "ein"),
]


@pytest.fixture
def sources_file(tmp_path: Path) -> Path:
    path = tmp_path / "sources.txt"
    path.write_text("\n".join(LINES))
    return path


@pytest.fixture
def answers(tiny_translator: TinyBundle, tmp_path: Path) -> Path:
    special = SpecialTokens(bos=0, eos=EOS, pad=0)
    tokenizer = Tokenizer.load(tiny_translator.directory / "tokenizer.json", special)
    found = evaluate_translation(tiny_translator.model, tokenizer, PAIRS, num_beams=2)
    path = tmp_path / "answers.jsonl"
    with path.open("w", encoding="utf-8") as file:
        write_answers(file, tiny_translator.model, tokenizer, PAIRS, found)
    return path


def test_engine_translates_as_the_reference_however_many_at_once(
    tiny_translator: TinyBundle, sources_file: Path
) -> None:
    sources = read_sources(tiny_translator.directory, sources_file, limit=10)
    assert len(sources) == 5
    assert sources[2] == [ord("a") + 1, EOS]
    engine = QuillEngine(tiny_translator.directory, "fp32", 1)
    model, ends = tiny_translator.model, frozenset({EOS})
    greedy = SamplingParameters(temperature=0.0, max_new_tokens=MAX_NEW_TOKENS, stop_ids=ends)
    beams = BeamParameters(num_beams=3, max_new_tokens=MAX_NEW_TOKENS, stop_ids=ends)
    together = engine.translate(sources, 1, 4)
    searched = engine.translate(sources, 3, 2)
    assert engine.translate(sources, 1, 1).answers == together.answers
    for index, source in enumerate(sources):
        sampled = generate(model, [0], greedy, source_ids=source, cached=True).token_ids
        found = beam_search(model, [0], beams, source_ids=source, cached=True)[0].token_ids
        assert together.answers[index] == [each for each in sampled if each != EOS]
        assert searched.answers[index] == [each for each in found if each != EOS]
    assert 0 < together.seconds < 60


def test_bench_translate_and_embed_print_tables(
    tiny_translator: TinyBundle,
    tiny_encoder: TinyBundle,
    sources_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = ["--threads", "1", "--rounds", "1", "--limit", "2"]
    assert (
        main(["bench", "translate", str(tiny_translator.directory), str(sources_file), *usual]) == 0
    )
    printed = capsys.readouterr().out
    assert "tokens a second, 2 sources" in printed
    assert "Quill fp32" in printed
    assert main(["bench", "embed", str(tiny_encoder.directory), *usual]) == 0
    printed = capsys.readouterr().out
    assert "2 texts" in printed
    assert "ONNX Runtime fp32, padded batches of 32" in printed


def test_padding_changes_nothing_but_the_time(tiny_encoder: TinyBundle) -> None:
    texts = read_texts(tiny_encoder.directory, None, limit=40)
    assert texts == read_texts(tiny_encoder.directory, None, limit=40)
    assert max(map(len, texts)) <= CONTEXT
    packed = QuillEngine(tiny_encoder.directory, "fp32", 1).embed(texts)
    padded = PaddedOnnx(tiny_encoder.directory, "fp32", 1, 8).embed(texts)
    assert least_cosine(np.array(packed.vectors), np.array(padded.vectors)) > 0.999999
    assert 0 < packed.seconds < 60


def test_texts_have_the_encoders_special_tokens(tiny_encoder: TinyBundle, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("abc\n\n" + "x" * 200)
    short, long = read_texts(tiny_encoder.directory, path, limit=10)
    special = tiny_encoder.manifest.special_tokens
    assert (short[0], short[-1], len(short)) == (special.bos, special.eos, 5)
    assert len(long) == CONTEXT


def test_reference_counts_equal_answers_and_fails_on_a_changed_one(
    tiny_translator: TinyBundle, answers: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "reference", str(tiny_translator.directory), str(answers), "--users", "2"]
    assert main(command) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [row[:2] for row in rows if row[:1] == ["greedy"]][-1] == ["greedy", "3"]
    assert [row[:3] for row in rows if row[:2] == ["2", "beams"]][-1] == ["2", "beams", "3"]

    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    lines[1]["answers"]["greedy"]["token_ids"][0] += 1
    answers.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert main(command) == 1
    assert "differ from PyTorch's: greedy" in capfd.readouterr().err

    lines[2]["source_ids"] = [99_999]
    answers.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert main(command) == 1
    assert "line 3 got INVALID_ARGUMENT" in capfd.readouterr().err


def test_other_files_and_models_are_rejected(
    tiny_translator: TinyBundle,
    bundle: Path,
    answers: Path,
    sources_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "other").write_text('{"a": 1}\n')
    for name, model, file, message in (
        ("reference", tiny_translator.directory, tmp_path / "other", "isn't a file of `quill eval"),
        ("reference", bundle, answers, "isn't a translation model"),
        ("translate", bundle, sources_file, "isn't a translation model"),
    ):
        assert main(["bench", name, str(model), str(file)]) == 2
        assert message in capfd.readouterr().err
    assert main(["bench", "embed", str(bundle)]) == 2
    assert "isn't an encoder's bundle" in capfd.readouterr().err
