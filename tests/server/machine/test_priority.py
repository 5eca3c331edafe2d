"""Threads that wait for others, and others that don't."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from quill.server.machine.priority import be_nice


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is of whole processes here")
def test_only_the_thread_itself_is_nice() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with ThreadPoolExecutor(1, initializer=be_nice, initargs=(3,)) as nice:
        assert nice.submit(niceness).result() == min(19, before + 3)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(niceness).result() == before
    assert niceness() == before
