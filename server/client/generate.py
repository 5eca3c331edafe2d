"""Generates the blocking client and the types of options: `python -m quill.server.client.generate`.

Knows: which tokens of the async source become which, the types of the table of request fields. Does
not know: what the code does. With --check nothing is written: it fails if a file isn't up to date.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from quill.server.fields import EMBED, GENERATE, Field

HEADER = "# Generated from {source} by server/client/generate.py: don't edit.\n"
SYNC = {"async_client.py": "sync_client.py", "async_pool.py": "sync_pool.py"}
TOKENS = (
    (r"AsyncGenerator\[(.*), None\]", r"Generator[\1, None, None]"),
    (r"Awaitable\[(\w+)\]", r"\1"),
    (r"AsyncGenerator, Awaitable, Callable, ", r"Callable, Generator, "),
    (r"async (def|with|for) ", r"\1 "),
    (r"await ", ""),
    (r"__aenter__", "__enter__"),
    (r"__aexit__", "__exit__"),
    (r"aclosing", "closing"),
    (r"async_pool", "sync_pool"),
    (r"asyncio", "time"),
    (r"\bASYNC_", ""),
    (r"\b[Aa]sync_?(?=\w)", ""),
    (r"The client for time", "The blocking client"),
    (r"The endpoint pool", "The blocking endpoint pool"),
    (r"Belongs to one event loop", "Safe to use from several threads"),
)
OPTIONS = '''"""Types of the options of requests. What they mean is in server/fields.py."""

from collections.abc import Mapping, Sequence
from typing import TypedDict


class GenerateOptions(TypedDict, total=False):
{generate}

class EmbedOptions(TypedDict, total=False):
{embed}'''
TYPES = {
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "strings": "Sequence[str]",
    "integers": "Sequence[int]",
    "bias": "Mapping[int, float]",
    "choice": "str | int",
}


def generated(folder: Path) -> dict[Path, str]:
    """The text of each generated file."""
    made = {
        folder / target: HEADER.format(source=source)
        + translate((folder / source).read_text("utf-8"))
        for source, target in SYNC.items()
    }
    options = OPTIONS.format(generate=_lines(GENERATE), embed=_lines(EMBED))
    return {**made, folder / "options.py": HEADER.format(source="server/fields.py") + options}


def translate(text: str) -> str:
    for pattern, replacement in TOKENS:
        text = re.sub(pattern, replacement, text)
    return text


def _lines(fields: Mapping[str, Field]) -> str:
    return "".join(f"    {name}: {TYPES[field.type]}\n" for name, field in fields.items())


def stale(folder: Path) -> list[str]:
    """Names of generated files that aren't what would be generated."""
    return [
        path.name
        for path, text in generated(folder).items()
        if not path.exists() or path.read_text("utf-8") != text
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Generates the blocking client and option types.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if one is stale")
    folder = Path(__file__).parent
    if parser.parse_args().check:
        if names := stale(folder):
            sys.exit(f"{', '.join(names)}: run `python -m quill.server.client.generate`")
        return
    for path, text in generated(folder).items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
