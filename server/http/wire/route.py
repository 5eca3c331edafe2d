"""What answers a path: the interface between the application and the paths it serves.

Knows: that a path has fields. Does not know: what is answered.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from quill.server.frontend.call import Calls, RequestContext
from quill.server.frontend.json_values import Json, JsonField, Unsupported, read_fields
from quill.server.http.wire.exchange import Exchange


class Route:
    """One path. One table of its fields is checked, and shown by `/docs`."""

    verb: ClassVar[Literal["GET", "POST"]] = "POST"
    path: ClassVar[str]
    help: ClassVar[str]
    fields: ClassVar[Sequence[JsonField]] = ()
    unsupported: ClassVar[Sequence[Unsupported]] = ()

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def read(self, body: Any) -> Json:
        """The fields' values, each checked by itself."""
        return read_fields(body, self.fields, self.unsupported)

    async def answer(self, values: Json, context: RequestContext, exchange: Exchange) -> None:
        raise NotImplementedError
