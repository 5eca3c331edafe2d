"""Memory that only starting needed is given back, and nothing breaks."""

import subprocess
import sys

import pytest

from quill.server.machine.heap import read_code


def test_only_code_of_files_is_given_back() -> None:
    """A library's tables were written to when it was loaded, though nobody may any more."""
    maps = """\
00400000-00500000 r-xp 00000000 fe:00 123 /usr/bin/python3
7f0000000000-7f0000001000 r--p 00000000 fe:00 124 /usr/lib/libc.so.6
7f0000001000-7f0000003000 r-xp 00001000 fe:00 124 /usr/lib/libc.so.6
7f0000003000-7f0000004000 rw-p 00003000 fe:00 124 /usr/lib/libc.so.6
7f0000010000-7f0000020000 rwxp 00000000 00:00 0
7f0000020000-7f0000030000 r-xp 00000000 00:00 0
7ffc00000000-7ffc00002000 r-xp 00000000 00:00 0                          [vdso]
"""
    assert read_code(maps) == [(0x400000, 0x500000), (0x7F0000001000, 0x7F0000003000)]


# In a process of its own, lest the other tests' code has to be read again.
GIVE_BACK = """
import numpy, onnxruntime
from quill.server.machine.heap import drop_startup_pages

def of_files():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssFile"))

before = of_files()
drop_startup_pages()
print(before - of_files(), numpy.dot(numpy.ones(8), numpy.ones(8)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
def test_code_that_only_starting_needed_is_given_back_and_comes_again() -> None:
    command = [sys.executable, "-c", GIVE_BACK]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(said[0]) > 4000  # KB
    assert said[1] == "8.0"
