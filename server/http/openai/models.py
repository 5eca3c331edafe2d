"""`/v1/models`: the one model that is served.

Knows: OpenAI's shape of a list of models. Does not know: how it is served.
"""

import time

from quill.server.http.wire.exchange import Exchange
from quill.server.http.wire.refusals import RefusalError
from quill.server.http.wire.route import Route
from quill.server.protocol.served_model import ServedModel
from quill.server.service.json_fields import STRING, Field, Json
from quill.server.service.origin import Origin

ALIAS = "quill"  # whatever is served
MODEL = Field("model", STRING, f"the name of the model, as /v1/models has it, or {ALIAS}")
STARTED = int(time.time())


class Models(Route):
    verb = "GET"
    path = "/v1/models"
    says = "the model that is served"

    async def answer(self, values: Json, origin: Origin, exchange: Exchange) -> None:
        model = await self._service.get_model(origin)
        entry = {
            "id": model.name,
            "object": "model",
            "created": STARTED,
            "owned_by": "quill",
            "max_model_len": model.context,
        }
        await exchange.answer_json({"object": "list", "data": [entry]})


def check_model(values: Json, served: ServedModel) -> None:
    """Whoever names another one is told so, and whoever names none gets the one that is here."""
    name = served.manifest.name
    if values.get("model", name) not in (name, ALIAS):
        rule = f"there is {name}, which {ALIAS} means, too"
        raise RefusalError(404, "model", f"isn't served here; {rule}")


def fingerprint(served: ServedModel) -> str:
    """The same one, and the same seed, give the same tokens."""
    return f"{served.manifest.name}-{served.graphs.precision}"
