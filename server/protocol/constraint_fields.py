"""A form that answers keep to, read from a message.

Knows: protobuf, what forms go with, whether the model can. Does not know: grammars.
"""

import json

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError, UnsupportedError
from quill.server.grammar.constraint_source import Constraint
from quill.server.protocol.served_model import ServedModel

FORMS = "json_schema, json_object, regex, choice or lark"
MAX_CHOICES = 1024


def read_constraint(message: pb.GenerateRequest, served: ServedModel) -> Constraint | None:
    if not message.HasField("constraint"):
        return None
    check_can_constrain("constraint", message, served)
    return _constraint(message.constraint)


def check_can_constrain(field: str, message: pb.GenerateRequest, served: ServedModel) -> None:
    """Whether answers to this request can be kept to a form, as the field asks."""
    if served.grammars is None:
        raise UnsupportedError(
            "this model can't keep to a constraint: it has no tokenizer, no token that ends a "
            f"text, or tokens that aren't bytes. Leave out {field}"
        )
    if message.num_beams > 1:
        rule = "is set, and a search with beams looks at the model's own distribution"
        raise InvalidFieldError(field, f"{rule}. Leave out one of it and num_beams")
    if message.ignore_eos:
        rule = f"is set, and what {field} asks for has to end"
        raise InvalidFieldError("ignore_eos", f"{rule}. Leave out one of them")


def _constraint(constraint: pb.Constraint) -> Constraint:
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidFieldError("constraint", f"is empty: give {FORMS}")
    if kind == "choice":
        return Constraint(kind, _choices(constraint.choice))
    if kind == "json_object":
        if not constraint.json_object:
            raise InvalidFieldError("constraint.json_object", "is false: leave out the constraint")
        return Constraint(kind, "true")
    return Constraint(kind, getattr(constraint, kind))


def _choices(choice: pb.Choice) -> str:
    field, choices = "constraint.choice", list(choice.choices)
    if not 1 <= len(choices) <= MAX_CHOICES:
        rule = f"it must have from 1 to {MAX_CHOICES}"
        raise InvalidFieldError(field, f"has {len(choices)} entries; {rule}")
    if not all(choices):
        raise InvalidFieldError(field, "has an empty entry; each must have a character")
    return json.dumps(choices)
