"""Calls that no honest client makes, out of chance alone.

Knows: the wire's messages. Does not know: servers. Chance may be a seeded `random.Random`, or one
that hypothesis leads, which then finds the smallest call that does harm.
"""

import json
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from quill.protos import generation_pb2 as pb
from quill.protos import kserve_pb2 as kserve

SERVICE = "quill.v1.TextGeneration"
STREAMING = "GenerateStream"
REQUESTS: dict[str, type[Message]] = {
    "Generate": pb.GenerateRequest,
    STREAMING: pb.GenerateRequest,
    "Score": pb.ScoreRequest,
    "Embed": pb.EmbedRequest,
    "FillMask": pb.FillMaskRequest,
    "Tokenize": pb.TokenizeRequest,
    "Detokenize": pb.DetokenizeRequest,
    "GetModel": pb.GetModelRequest,
}
KSERVE = "inference.GRPCInferenceService"
KSERVE_STREAMING = "ModelStreamInfer"
KSERVE_REQUESTS: dict[str, type[Message]] = {
    "ModelInfer": kserve.ModelInferRequest,
    KSERVE_STREAMING: kserve.ModelInferRequest,
    "ModelMetadata": kserve.ModelMetadataRequest,
    "ModelStatistics": kserve.ModelStatisticsRequest,
}
INTEGERS = (0, 1, 2, 5, 20, 127, 128, 129, 511, 512, 65_536, 2**31 - 1, 2**53, 2**63 - 1, 2**64 - 1)
FLOATS: tuple[float, ...] = (0.0, -0.0, 0.5, 1.0, 1.5, 2.0, -1.0, 1e-320, 1e30, 1e308, -1e308)
FLOATS += (float("inf"), float("-inf"), float("nan"))
TEXTS: tuple[str, ...] = ("", "a", "\0", "<|endoftext|>", "\ufdd0", "\u202e", "%s%n")
TEXTS += ("\U0001f600" * 40, "é" * 90, "x" * 5000, "{{ 7 * 7 }}", "user", "../../etc/passwd")
MODES = (pb.TOOL_MODE_AUTO, pb.TOOL_MODE_NONE, pb.TOOL_MODE_REQUIRED)
LONG_TEXT = "a" * 200_000
LIKELY: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.01, 1.0, 2.0),
    "top_k": (0, 1, 2, 511, 512),
    "top_p": (0.001, 0.5, 1.0),
    "min_p": (0.0, 0.3, 1.0),
    "repetition_penalty": (0.5, 1.3),
    "frequency_penalty": (-2.0, 2.0),
    "ignore_eos": (True,),
    "num_sequences": (1, 2, 4),
    "num_beams": (1, 2, 4),
    "logprobs": (0, 1, 20),
    "prompt_logprobs": (0, 20),
    "echo": (True,),
    "priority": (-10, 10),
}


class Call(NamedTuple):
    method: str
    message: bytes


def make_call(chance: random.Random) -> Call:
    method = chance.choice([*REQUESTS, "Generate", STREAMING, *KSERVE_REQUESTS])
    make = chance.choice([_adversarial, _adversarial, _nearly_right, _mutated, _noise])
    message = make(chance, (REQUESTS | KSERVE_REQUESTS)[method])
    return Call("Nothing" if chance.random() < 0.01 else method, message)


def path_of(method: str) -> str:
    return f"/{KSERVE if method in KSERVE_REQUESTS else SERVICE}/{method}"


def _noise(chance: random.Random, _: type[Message]) -> bytes:
    return noise(chance, 64)


def _adversarial(chance: random.Random, kind: type[Message]) -> bytes:
    message = kind()
    _fill(chance, message)
    return message.SerializeToString()


def _nearly_right(chance: random.Random, kind: type[Message]) -> bytes:
    """Something that is served, mostly with one field that isn't right: it gets furthest."""
    message = kind()
    if isinstance(message, pb.GenerateRequest):
        message.prompt_ids.ids.extend(_ids(chance))
        message.max_new_tokens = chance.randint(1, 12)
        message.seed = chance.getrandbits(64)
        for field, values in LIKELY.items():
            if chance.random() < 0.15:
                setattr(message, field, chance.choice(values))
        if chance.random() < 0.2:
            _fill_tools(chance, message)
    elif isinstance(message, pb.ScoreRequest):
        message.token_ids.ids.extend(_ids(chance))
    elif isinstance(message, kserve.ModelInferRequest):
        _fill_tensors(chance, message)
    fields: list[Any] = [each for each in message.DESCRIPTOR.fields if not each.containing_oneof]
    if fields and chance.random() < 0.6:
        _set(chance, message, chance.choice(fields))
    return message.SerializeToString()


