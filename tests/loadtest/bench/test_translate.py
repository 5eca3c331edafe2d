"""The benchmark of translation, on a small bundle and without peers."""

from pathlib import Path

import pytest

from quill.__main__ import main
from quill.loadtest.bench.contenders.protocol import MAX_NEW_TOKENS
from quill.loadtest.bench.contenders.quill_translator import Quill
from quill.loadtest.bench.translate import read_sources
from quill.loadtest.errors import OptionError
from quill.model.reference.beam_search import BeamParameters, beam_search
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters
from tests.server.tiny_bundle import EOS, TinyBundle

LINES = ["Stop", "Restart the server", "", "a", "Open the door", "on"]


@pytest.fixture
def sources_file(tmp_path: Path) -> Path:
    path = tmp_path / "sources.txt"
    path.write_text("\n".join(LINES))
    return path


def test_quill_translates_as_the_reference_does_however_many_at_once(
    tiny_translator: TinyBundle, sources_file: Path
) -> None:
    sources = read_sources(tiny_translator.directory, sources_file, limit=10)
    assert len(sources) == 5
    assert sources[2] == [ord("a") + 1, EOS]
    quill_engine = Quill(tiny_translator.directory, "fp32", 1)
    model, ends = tiny_translator.model, frozenset({EOS})
    greedy = SamplingParameters(temperature=0.0, max_new_tokens=MAX_NEW_TOKENS, stop_ids=ends)
    beams = BeamParameters(num_beams=3, max_new_tokens=MAX_NEW_TOKENS, stop_ids=ends)
    one_by_one = quill_engine.translate(sources, 1, 1)
    together = quill_engine.translate(sources, 1, 4)
    searched = quill_engine.translate(sources, 3, 2)
    assert one_by_one.answers == together.answers
    for index, source in enumerate(sources):
        drawn = generate(model, [0], greedy, source_ids=source, cached=True).token_ids
        found = beam_search(model, [0], beams, source_ids=source, cached=True)[0].token_ids
        assert together.answers[index] == [each for each in drawn if each != EOS]
        assert searched.answers[index] == [each for each in found if each != EOS]
    assert 0 < together.seconds < 60


def test_bench_translate_shows_a_table(
    tiny_translator: TinyBundle,
    sources_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("quill.loadtest.bench.translate.PAUSE_S", 0.0)
    given = [str(tiny_translator.directory), str(sources_file), "--threads", "1", "--rounds", "1"]
    assert main(["bench", "translate", *given, "--limit", "2"]) == 0
    said = capsys.readouterr().out
    assert "tokens a second, 2 sources" in said
    assert "Quill fp32" in said


def test_bundle_that_does_not_translate_is_refused(bundle: Path, sources_file: Path) -> None:
    with pytest.raises(OptionError, match="isn't a translation model"):
        read_sources(bundle, sources_file, limit=1)
