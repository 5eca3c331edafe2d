"""The log: one line a record, for people or as JSON.

Knows: logging, the fields that a record brings. Does not know: what is logged.
"""

import asyncio
import json
import logging
from datetime import datetime
from typing import TextIO


class TextFormatter(logging.Formatter):
    """For people: time, level, message, then name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = getattr(record, "fields", {})
        return line + "".join(f" {name}={value}" for name, value in fields.items())


class JsonFormatter(logging.Formatter):
    """For machines: one object a line."""

    def format(self, record: logging.LogRecord) -> str:
        written = datetime.fromtimestamp(record.created).astimezone()
        entry: dict[str, object] = {
            "time": written.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def is_news(record: logging.LogRecord) -> bool:
    """False for what gRPC logs by itself: a traceback of each call that was cancelled before it
    began, as happens when a server stops, and of each header that isn't UTF-8, with the header,
    which may hold a key. Each call has a line of its own."""
    error = record.exc_info[1] if record.exc_info else None
    is_header = isinstance(error, UnicodeDecodeError) and record.name.startswith("grpc.")
    return not isinstance(error, asyncio.CancelledError) and not is_header


def set_up_logging(log_format: str, stream: TextIO | None = None) -> None:
    """To stderr, unless another stream is given: stdout is for what a person asked for."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(is_news)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
