"""What a client wants continued or translated, as token ids.

Knows: text, token ids and conversations on the wire, and how long they may be.
Does not know: how answers are drawn, gRPC.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError, UnsupportedError
from quill.server.protocol.conversation import num_characters, rendered
from quill.server.protocol.served_model import ServedModel
from quill.server.protocol.tool_fields import ToolUse
from quill.server.text.tokenizer import Text

MAX_MESSAGES = 1024
ROLES = ("system", "user", "assistant", "tool")


class PromptIds(NamedTuple):
    """A request's two lists of tokens."""

    prompt_ids: tuple[int, ...]
    source_ids: tuple[int, ...] | None


class PromptReader:
    """Reads what clients send to one model, or says which field is wrong and why."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def read(
        self,
        message: pb.GenerateRequest,
        max_tokens: int | None = None,
        tools: ToolUse | None = None,
    ) -> PromptIds:
        """A translation model reads the prompt as its source; its answer begins after bos."""
        ids = tuple(self._read_input(message, max_tokens, tools))
        if not self._served.is_translator:
            return PromptIds(ids, None)
        bos = self._served.manifest.special_tokens.bos
        assert bos is not None, "loading refuses such a bundle"
        return PromptIds((bos,), ids)

    def check_ids(self, field: str, ids: Iterable[int]) -> None:
        """`ids`: a repeated field, or a map by token."""
        vocab_size = self._served.vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                rule = f"this model's are from 0 to {vocab_size - 1}"
                raise InvalidFieldError(field, f"has the token id {token}; {rule}")

    def encode(self, text: str, field: str, whole: bool = True) -> list[int]:
        tokenizer = self._tokenizer(field)
        self._check_length(len(text), field, tokenizer)
        return tokenizer.encode(text, whole)

    def encode_masked(self, text: str, field: str, mask: int) -> list[int]:
        """Where the mask token stands, it counts."""
        tokenizer = self._tokenizer(field)
        self._check_length(len(text), field, tokenizer)
        return tokenizer.encode_masked(text, mask)

    def _read_input(
        self, message: pb.GenerateRequest, max_tokens: int | None, tools: ToolUse | None
    ) -> list[int]:
        served, kind = self._served, message.WhichOneof("input")
        if kind is None:
            raise InvalidFieldError("input", "is missing: give prompt, prompt_ids or messages")
        if kind == "prompt":
            is_nothing = served.is_translator and not message.prompt
            ids = [] if is_nothing else self.encode(message.prompt, "prompt")
        elif kind == "messages":
            ids = self._read_messages(message.messages.messages, tools)
        else:
            ids = list(message.prompt_ids.ids)
            self.check_ids("prompt_ids", ids)
        if not ids:
            raise InvalidFieldError(kind, "is empty; it must have at least one token")
        if served.is_translator:
            most, rule = served.context, f"at most {served.context} fit"
        else:
            most = served.context - 1
            rule = f"at most {most} fit, so that one can be generated"
        if len(ids) > most:
            raise InvalidFieldError(kind, f"has {len(ids)} tokens; {rule}")
        check_allowed(kind, len(ids), max_tokens)
        return ids

    def _read_messages(self, messages: Sequence[pb.Message], tools: ToolUse | None) -> list[int]:
        template, is_translator = self._served.template, self._served.is_translator
        if template is None or is_translator:
            reason = "translates" if is_translator else "has no chat template"
            raise UnsupportedError(
                f"this model {reason}, so it can't take messages. Give a prompt instead"
            )
        text = self._tokenizer("messages")
        if not 1 <= len(messages) <= MAX_MESSAGES:
            rule = f"it must have from 1 to {MAX_MESSAGES}"
            raise InvalidFieldError("messages", f"has {len(messages)} messages; {rule}")
        for message in messages:
            if message.role not in ROLES:
                given = f"has a message of the role {message.role[:40]!r}"
                raise InvalidFieldError("messages", f"{given}; known are {', '.join(ROLES)}")
        self._check_length(num_characters(messages), "messages", text)
        if tools is not None:
            described = sum(len(tool.description) for tool in tools.tools)
            self._check_length(described, "tools", text)
        return text.encode_rendered(rendered(messages, tools, template, text.mark))

    def _tokenizer(self, field: str) -> Text:
        if self._served.text is None:
            raise UnsupportedError(
                f"this model has no tokenizer, so it can't take {field}. Give token ids instead"
            )
        return self._served.text

    def _check_length(self, num_characters: int, field: str, text: Text) -> None:
        """Refused before time is spent on it: everybody's time, while a tokenizer reads."""
        context = self._served.context
        most = context * text.max_characters_per_token
        if num_characters > most:
            rule = f"for a context of {context} tokens at most {most} are read"
            raise InvalidFieldError(field, f"has {num_characters} characters; {rule}")


def check_allowed(field: str, num_tokens: int, max_tokens: int | None) -> None:
    """Whether the caller may have so long a prompt read."""
    if max_tokens is not None and num_tokens > max_tokens:
        rule = f"at most {max_tokens} are allowed with this API key"
        raise InvalidFieldError(field, f"has {num_tokens} tokens; {rule}")
