"""The numbers of `quill compare`, and what is said of them whatever was hoped for."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from quill.loadtest.compare.page import write_page
from quill.loadtest.compare.stages import read_log, read_run
from quill.loadtest.compare.standing import (
    Alignment,
    LengthGroup,
    Sentence,
    Standing,
    by_length,
    sharpest,
    title_of,
    verdicts,
)
from quill.loadtest.errors import OptionError


def make_standing(context: str, short: float, long: float) -> Standing:
    alignment = None
    if context != "fixed":
        alignment = Alignment(["Der", "$Test$", "</s>"], ["The", "test"], np.full((3, 2), 0.5), "")
    return Standing(
        title=f"the {context} one",
        context=context,
        num_parameters=1000,
        precision="fp32",
        minutes=1.5,
        num_steps=100,
        train_speed=3000.0,
        losses=[(0.5, 6.0), (1.5, 5.0)],
        bleu=(short + long) / 2,
        by_length=[LengthGroup(1, 4, 2.5, short), LengthGroup(5, 30, 12.0, long)],
        alone_speed=900.0,
        crowd_speed=4000.0,
        num_equal=10,
        num_sentences=10,
        alignment=alignment,
    )


FIXED = make_standing("fixed", 20, 5)
BAHDANAU = make_standing("bahdanau", 20, 18)
TRANSFORMER = make_standing("attention", 30, 28)


def test_sentences_are_grouped_by_length_with_as_many_in_each() -> None:
    # BLEU counts up to four words in a row.
    said = "one two three four five"
    sentences = [
        Sentence(length, said, said if length <= 5 else "nothing of that at all")
        for length in range(10, 0, -1)
    ]
    groups = by_length(sentences)
    assert [(group.shortest, group.longest) for group in groups] == [
        (1, 2), (3, 4), (5, 6), (7, 8), (9, 10)
    ]  # fmt: skip
    assert groups[0].bleu == pytest.approx(100)
    assert groups[0].bleu > groups[2].bleu > groups[-1].bleu
    assert len(by_length(sentences[:3])) == 3, "never more groups than sentences"


def test_the_layer_that_is_surest_is_shown() -> None:
    vague, sure = [[[0.5, 0.5]], [[0.5, 0.5]]], [[[0.9, 0.1]], [[1.0, 0.0]]]
    found = {"rows": ["a"], "columns": ["b", "c"], "weights": [vague, sure]}
    aligned = sharpest(found)
    assert aligned.weights_TS.tolist() == [[pytest.approx(0.95), pytest.approx(0.05)]]
    assert aligned.what == "layer 1 of 2, mean of 2 heads"


def test_what_happened_is_said_either_way() -> None:
    as_hoped = " ".join(verdicts([FIXED, BAHDANAU, TRANSFORMER]))
    assert "the bahdanau one has BLEU 18.0 and the fixed one 5.0: the first is ahead" in as_hoped
    assert "the attention one has 29.0" in as_hoped
    assert "30 of 30" in as_hoped
    worse = dataclasses.replace(BAHDANAU, by_length=[*FIXED.by_length[:1], LengthGroup(5, 9, 7, 2)])
    otherwise = " ".join(verdicts([FIXED, worse]))
    assert "the bahdanau one has BLEU 2.0 and the fixed one 5.0: the first is behind" in otherwise
    same = " ".join(verdicts([FIXED, dataclasses.replace(FIXED, context="bahdanau", bleu=1.0)]))
    assert "no difference that could be told" in same
    low = [dataclasses.replace(each, bleu=1.0) for each in (FIXED, BAHDANAU)]
    assert "so low that their differences say little" in " ".join(verdicts(low))


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = write_page(tmp_path, [FIXED, BAHDANAU, TRANSFORMER], {"machine": "<two> cores"})
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 4
    assert "the fixed one (fp32)" in text
    assert "&lt;two&gt; cores" in text
    assert [each["bleu"] for each in json.loads((tmp_path / "compare.json").read_text())] == [
        12.5, 19.0, 29.0
    ]  # fmt: skip


def test_a_resumed_run_goes_on_counting_its_time(tmp_path: Path) -> None:
    times = [10.0, 20.0, 5.0, 12.0]
    lines = [json.dumps({"step": i, "elapsed_s": each}) for i, each in enumerate(times)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert [entry["elapsed_s"] for entry in read_log(tmp_path)] == [10.0, 20.0, 25.0, 32.0]


def test_what_is_no_run_of_a_translator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="isn't a run of `quill train`"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"model": {"family": "causal"}}', encoding="utf-8")
    with pytest.raises(OptionError, match="its family is causal"):
        read_run(tmp_path)


def test_titles_say_what_a_translator_is() -> None:
    assert title_of({"recurrence": None}) == ("Transformer", "attention")
    recurrence = {"cell": "gru", "context": "bahdanau"}
    assert title_of({"recurrence": recurrence}) == ("GRU, Bahdanau", "bahdanau")
