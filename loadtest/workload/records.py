"""The record of one request, and the CSV file of all records.

Knows: times, tokens, CSV. Does not know: clients, reports.
A record contains the request itself, so that a file is enough to send everything again.
"""

import csv
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from quill.loadtest.errors import RecordError

# A prompt may be longer than csv's own limit of 128 KiB.
csv.field_size_limit(sys.maxsize)


@dataclass(frozen=True)
class RequestRecord:
    """Times are milliseconds from the planned start of the request."""

    index: int
    scenario: str
    intended_at_s: float  # since 1970
    status: str  # a gRPC status, or EMPTY: an OK without an answer
    ok: bool  # the status is one that this client expects
    offered_rate: float = 0.0  # of the open loop; 0: closed
    late_ms: float = 0.0  # delay of sending after the planned start
    first_token_ms: float | None = None
    total_ms: float = 0.0
    server_first_token_ms: float | None = None  # measured by the server
    server_queue_ms: float | None = None
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seed: int | None = None
    message: str = ""  # of an error
    token_ids: tuple[int, ...] = ()
    arrivals_ms: tuple[float, ...] = field(default=())  # one for each token
    request: str = ""  # GenerateRequest or EmbedRequest as JSON
    embeddings: str = ""  # SHA-256 of all embeddings, as float32

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        """Between two tokens; 0 for tokens of the same chunk."""
        pairs = zip(self.arrivals_ms, self.arrivals_ms[1:], strict=False)
        return tuple(after - before for before, after in pairs)

    @property
    def per_token_ms(self) -> float | None:
        """Time per output token, after the first."""
        if self.num_tokens < 2:
            return None
        return (self.arrivals_ms[-1] - self.arrivals_ms[0]) / (self.num_tokens - 1)


NAMES = tuple(each.name for each in fields(RequestRecord))


def to_row(record: RequestRecord) -> dict[str, str]:
    """All text: what CSV and Locust's messages carry."""
    values = asdict(record)
    values["token_ids"] = " ".join(map(str, record.token_ids))
    values["arrivals_ms"] = " ".join(f"{time:.3f}" for time in record.arrivals_ms)
    return {name: "" if value is None else str(value) for name, value in values.items()}


def from_row(row: dict[str, str]) -> RequestRecord:
    values: dict[str, Any] = dict(row)
    for name in ("index", "prompt_tokens", "cached_tokens"):
        values[name] = int(row[name])
    for name in ("intended_at_s", "offered_rate", "late_ms", "total_ms"):
        values[name] = float(row[name])
    values["ok"] = row["ok"] == "True"
    for name in ("first_token_ms", "server_first_token_ms", "server_queue_ms"):
        values[name] = float(row[name]) if row[name] else None
    values["seed"] = int(row["seed"]) if row["seed"] else None
    values["token_ids"] = tuple(map(int, row["token_ids"].split()))
    values["arrivals_ms"] = tuple(map(float, row["arrivals_ms"].split()))
    return RequestRecord(**values)


class RecordFile:
    """Appends rows. They are on disk at once: a run may be interrupted."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, NAMES)
        self._writer.writeheader()

    def write(self, rows: Iterable[dict[str, str]]) -> None:
        self._writer.writerows(rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    file = RecordFile(path)
    file.write(map(to_row, records))
    file.close()


def read_records(path: Path) -> list[RequestRecord]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != NAMES:
                raise RecordError(
                    f"{path} isn't a file of records: its first line must be the names"
                )
            return [from_row(row) for row in reader]
    except OSError as error:
        raise RecordError(f"can't read {path}: {error.strerror}") from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise RecordError(f"{path} has a line that is no record: {error}") from error
