"""What memory and multipliers do at most: the loops compute what they say, with every kernel."""

import ctypes
import os
import random

import pytest

from quill.export.operators.library import library_path
from quill.server.doctor import peaks, speed
from quill.server.doctor.peaks import Peaks, Rates
from quill.server.doctor.speed import CardPeak, Work, measure_speed
from tests.operators import needs_operators

pytestmark = [needs_operators, pytest.mark.portable]


@pytest.fixture(params=["avx512", "avxvnni", "avx2", "plain"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """A processor that lacks the instructions takes the best that it has."""
    monkeypatch.setenv("QUILL_KERNELS", request.param)
    library = ctypes.CDLL(os.fspath(library_path()))
    library.QuillReadMemory.restype = library.QuillMultiplyBytes.restype = ctypes.c_int64
    return library


def test_every_byte_is_read(library: ctypes.CDLL) -> None:
    content = random.Random(0).randbytes(4096)
    assert library.QuillReadMemory(content, ctypes.c_int64(len(content))) == sum(content)
    assert library.QuillReadMemory(content, ctypes.c_int64(0)) == 0


def test_every_product_is_computed(library: ctypes.CDLL) -> None:
    products = library.QuillMultiplyBytes(ctypes.c_int64(1))
    assert products >= 64
    assert library.QuillMultiplyBytes(ctypes.c_int64(1000)) == 1000 * products


def test_all_threads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "READ_BYTES", peaks.MIN_READ_BYTES)
    rates = Peaks(2).measure()
    assert rates.bytes > 1e6
    assert rates.products > 1e6


def test_a_card_is_measured_by_the_copy_that_it_serves_with() -> None:
    rates = CardPeak("cpu", 2**20).measure()
    assert rates.bytes > 1e6
    assert rates.products == 0


class FakePeak:
    """A machine that does half as much from the third time on."""

    def __init__(self) -> None:
        self.num = 0

    def measure(self) -> Rates:
        self.num += 1
        return Rates(1000.0, 100.0) if self.num < 3 else Rates(500.0, 50.0)


def test_a_share_is_of_what_the_machine_did_before_or_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speed, "ROUNDS", 3)
    work = Work("step", lambda: None, num_tokens=4, num_bytes=250, num_products=10)
    monkeypatch.setattr(work, "measure", lambda: 1.0)
    rates = measure_speed([work], FakePeak(), lambda words: None)
    assert [each.bytes for each in rates] == [1000, 1000, 500, 500]
    assert [each.bytes for _, each in work.turns] == [1000, 1000, 500]
    assert (work.tokens_s, work.share_of_reading, work.share_of_multiplying) == (4, 0.25, 0.1)


def test_nothing_is_said_of_multipliers_that_nobody_knows() -> None:
    work = Work("step", lambda: None, 1, 1, 1, turns=[(1.0, Rates(1.0, 0.0))])
    assert work.share_of_multiplying is None
