"""The blocking client is generated from the async one, and up to date."""

import shutil
from pathlib import Path

from quill.server.client import generate_sync


def test_generated_files_are_up_to_date() -> None:
    assert generate_sync.stale(Path(generate_sync.__file__).parent) == []


def test_changed_source_makes_the_generated_file_stale(tmp_path: Path) -> None:
    folder = Path(generate_sync.__file__).parent
    for name in (*generate_sync.FILES, *generate_sync.FILES.values()):
        shutil.copy(folder / name, tmp_path)
    source = tmp_path / "async_pool.py"
    source.write_text(source.read_text("utf-8").replace("RESOLVE_S", "LOOKUP_S"), "utf-8")
    assert generate_sync.stale(tmp_path) == ["sync_pool.py"]


def test_nothing_async_is_left() -> None:
    text = "async def f(c: AsyncClient) -> Awaitable[None]:\n    await asyncio.sleep(async_read(c))"
    assert generate_sync.translate(text) == "def f(c: Client) -> None:\n    time.sleep(read(c))"
