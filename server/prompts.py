"""What a client wants continued or translated, as token ids.

Knows: text, token ids and conversations on the wire, and how long they may be.
Does not know: how answers are drawn, gRPC.
"""

from collections.abc import Iterable, Sequence
from typing import TypedDict

from protos import generation_pb2 as pb
from server.errors import InvalidFieldError, UnsupportedError
from server.served import Served
from server.text import Text

MAX_MESSAGES = 1024
ROLES = ("system", "user", "assistant")


class Ids(TypedDict):
    """A request's two lists of tokens."""

    prompt_ids: tuple[int, ...]
    source_ids: tuple[int, ...] | None


def check_ids(field: str, ids: Iterable[int], served: Served) -> None:
    """`ids`: a repeated field, or a map by token."""
    for token in ids:
        if not 0 <= token < served.vocab_size:
            rule = f"this model's are from 0 to {served.vocab_size - 1}"
            raise InvalidFieldError(field, f"has the token id {token}; {rule}")


def read_ids(message: pb.GenerateRequest, served: Served) -> Ids:
    """A translation model reads the prompt as its source; its answer begins after bos."""
    ids = tuple(_read_prompt(message, served))
    if not served.is_translator:
        return Ids(prompt_ids=ids, source_ids=None)
    bos = served.manifest.special_tokens.bos
    assert bos is not None, "such a bundle isn't opened"
    return Ids(prompt_ids=(bos,), source_ids=ids)


def _read_prompt(message: pb.GenerateRequest, served: Served) -> list[int]:
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidFieldError("input", "is missing: give prompt, prompt_ids or messages")
    if kind == "prompt":
        is_nothing = served.is_translator and not message.prompt
        ids = [] if is_nothing else encode(message.prompt, "prompt", served)
    elif kind == "messages":
        ids = _read_messages(message.messages.messages, served)
    else:
        ids = list(message.prompt_ids.ids)
        check_ids("prompt_ids", ids, served)
    if not ids:
        raise InvalidFieldError(kind, "is empty; it must have at least one token")
    if served.is_translator:
        most, rule = served.context, f"at most {served.context} fit"
    else:
        most = served.context - 1
        rule = f"at most {most} fit, so that one can be generated"
    if len(ids) > most:
        raise InvalidFieldError(kind, f"has {len(ids)} tokens; {rule}")
    return ids


def _read_messages(messages: Sequence[pb.Message], served: Served) -> list[int]:
    if served.template is None or served.is_translator:
        reason = "translates" if served.is_translator else "has no chat template"
        raise UnsupportedError(
            f"this model {reason}, so it can't take messages. Give a prompt instead"
        )
    text = _text(served, "messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        rule = f"it must have from 1 to {MAX_MESSAGES}"
        raise InvalidFieldError("messages", f"has {len(messages)} messages; {rule}")
    for message in messages:
        if message.role not in ROLES:
            given = f"has a message of the role {message.role[:40]!r}"
            raise InvalidFieldError("messages", f"{given}; known are {', '.join(ROLES)}")
    _check_length(sum(len(message.content) for message in messages), "messages", served, text)
    spoken = [{"role": each.role, "content": text.mark(each.content)} for each in messages]
    return text.encode_rendered(served.template.render(spoken))


def _text(served: Served, field: str) -> Text:
    if served.text is None:
        raise UnsupportedError(
            f"this model has no tokenizer, so it can't take {field}. Give token ids instead"
        )
    return served.text


def encode(text: str, field: str, served: Served, whole: bool = True) -> list[int]:
    tokenizer = _text(served, field)
    _check_length(len(text), field, served, tokenizer)
    return tokenizer.encode(text, whole)


def _check_length(num_characters: int, field: str, served: Served, text: Text) -> None:
    """Refused before time is spent on it: everybody's time, while a tokenizer reads."""
    most = served.context * text.max_characters_per_token
    if num_characters > most:
        rule = f"for a context of {served.context} tokens at most {most} are read"
        raise InvalidFieldError(field, f"has {num_characters} characters; {rule}")
