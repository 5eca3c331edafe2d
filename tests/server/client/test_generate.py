"""The generated files of the client are up to date."""

import shutil
from pathlib import Path

from quill.server.client import generate


def test_generated_files_are_up_to_date() -> None:
    assert generate.stale(Path(generate.__file__).parent) == []


def test_changed_source_makes_the_generated_file_stale(tmp_path: Path) -> None:
    folder = Path(generate.__file__).parent
    for name in (*generate.SYNC, *generate.SYNC.values(), "options.py"):
        shutil.copy(folder / name, tmp_path)
    source = tmp_path / "async_pool.py"
    source.write_text(source.read_text("utf-8").replace("RESOLVE_S", "LOOKUP_S"), "utf-8")
    assert generate.stale(tmp_path) == ["sync_pool.py"]


def test_nothing_async_is_left() -> None:
    text = "async def f(c: AsyncClient) -> Awaitable[None]:\n    await asyncio.sleep(async_read(c))"
    assert generate.translate(text) == "def f(c: Client) -> None:\n    time.sleep(read(c))"
