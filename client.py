"""The SDK: `from quill.client import Client`.

Knows: the names that stay stable for callers. Does not know: how calls are made (server/client/).
It needs grpcio and protobuf, nothing else.
"""

from quill.server.client.access import Access
from quill.server.client.async_client import AsyncClient
from quill.server.client.errors import CallError
from quill.server.client.options import EmbedOptions
from quill.server.client.requests import Options
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from quill.server.client.tools.batch import answer_lines

__all__ = [
    "Access",
    "AsyncClient",
    "CallError",
    "Client",
    "EmbedOptions",
    "Options",
    "Retries",
    "answer_lines",
]
