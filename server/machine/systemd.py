"""Tells systemd that the service is ready, alive or stopping (sd_notify).

Knows: $NOTIFY_SOCKET, $WATCHDOG_USEC. Does not know: what the service does. Without systemd nothing
happens.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable


def notify(state: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a name outside of the file system
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), address)


async def keep_notified(ready: asyncio.Event, is_well: Callable[[], bool]) -> None:
    """Until it is cancelled. A service that isn't well misses its watchdog, and is restarted."""
    await ready.wait()
    notify("READY=1")
    period_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6 / 3
    while period_s:
        if is_well():
            notify("WATCHDOG=1")
        await asyncio.sleep(period_s)
