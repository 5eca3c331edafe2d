"""For those who call a server: `from quill.client import Client`.

Knows: the names that are kept stable for them. Does not know: how calls are made
(server/client/). It needs grpcio and protobuf, nothing else.
"""

from quill.server.client.access import Access
from quill.server.client.async_client import AsyncClient
from quill.server.client.batch.answering import answer_lines
from quill.server.client.call_error import CallError
from quill.server.client.sync_client import Client

__all__ = ["Access", "AsyncClient", "CallError", "Client", "answer_lines"]