def _fill_tools(chance: random.Random, message: pb.GenerateRequest) -> None:
    message.messages.messages.add(role="user", content="x")
    schemas = ("", "{}", '{"properties": {"a": {"enum": [1]}}}', "[", '{"type": 1}', *TEXTS)
    for name in chance.sample(("f", "g", "h", "", "f" * 65), chance.randint(1, 3)):
        message.tools.add(name=name, parameters=chance.choice(schemas))
    message.tool_choice.mode = chance.choice(MODES)


def _fill_tensors(chance: random.Random, message: kserve.ModelInferRequest) -> None:
    message.model_name = "quill"
    ids = _ids(chance)
    message.inputs.add(name="input_ids", datatype="INT32", shape=[len(ids)])
    message.raw_input_contents.append(struct.pack(f"<{len(ids)}i", *ids))
    options: dict[str, Any] = {"max_tokens": chance.randint(1, 12), "seed": chance.getrandbits(64)}
    for name, values in LIKELY.items():
        if chance.random() < 0.15:
            options[name] = chance.choice((*values, *FLOATS, *TEXTS, None, [], {}))
    text = json.dumps(options).encode()
    message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(struct.pack("<I", len(text)) + text)
    for name in ("stream", "return_logprobs", "return_token_ids", "return_cumulative_logprob"):
        if chance.random() < 0.5:
            message.inputs.add(name=name, datatype="BOOL", shape=[1])
            message.raw_input_contents.append(chance.choice((b"\0", b"\1", b"\xff", b"")))


def _ids(chance: random.Random) -> list[int]:
    return [chance.randrange(512) for _ in range(chance.choice((1, 2, 3, 16, 17, 40, 110)))]


def _mutated(chance: random.Random, kind: type[Message]) -> bytes:
    return mutate(chance, _adversarial(chance, kind)[:4000])


def noise(chance: random.Random, most: int) -> bytes:
    return bytes(chance.getrandbits(8) for _ in range(chance.randint(0, most)))


def mutate(chance: random.Random, content: bytes, first: int = 4000) -> bytes:
    """Some bytes changed, cut off, taken out, put in or doubled, among the first ones."""
    for _ in range(chance.randint(1, 4)):
        content = _mutate_once(chance, content, chance.randint(0, min(len(content), first)))
    return content


def _mutate_once(chance: random.Random, content: bytes, at: int) -> bytes:
    end = min(at + chance.randint(1, 8), len(content))
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: noise(chance, 8),
        lambda: b"\xff" * (end - at),
        lambda: b"\0" * (end - at),
        lambda: chance.choice(INTEGERS).to_bytes(8, "little"),
        lambda: content[at:end] * 2,
        lambda: b"",
    )
    rest = b"" if chance.random() < 0.1 else content[end:]
    return content[:at] + chance.choice(changes)() + rest


def _fill(chance: random.Random, message: Message) -> None:
    """Each field is set or isn't; one or two to something unheard of."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    for field in fields:
        share = 0.12 if field.containing_oneof is None else 0.4
        if chance.random() < share:
            _set(chance, message, field)


def _set(chance: random.Random, message: Message, field: FieldDescriptor) -> None:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        for _ in range(chance.randint(1, 3)):
            key, value = _value(chance, entry.fields_by_name["key"]), entry.fields_by_name["value"]
            if value.message_type is not None:
                _fill(chance, getattr(message, field.name)[key])
            else:
                getattr(message, field.name)[key] = _value(chance, value)
    elif field.is_repeated:
        for _ in range(chance.choice([1, 1, 3, 40, 300])):
            if entry is not None:
                _fill(chance, getattr(message, field.name).add())
            else:
                getattr(message, field.name).append(_value(chance, field))
    elif entry is not None:
        getattr(message, field.name).SetInParent()
        _fill(chance, getattr(message, field.name))
    else:
        setattr(message, field.name, _value(chance, field))


def _value(chance: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = LONG_TEXT if chance.random() < 0.002 else chance.choice(TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_UINT64:
        return chance.choice(INTEGERS)
    bits = 31 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_ENUM) else 63
    fitting = [value for value in INTEGERS if value < 2**bits]
    return chance.choice(fitting) * chance.choice((1, 1, 1, -1))
