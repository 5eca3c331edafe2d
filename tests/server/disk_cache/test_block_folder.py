"""Blocks in files: the same bytes or a miss, whatever happened to the files; a limit that holds."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quill.server.disk_cache.block_folder import BlockFolder, Content, DamagedError
from quill.server.errors import StartError
from tests.test_full_disk import MOUNT, ROOT, TIMEOUT_S, UNSHARE, can_mount

BLOCK_BYTES = 5000  # two pages on the disk
FILE_BYTES = 8192
IDENTITY = b"a" * 32


def open_folder(path: Path, max_blocks: int = 100, identity: bytes = IDENTITY) -> BlockFolder:
    return BlockFolder(path, identity, BLOCK_BYTES, max_blocks * FILE_BYTES)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content_of(number: int) -> Content:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def write(folder: BlockFolder, *numbers: int) -> None:
    for number in numbers:
        folder.write(key_of(number), content_of(number), 0)


def read(folder: BlockFolder, number: int) -> bool:
    """Whether it is there: then with its own bytes."""
    content = np.zeros(BLOCK_BYTES, np.uint8)
    try:
        folder.read(key_of(number), content, 0)
    except (DamagedError, FileNotFoundError):
        return False
    assert (content == content_of(number)).all()
    return True


def files_of(path: Path) -> list[Path]:
    """The oldest first."""
    found = [each for each in path.glob("prefix-blocks/*/*") if each.is_file()]
    return sorted(found, key=lambda each: each.stat().st_mtime_ns)


def test_the_next_process_finds_the_same_bytes(tmp_path: Path) -> None:
    write(open_folder(tmp_path), 1, 2)
    again = open_folder(tmp_path)
    assert again.keys == {key_of(1), key_of(2)}
    assert read(again, 1)
    assert read(again, 2)
    assert not read(again, 3)
    assert again.used_bytes == 2 * FILE_BYTES


def test_another_identity_finds_nothing(tmp_path: Path) -> None:
    write(open_folder(tmp_path), 1)
    other = open_folder(tmp_path, identity=b"b" * 32)
    assert other.keys == set()
    assert not read(other, 1)
    assert other.used_bytes == FILE_BYTES, "and counts what others have"
    (path,) = files_of(tmp_path)
    path.rename(tmp_path / "prefix-blocks" / (b"b" * 32).hex() / path.name)
    assert not read(other, 1), "though somebody moved it there"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "without its last byte": lambda whole: whole[:-1],
    "one byte more": lambda whole: whole + b"\0",
    "a bit of a number": lambda whole: whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
    "a bit of the checksum": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "zeros, as after a crash of the machine": lambda whole: bytes(len(whole)),
    "something else": lambda whole: b"#!/bin/sh\n" * 700,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_a_miss_and_is_written_again(tmp_path: Path, damage: str) -> None:
    folder = open_folder(tmp_path)
    write(folder, 1)
    (path,) = files_of(tmp_path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert not read(folder, 1)
    assert not read(open_folder(tmp_path), 1)
    folder.remove(key_of(1))
    write(folder, 1)
    assert read(folder, 1)
    assert folder.used_bytes <= FILE_BYTES


def test_file_under_another_block_s_name_is_a_miss(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    write(folder, 1)
    (path,) = files_of(tmp_path)
    path.rename(path.with_name(key_of(2).hex()))
    assert not read(folder, 2)


def test_what_a_killed_process_left_is_no_block_of_the_next_one(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    write(folder, 1)
    (path,) = files_of(tmp_path)
    os.truncate(path, BLOCK_BYTES // 2)
    again = open_folder(tmp_path)
    assert again.keys == set()
    assert again.used_bytes == 4096, "and counts"


def test_what_is_not_ours_stays_and_does_no_harm(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    own = tmp_path / "prefix-blocks" / IDENTITY.hex()
    foreign = [tmp_path / "notes", tmp_path / "prefix-blocks/notes", own / "notes"]
    for path in foreign:
        path.write_text("mine")
    (own / ("f" * 64)).mkdir()
    (own / ("e" * 64)).symlink_to(tmp_path / "notes")
    (tmp_path / "prefix-blocks" / ("d" * 64)).write_text("mine")
    os.mkfifo(own / ("c" * 64))
    write(folder, *range(200))
    assert open_folder(tmp_path, max_blocks=2).keys <= {key_of(each) for each in range(200)}
    assert all(path.read_text() == "mine" for path in foreign)


def test_all_blocks_together_never_have_more_bytes_than_allowed(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, max_blocks=20)
    for number in range(100):
        write(folder, number)
        num_bytes = sum(path.stat().st_blocks * 512 for path in files_of(tmp_path))
        assert num_bytes <= folder.used_bytes <= 20 * FILE_BYTES
    assert 18 <= len(files_of(tmp_path)) <= 20
    assert len(open_folder(tmp_path, max_blocks=10).keys) == 9, "there is a place for the next one"


def test_servers_that_share_a_directory_share_its_limit(tmp_path: Path) -> None:
    folders = [open_folder(tmp_path, 20, identity=bytes([i]) * 32) for i in range(3)]
    for number in range(30):
        for folder in folders:
            write(folder, number)
            assert len(files_of(tmp_path)) <= 20
    assert all(read(folder, 29) for folder in folders)


def test_block_that_another_server_has_written_is_not_written_again(tmp_path: Path) -> None:
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, 1)
    (path,) = files_of(tmp_path)
    before = path.stat()
    write(two, 1)
    assert path.stat().st_ctime_ns > before.st_ctime_ns, "it is marked as used"
    assert two.used_bytes == 0, "as of its start"
    write(two, 2)
    assert two.used_bytes == 2 * FILE_BYTES


def test_the_least_recently_used_goes_first_and_a_text_s_end_before_its_start(
    tmp_path: Path,
) -> None:
    folder = open_folder(tmp_path, max_blocks=8)
    for number in range(6):  # a text of six blocks
        folder.write(key_of(number), content_of(number), number)
    evicted = set[bytes]()
    for number in range(10, 13):
        evicted |= folder.write(key_of(number), content_of(number), 0)
    assert [read(folder, number) for number in range(6)] == [True] * 4 + [False] * 2
    assert evicted == {key_of(4), key_of(5)}
    folder.touch(key_of(10), 100)
    write(folder, 13)
    assert key_of(10) in folder.write(key_of(14), content_of(14), 0)


def test_lost_count_is_taken_for_a_full_directory_and_counted_again(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, max_blocks=8)
    write(folder, 1, 2)
    (tmp_path / "prefix-blocks/total").write_bytes(b"?")
    write(folder, 3)
    assert folder.used_bytes == 3 * FILE_BYTES


def test_nobody_else_may_read_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cache"
    before = os.umask(0)
    try:
        write(open_folder(path), 1)
    finally:
        os.umask(before)
    modes = {each: each.stat().st_mode & 0o777 for each in (path, *path.rglob("*"))}
    assert all(mode == (0o700 if each.is_dir() else 0o600) for each, mode in modes.items())


def test_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    open_folder(tmp_path)
    (tmp_path / "prefix-blocks").chmod(0o755)
    with pytest.raises(StartError, match=r"nobody else may enter.*`chmod 700`"):
        open_folder(tmp_path)
    (tmp_path / "prefix-blocks").chmod(0o700)
    (tmp_path / "prefix-blocks").rename(tmp_path / "elsewhere")
    (tmp_path / "prefix-blocks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="nobody else may enter"):
        open_folder(tmp_path)


def test_directory_that_can_not_be_used_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"--prefix-cache-dir .*/cache can't be used: Not a direc"):
        open_folder(tmp_path / "file" / "cache")
    with pytest.raises(StartError, match="--prefix-cache-dir /proc/cache can't be used"):
        open_folder(Path("/proc/cache"))
    with pytest.raises(StartError, match=r"--prefix-cache-dir-mb is too little for one block"):
        open_folder(tmp_path, max_blocks=0)


ON_FULL_DISK = """
import contextlib, logging, os, sys
from pathlib import Path
from quill.server.errors import StartError
from tests.server.disk_cache.test_block_folder import content_of, key_of, open_folder, read

