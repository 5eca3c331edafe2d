"""`quill chat`: a conversation at the terminal.

Knows: turns, what a person types, who must be asked. Does not know: templates, tokens.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quill.protos import generation_pb2 as pb
from quill.server.cli.generate import _options
from quill.server.cli.local_tools import LocalTool, load_tools
from quill.server.client.access import read_access
from quill.server.client.errors import CallError
from quill.server.client.requests import Options
from quill.server.client.sync_client import Client
from quill.server.errors import ServerError

Message = Mapping[str, Any]
CALL = "/call"
MAX_ROUNDS = 8  # of calls, before the person has a word again


def chat(args: argparse.Namespace) -> None:
    unshown = (args.num_sequences, args.logprobs, args.prompt_logprobs, args.echo or None)
    if any(value is not None for value in unshown):
        raise ServerError(
            "a chat shows one plain answer: leave out --num-sequences, --logprobs, "
            "--prompt-logprobs and --echo, or use `quill generate --chat`"
        )
    tools = {} if args.tools is None else load_tools(args.tools)
    history: list[Message] = []
    if args.system:
        history.append({"role": "system", "content": args.system})
    with Client(args.address, access=read_access(args)) as client:
        model = client.model()
        if not model.chat_template:
            raise ServerError(f"{model.name} has no chat template. Use `quill generate`")
        options = with_chat_defaults(_options(args), args.chat_sampling, model)
        print(f"Talking with {model.name}. Ctrl-C stops an answer, Ctrl-D ends the chat.")
        if tools:
            options["tools"] = [tool.json for tool in tools.values()]
            print(_about(tools, model))
        talk = _Talk(
            client, args.timeout, options, tools, "auto" if model.tool_call_format else "none"
        )
        while (words := _listen()) is not None:
            if words:
                history += talk.turn(history, words)


def with_chat_defaults(options: Options, chat_sampling: Options, model: pb.Model) -> Options:
    """With saner sampling than the wire's, which draws from all tokens: small models babble then.

    The author's own wishes go before, and the person's before those.
    """
    if model.defaults or "num_beams" in options:
        return options
    return {**chat_sampling, **options}


def _about(tools: Iterable[str], model: pb.Model) -> str:
    said = f"It may ask for {', '.join(tools)}; you are asked before anything runs."
    if model.tool_call_format:
        return f"{said} {CALL} WORDS makes it ask."
    return f"{said} Its template knows no tools, so it asks only when you say {CALL} WORDS."


def _listen() -> str | None:
    """What the person types; None at the end of the chat."""
    try:
        words = input("\n> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print("\n(Ctrl-D, or /quit, ends the chat)")
        return ""
    return None if words == "/quit" else words


@dataclass
class _Said:
    """An answer, as far as it came."""

    text: str = ""
    calls: dict[int, pb.ToolCall] = field(default_factory=dict)
    is_whole: bool = False

    def take(self, chunk: pb.GenerateChunk) -> None:
        self.text += chunk.text
        for piece in chunk.tool_calls:
            call = self.calls.setdefault(piece.index, pb.ToolCall(id=piece.id, name=piece.name))
            call.arguments += piece.arguments
        self.is_whole = chunk.finish_reason == pb.FINISH_REASON_EOS

    def message(self) -> Message:
        called = list(self.calls.values()) if self.is_whole else []
        return {"role": "assistant", "content": self.text, "tool_calls": called}


@dataclass(frozen=True)
class _Talk:
    client: Client
    timeout_s: float | None
    options: Options
    tools: Mapping[str, LocalTool]
    choice: str  # whether it may ask for a tool when nobody tells it to

    def turn(self, history: Sequence[Message], words: str) -> list[Message]:
        """What was said: by the person, by the model, and by tools between. Nothing if the server
        refused."""
        command, _, rest = words.partition(" ")
        is_call = bool(self.tools) and command == CALL
        said: list[Message] = [{"role": "user", "content": rest if is_call else words}]
        choice = "required" if is_call else self.choice
        for _ in range(MAX_ROUNDS):
            answer = self._answer([*history, *said], choice)
            if not answer.text and not (answer.calls and answer.is_whole):
                return said if len(said) > 1 else []
            said.append(answer.message())
            if not answer.calls or not answer.is_whole:
                break
            said += [self._done(call) for call in answer.calls.values()]
            choice = self.choice
        return said

    def _answer(self, messages: Sequence[Message], choice: str) -> _Said:
        """What was said until the end, or until Ctrl-C."""
        said = _Said()
        options: Options = {**self.options, "tool_choice": choice} if self.tools else self.options
        chunks = self.client.stream(messages, timeout_s=self.timeout_s, resume=True, **options)
        try:
            for chunk in chunks:
                said.take(chunk)
                print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            chunks.close()
            print(" [stopped]", end="")
        except CallError as error:
            print(f"[{error}]", end="")
        if said.calls and not said.is_whole:
            print("[its call was cut short]", end="")
        if said.text or not said.is_whole:
            print(flush=True)
        return said

    def _done(self, call: pb.ToolCall) -> Message:
        """What came of a call, if the person agreed to it."""
        print(f"{call.name}({_shown(call.arguments)})")
        result = "The person didn't want this to be run."
        if _agreed("Run it? [y/N] "):
            result = self.tools[call.name].run(call.arguments)
            print(_printable(result))
        return {"role": "tool", "content": result, "tool_call_id": call.id, "name": call.name}


def _shown(arguments: str) -> str:
    return _printable(json.dumps(json.loads(arguments), ensure_ascii=False))


def _printable(text: str) -> str:
    """Nothing that would make a terminal show something else than what is run."""
    return "".join(
        each if each.isprintable() or each == "\n" else f"\\u{ord(each):04x}" for each in text
    )


def _agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        print()
        return False
