"""What doors are called.

Imports nothing: `--help` must answer at once.
"""

from typing import Literal

DoorName = Literal["grpc", "http", "kserve"]
TITLES: dict[DoorName, str] = {"grpc": "gRPC", "http": "HTTP", "kserve": "KServe v2"}
DOORS = tuple(TITLES)
