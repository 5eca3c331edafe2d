"""Which processors multiply 8-bit integers fast."""

from pathlib import Path

import pytest

from server.processor import multiplies_integers


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx2 avx512_vnni", True), ("fpu avx_vnni", True), ("fpu avx2 avx512f", False)],
)
def test_the_flags_tell(tmp_path: Path, flags: str, expected: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")
    assert multiplies_integers(cpuinfo) is expected


def test_what_is_not_told_is_no(tmp_path: Path) -> None:
    assert not multiplies_integers(tmp_path / "nothing")
    empty = tmp_path / "cpuinfo"
    empty.write_text("processor\t: 0\n")
    assert not multiplies_integers(empty)
