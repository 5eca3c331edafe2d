"""A door by its name.

Knows: all doors. Does not know: who asks, or what.
"""

from collections.abc import Callable

from quill.loadtest.doors.door import Door
from quill.loadtest.doors.grpc_door import GrpcDoor
from quill.loadtest.doors.http_door import HttpDoor
from quill.loadtest.doors.kserve_door import KserveDoor
from quill.loadtest.doors.names import DoorName
from quill.server.client.access import Access

_DOORS: dict[DoorName, Callable[[str, Access], Door]] = {
    "grpc": GrpcDoor,
    "http": HttpDoor,
    "kserve": KserveDoor,
}


def open_door(name: DoorName, address: str, access: Access) -> Door:
    """`address`: of the HTTP port for HTTP, else of gRPC's."""
    return _DOORS[name](address, access)
