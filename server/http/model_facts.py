"""`/model`: everything about the model that is served, for the page and whoever else asks.

Knows: GetModel's answer. Does not know: how it is served.
"""

from google.protobuf.json_format import MessageToDict

from quill.server.http.wire.exchange import Exchange
from quill.server.http.wire.route import Route
from quill.server.service.json_fields import Json
from quill.server.service.origin import Origin
from quill.server.service.service import Service


class ModelFacts(Route):
    verb = "GET"
    path = "/model"
    says = "everything about the model that is served, as gRPC's GetModel has it"

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, values: Json, origin: Origin, exchange: Exchange) -> None:
        model = await self._service.get_model(origin)
        facts = MessageToDict(
            model, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        await exchange.answer_json(facts)
