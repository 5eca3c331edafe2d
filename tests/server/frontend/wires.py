"""One request over every wire, without a server: what a frontend parses, checked by a model."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from quill.protos import generation_pb2 as pb
from quill.server.api import messages
from quill.server.errors import InvalidFieldError
from quill.server.fields import GENERATE
from quill.server.frontend.json_options import generate_spec
from quill.server.frontend.reader import Arrival, RequestReader
from quill.server.frontend.served_model import ServedModel
from quill.server.frontend.spec import GenerateSpec, ParsedRequest, Prompt, renamed
from quill.server.http.completions import Completions
from quill.server.kserve.inference import read_inference
from tests.server.kserve.asking import asking
from tests.server.running import make_served

ARRIVAL = Arrival(request_id="r", deadline_s=None)
SERVED = make_served()
Options = Mapping[str, Any]  # by their names in server/fields.py


def grpc(options: Options) -> GenerateSpec:
    named = {
        name: getattr(pb, choices.proto_name(value))
        if (choices := GENERATE[name].choices)
        else value
        for name, value in options.items()
    }
    return messages.read_generate(pb.GenerateRequest(prompt="abc", **named))


def _json(options: Options) -> dict[str, Any]:
    """As an OpenAI or vLLM client writes them."""
    written = {}
    for name, value in options.items():
        field = GENERATE[name]
        if field.choices is not None and field.choices.json is not None:
            value = next(each for each, own in field.choices.json.items() if own == value)
        written[field.json_name] = -value if name == "priority" else value
    return json.loads(json.dumps(written))  # type: ignore[no-any-return]


def http(options: Options) -> GenerateSpec:
    route = Completions.__new__(Completions)
    values = route.read({"prompt": "abc", **_json(options)})
    return generate_spec(Prompt("prompt", "abc"), values, Completions.fields, {})


def kserve(options: Options) -> GenerateSpec:
    parameters = json.dumps(_json(options))
    return read_inference(asking(text_input="abc", sampling_parameters=parameters), True).spec


WIRES: dict[str, Callable[[Options], GenerateSpec]] = {"grpc": grpc, "http": http, "kserve": kserve}


def read(wire: str, options: Options, served: ServedModel = SERVED) -> ParsedRequest:
    """As a call reads it: an error has the name that the client wrote."""
    spec = WIRES[wire](options)
    try:
        return RequestReader(served).read_generate(spec, ARRIVAL)
    except InvalidFieldError as error:
        raise renamed(error, spec.names) from None


def name_on(wire: str, option: str) -> str:
    return option if wire == "grpc" else GENERATE[option].json_name
