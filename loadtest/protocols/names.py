"""The protocols' names.

Imports nothing: `--help` must answer at once.
"""

from typing import Literal

ProtocolName = Literal["grpc", "http", "kserve"]
TITLES: dict[ProtocolName, str] = {"grpc": "gRPC", "http": "HTTP", "kserve": "KServe v2"}
PROTOCOLS = tuple(TITLES)
