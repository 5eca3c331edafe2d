"""The file of records: what is written is what is read."""

from pathlib import Path

import pytest

from quill.loadtest.errors import RecordError
from quill.loadtest.workload.records import RecordFile, read_records, to_row, write_records
from tests.loadtest.made import made


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    records = [
        made(0),
        made(1, seed=None, first_token_ms=None, token_ids=(), arrivals_ms=(), ok=False),
        made(2, message='commas, "quotes"\nand lines', request="x" * 200_000, seed=2**64 - 1),
    ]
    write_records(tmp_path / "requests.csv", records)
    assert read_records(tmp_path / "requests.csv") == records


def test_what_is_written_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    file = RecordFile(path)
    file.write([to_row(made())])
    assert len(read_records(path)) == 1
    file.close()


def test_gaps_and_time_per_token_are_between_tokens() -> None:
    record = made(arrivals_ms=(5.0, 7.0, 7.0, 12.0, 15.0))
    assert record.gaps_ms == (2.0, 0.0, 5.0, 3.0)
    assert record.per_token_ms == 2.5
    assert made(token_ids=(1,), arrivals_ms=(5.0,)).per_token_ms is None


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    write_records(path, [made()])
    for content, reason in (
        (path.read_text() + "one,two\n", "no record"),
        ("", "isn't a file of records"),
        ("a,b\n1,2\n", "isn't a file of records"),
    ):
        path.write_text(content)
        with pytest.raises(RecordError, match=reason):
            read_records(path)
    with pytest.raises(RecordError, match="can't read"):
        read_records(tmp_path / "none.csv")
