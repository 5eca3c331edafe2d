"""What answers a path.

Knows: nothing of what is answered. It is the shape that the application and its page about itself
rely upon.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from quill.server.errors import InvalidFieldError, RequestError
from quill.server.http.wire.exchange import Exchange
from quill.server.service.generation_options import as_written
from quill.server.service.json_fields import Field, Json, Refused, read_fields
from quill.server.service.origin import Origin
from quill.server.service.service import Service


class Route:
    """One path. What its fields may hold is said once, for the checks and for `/docs`."""

    verb: ClassVar[Literal["GET", "POST"]] = "POST"
    path: ClassVar[str]
    says: ClassVar[str]
    fields: ClassVar[Sequence[Field]] = ()
    refused: ClassVar[Sequence[Refused]] = ()

    def __init__(self, service: Service) -> None:
        self._service = service

    def read(self, body: Any) -> Json:
        """The fields' values, checked by themselves."""
        return read_fields(body, self.fields, self.refused)

    async def answer(self, values: Json, origin: Origin, exchange: Exchange) -> None:
        raise NotImplementedError

    def as_written(self, error: RequestError, values: Json) -> RequestError:
        """With the names that clients know their fields by."""
        if isinstance(error, InvalidFieldError):
            return as_written(error, values, self.fields)
        return error
