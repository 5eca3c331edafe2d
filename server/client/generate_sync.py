"""Generates the blocking client from the async one: `python -m quill.server.client.generate_sync`.

Knows: which names of the async source become which. Does not know: what the code does.
With --check nothing is written: it fails if a generated file isn't up to date.
"""

import argparse
import re
import sys
from pathlib import Path

FILES = {"async_client.py": "sync_client.py", "async_pool.py": "sync_pool.py"}
HEADER = "# Generated from {source} by server/client/generate_sync.py: don't edit.\n"
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
    (r"grpc\.aio", "grpc"),
    (r"\bASYNC_", ""),
    (r"\b[Aa]sync_?(?=\w)", ""),
    (r"The client for time", "The blocking client"),
    (r"The endpoint pool", "The blocking endpoint pool"),
    (r"Belongs to one event loop", "Safe to use from several threads"),
)


def generated(folder: Path) -> dict[Path, str]:
    """The text of each generated file."""
    return {
        folder / made: HEADER.format(source=source)
        + translate((folder / source).read_text("utf-8"))
        for source, made in FILES.items()
    }


def translate(text: str) -> str:
    for pattern, replacement in TOKENS:
        text = re.sub(pattern, replacement, text)
    return text


def stale(folder: Path) -> list[str]:
    """Names of generated files that aren't what would be generated."""
    return [
        path.name
        for path, text in generated(folder).items()
        if not path.exists() or path.read_text("utf-8") != text
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Generates the blocking client.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it is stale")
    folder = Path(__file__).parent
    if parser.parse_args().check:
        if names := stale(folder):
            sys.exit(f"{', '.join(names)}: run `python -m quill.server.client.generate_sync`")
        return
    for path, text in generated(folder).items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
