"""`quill chat`: a conversation at the terminal.

Knows: turns, what a person types. Does not know: templates, tokens.
"""

import argparse
from collections.abc import Mapping, Sequence

from quill.protos import generation_pb2 as pb
from quill.server.cli.generate import _options
from quill.server.client.access import read_access
from quill.server.client.call_error import CallError
from quill.server.client.requests import Options
from quill.server.client.sync_client import Client
from quill.server.errors import ServerError


def chat(args: argparse.Namespace) -> None:
    unshown = (args.num_sequences, args.logprobs, args.prompt_logprobs, args.echo or None)
    if any(value is not None for value in unshown):
        raise ServerError(
            "a chat shows one plain answer: leave out --num-sequences, --logprobs, "
            "--prompt-logprobs and --echo, or use `quill generate --chat`"
        )
    history: list[Mapping[str, str]] = []
    if args.system:
        history.append({"role": "system", "content": args.system})
    with Client(args.address, access=read_access(args)) as client:
        model = client.model()
        if not model.chat_template:
            raise ServerError(f"{model.name} has no chat template. Use `quill generate`")
        options = with_chat_defaults(_options(args), args.chat_sampling, model)
        print(f"Talking with {model.name}. Ctrl-C stops an answer, Ctrl-D ends the chat.")
        while (words := _listen()) is not None:
            if words:
                asked = {"role": "user", "content": words}
                answer = _answer(client, [*history, asked], args.timeout, options)
                if answer:
                    history += [asked, {"role": "assistant", "content": answer}]


def with_chat_defaults(options: Options, chat_sampling: Options, model: pb.Model) -> Options:
    """With saner sampling than the wire's, which draws from all tokens: small models babble then.

    The author's own wishes go before, and the person's before those.
    """
    if model.defaults or "num_beams" in options:
        return options
    return {**chat_sampling, **options}


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


def _answer(
    client: Client,
    messages: Sequence[Mapping[str, str]],
    timeout_s: float | None,
    options: Options,
) -> str:
    """What was said until the end, or until Ctrl-C; nothing if the server refused."""
    pieces: list[str] = []
    chunks = client.stream(messages, timeout_s=timeout_s, resume=True, **options)
    try:
        for chunk in chunks:
            pieces.append(chunk.text)
            print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        chunks.close()
        print(" [stopped]", end="")
    except CallError as error:
        print(f"[{error}]", end="")
    print(flush=True)
    return "".join(pieces)
