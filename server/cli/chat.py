"""`quill chat`: a conversation in the terminal, with tool calls that the user confirms.

Knows: turns, what a user types. Does not know: templates, tokens.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from quill.protos import generation_pb2 as pb
from quill.server.cli.client_commands import CHAT_SAMPLING
from quill.server.cli.generate import open_client, read_options
from quill.server.cli.local_tools import LocalTool, load_tools
from quill.server.client.errors import CallError
from quill.server.client.requests import Options
from quill.server.client.sync_client import Client
from quill.server.errors import ServerError

Message = Mapping[str, Any]
CALL = "/call"
MAX_ROUNDS = 8  # of tool calls in one turn


def chat(args: argparse.Namespace) -> None:
    tools = {} if args.tools is None else load_tools(args.tools)
    history: list[Message] = []
    if args.system:
        history.append({"role": "system", "content": args.system})
    with open_client(args) as client:
        model = client.model()
        if not model.chat_template:
            raise ServerError(f"{model.name} has no chat template. Use `quill generate`")
        options = with_chat_defaults(read_options(args), model)
        print(f"Talking with {model.name}. Ctrl-C stops an answer, Ctrl-D ends the chat.")
        if tools:
            options["tools"] = [tool.json for tool in tools.values()]
            print(_about(tools, model))
        conversation = _Chat(
            client, args.timeout, options, tools, "auto" if model.tool_call_format else "none"
        )
        while (text := _read_line()) is not None:
            if text:
                history += conversation.turn(history, text)


def with_chat_defaults(options: Options, model: pb.Model) -> Options:
    """The API's default is to sample from all tokens, which is nonsense with small models. Defaults
    of the model go first, and the user's options before those."""
    if model.defaults or "num_beams" in options:
        return options
    return {**cast("Options", CHAT_SAMPLING), **options}


def _about(tools: Iterable[str], model: pb.Model) -> str:
    about = f"The model may call {', '.join(tools)}; nothing runs before you say yes."
    if model.tool_call_format:
        return f"{about} {CALL} TEXT requires a call."
    return f"{about} Its template has no tools, so it calls them only after {CALL} TEXT."


def _read_line() -> str | None:
    """What the user types; None at the end of the chat."""
    try:
        text = input("\n> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print("\n(Ctrl-D, or /quit, ends the chat)")
        return ""
    return None if text == "/quit" else text


@dataclass
class _Answer:
    """An answer, as far as it was received."""

    text: str = ""
    calls: dict[int, pb.ToolCall] = field(default_factory=dict)
    is_complete: bool = False

    def add(self, chunk: pb.GenerateChunk) -> None:
        self.text += chunk.text
        for delta in chunk.tool_calls:
            call = self.calls.setdefault(delta.index, pb.ToolCall(id=delta.id, name=delta.name))
            call.arguments += delta.arguments
        self.is_complete = chunk.finish_reason == pb.FINISH_REASON_EOS

    def message(self) -> Message:
        calls = list(self.calls.values()) if self.is_complete else []
        return {"role": "assistant", "content": self.text, "tool_calls": calls}


@dataclass(frozen=True)
class _Chat:
    client: Client
    timeout_s: float | None
    options: Options
    tools: Mapping[str, LocalTool]
    tool_choice: str  # without /call

    def turn(self, history: Sequence[Message], text: str) -> list[Message]:
        """The messages of one turn: the user's, the model's, and tool results between. None if the
        server rejected it."""
        command, _, rest = text.partition(" ")
        is_call = bool(self.tools) and command == CALL
        messages: list[Message] = [{"role": "user", "content": rest if is_call else text}]
        choice = "required" if is_call else self.tool_choice
        for _ in range(MAX_ROUNDS):
            answer = self._answer([*history, *messages], choice)
            if not answer.text and not (answer.calls and answer.is_complete):
                return messages if len(messages) > 1 else []
            messages.append(answer.message())
            if not answer.calls or not answer.is_complete:
                break
            messages += [self._call(call) for call in answer.calls.values()]
            choice = self.tool_choice
        return messages

    def _answer(self, messages: Sequence[Message], choice: str) -> _Answer:
        """Until its end, or until Ctrl-C."""
        answer = _Answer()
        options: Options = {**self.options, "tool_choice": choice} if self.tools else self.options
        chunks = self.client.stream(messages, timeout_s=self.timeout_s, resume=True, **options)
        try:
            for chunk in chunks:
                answer.add(chunk)
                print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            chunks.close()
            print(" [stopped]", end="")
        except CallError as error:
            print(f"[{error}]", end="")
        if answer.calls and not answer.is_complete:
            print("[the tool call is incomplete]", end="")
        if answer.text or not answer.is_complete:
            print(flush=True)
        return answer

    def _call(self, call: pb.ToolCall) -> Message:
        """The result of a tool call, if the user agreed to it."""
        print(f"{call.name}({_shown(call.arguments)})")
        result = "The user declined this call."
        if _confirm("Run it? [y/N] "):
            result = self.tools[call.name].run(call.arguments)
            print(_printable(result))
        return {"role": "tool", "content": result, "tool_call_id": call.id, "name": call.name}


def _shown(arguments: str) -> str:
    return _printable(json.dumps(json.loads(arguments), ensure_ascii=False))


def _printable(text: str) -> str:
    """With control characters escaped: they could make a terminal show another call."""
    return "".join(
        each if each.isprintable() or each == "\n" else f"\\u{ord(each):04x}" for each in text
    )


def _confirm(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        print()
        return False
