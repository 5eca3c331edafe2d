"""A door by its name.

Knows: all doors. Does not know: who asks, or what.
"""

from collections.abc import Callable

from quill.loadtest.protocols.door import Door
from quill.loadtest.protocols.fleet_door import shared_door
from quill.loadtest.protocols.grpc_door import GrpcDoor
from quill.loadtest.protocols.http_door import HttpDoor
from quill.loadtest.protocols.kserve_door import KserveDoor
from quill.loadtest.protocols.names import DoorName
from quill.server.client.access import Access
from quill.server.client.target import is_multiple

_DOORS: dict[DoorName, Callable[[str, Access], Door]] = {
    "grpc": GrpcDoor,
    "http": HttpDoor,
    "kserve": KserveDoor,
}


def open_door(name: DoorName, address: str, access: Access) -> Door:
    """`address`: of the HTTP port for HTTP, else of gRPC's; of several servers for gRPC alone."""
    if is_multiple(address):
        assert name == "grpc", "the options refuse these"
        return shared_door(address, access)
    return _DOORS[name](address, access)
