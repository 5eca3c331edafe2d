"""`quill generate` and `quill chat`: a model in the terminal.

Knows: terminals, the client. Does not know: gRPC.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from google.protobuf.json_format import MessageToJson

from quill.protos import generation_pb2 as pb
from quill.server.client.access import read_access
from quill.server.client.errors import CallError
from quill.server.client.requests import Options, Prompt
from quill.server.client.sync_client import Client
from quill.server.errors import ServerError

_OPTIONS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "seed", "num_sequences", "logprobs"),
    *(
        "min_new_tokens",
        "prompt_logprobs",
        "priority",
        "stop",
        "ignore_eos",
        "echo",
        "length_penalty",
    ),
)
NOTE_TIMEOUT_S = 1.0
_EARLY_STOPPING = {
    "at-once": pb.EARLY_STOPPING_AT_ONCE,
    "never": pb.EARLY_STOPPING_NEVER,
}


def generate(args: argparse.Namespace) -> None:
    if not args.json and (args.logprobs is not None or args.prompt_logprobs is not None):
        raise ServerError("--logprobs and --prompt-logprobs are shown by --json alone: add it")
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt: Prompt = [{"role": "user", "content": text}] if args.chat else text
    options = _options(args)
    with Client(args.address, access=read_access(args)) as client:
        if args.json or options.get("num_sequences", 1) > 1:
            answer = client.generate(prompt, timeout_s=args.timeout, **options)
            _show_whole(answer, args.json)
            seed = answer.seed
            if _are_greedy(answer, options, client):
                _tell_of_greed(len(answer.sequences))
                return
        else:
            seed = _show(client.stream(prompt, timeout_s=args.timeout, resume=True, **options))
    drawn = "seed" not in options and "num_beams" not in options and not args.json
    if drawn and sys.stderr.isatty():
        print(f"(--seed {seed} gives this answer again)", file=sys.stderr)


def _options(args: argparse.Namespace) -> Options:
    given = {name: getattr(args, name) for name in _OPTIONS}
    given["stop_token_ids"] = args.stop_token_id
    given["num_beams"] = args.beams
    given["early_stopping"] = _EARLY_STOPPING.get(args.early_stopping)
    given["logit_bias"] = dict(args.logit_bias or ())
    given["constraint"] = _constraint(args)
    # What wasn't given is left out: then the model's own default applies.
    said = {name: value for name, value in given.items() if value not in (None, {})}
    return cast("Options", said)


def _constraint(args: argparse.Namespace) -> pb.Constraint | None:
    if args.json_schema is not None:
        return pb.Constraint(json_schema=_read(args.json_schema))
    if args.grammar is not None:
        return pb.Constraint(lark=_read(args.grammar))
    if args.regex is not None:
        return pb.Constraint(regex=args.regex)
    if args.choice:
        return pb.Constraint(choice=pb.Choice(choices=args.choice))
    return pb.Constraint(json_object=True) if args.json_object else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"{path} can't be read: {error}") from error


def _show(chunks: Iterable[pb.GenerateChunk]) -> int:
    """Prints an answer as it comes; returns its seed. What follows has a line of its own, also
    after half an answer."""
    chunk = None
    try:
        for chunk in chunks:
            print(chunk.text, end="", flush=True)
    finally:
        if chunk is not None:
            print(flush=True)
    if chunk is not None and chunk.finish_reason == pb.FINISH_REASON_DEADLINE:
        print("(cut off by --timeout)", file=sys.stderr)
    return 0 if chunk is None else chunk.seed


def _show_whole(answer: pb.GenerateResponse, as_json: bool) -> None:
    if as_json:
        print(MessageToJson(answer, preserving_proto_field_name=True, ensure_ascii=False))
        return
    for number, sequence in enumerate(answer.sequences):
        score = f"({sequence.score:.4f}) " if sequence.HasField("score") else ""
        print(f"[{number}] {score}{sequence.text}")


def _are_greedy(answer: pb.GenerateResponse, options: Options, client: Client) -> bool:
    """Whether the answers are the same one several times, because nothing was drawn."""
    texts = {tuple(sequence.token_ids) for sequence in answer.sequences}
    if len(answer.sequences) == 1 or len(texts) > 1 or options.get("num_beams", 1) > 1:
        return False
    if "temperature" in options:
        return options["temperature"] == 0
    try:
        return client.model(timeout_s=NOTE_TIMEOUT_S).defaults.get("temperature", 1.0) == 0
    except CallError:  # the answers are there: a note isn't worth an error
        return False


def _tell_of_greed(num_answers: int) -> None:
    print(
        f"(the {num_answers} answers are equal: at temperature 0 the likeliest token is always "
        f"taken. --temperature 0.8 draws different ones, --beams {num_answers} searches for them)",
        file=sys.stderr,
    )