logging.basicConfig(stream=sys.stdout, format="%(message)s")
disk = Path(sys.argv[1])
folder = open_folder(disk / "used")
folder.write(key_of(1), content_of(1), 0)
with contextlib.suppress(OSError), (disk / "junk").open("ab", buffering=0) as file:
    while True:
        file.write(bytes(4096))
used = folder.used_bytes
try:
    folder.write(key_of(2), content_of(2), 0)
except OSError as error:
    print(error.strerror)
print(read(folder, 1), read(folder, 2), folder.used_bytes == used)
print(read(open_folder(disk / "used"), 1))
try:
    open_folder(disk / "new")
except StartError as error:
    print(error)
"""


def test_full_disk_is_an_error_at_the_start_and_loses_one_block_later(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("this system lets nobody mount a file system of its own")
    program = [sys.executable, "-c", ON_FULL_DISK, str(tmp_path)]
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", MOUNT, "sh", str(tmp_path), *program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=TIMEOUT_S,
    )
    assert done.stdout.splitlines() == [
        "No space left on device",
        "True False True",
        "there is no free space for --prefix-cache-dir: it is only read",
        "True",
        f"--prefix-cache-dir {tmp_path}/new can't be used: No space left on device. Give a "
        "directory that this user may write to, on a disk with free space",
    ], done.stderr
