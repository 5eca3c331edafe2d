"""`quill generate`: a model's text in the terminal.

Knows: terminals, the client. Does not know: gRPC.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from google.protobuf.json_format import MessageToJson

from quill.protos import generation_pb2 as pb
from quill.server.cli.arguments import given_fields
from quill.server.client.access import read_access
from quill.server.client.errors import CallError
from quill.server.client.requests import Options, Prompt
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from quill.server.errors import ServerError
from quill.server.fields import GENERATE

NOTE_TIMEOUT_S = 1.0


def generate(args: argparse.Namespace) -> None:
    if not args.json and (args.logprobs is not None or args.prompt_logprobs is not None):
        raise ServerError("--logprobs and --prompt-logprobs are printed with --json alone: add it")
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt: Prompt = [{"role": "user", "content": text}] if args.chat else text
    options = read_options(args)
    with open_client(args) as client:
        if args.json or options.get("num_sequences", 1) > 1:
            answer = client.generate(prompt, timeout_s=args.timeout, **options)
            _show_whole(answer, args.json)
            seed = answer.seed
            if _are_greedy(answer, options, client):
                _note_greedy(len(answer.sequences))
                return
        else:
            seed = _show(client.stream(prompt, timeout_s=args.timeout, resume=True, **options))
    is_random = "seed" not in options and "num_beams" not in options and not args.json
    if is_random and sys.stderr.isatty():
        print(f"(--seed {seed} gives this answer again)", file=sys.stderr)


def open_client(args: argparse.Namespace) -> Client:
    """A command whose server was never reached fails at once; one whose server goes away waits."""
    return Client(args.address, Retries(retry_connect=False), access=read_access(args))


def read_options(args: argparse.Namespace) -> Options:
    given = given_fields(args, GENERATE.values())
    constraint = _constraint(args)
    if constraint is not None:
        given["constraint"] = constraint
    return cast("Options", given)


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
    """Prints an answer as it is generated; returns its seed. The line is ended also if the stream
    breaks."""
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
    """Whether the answers are equal because sampling was greedy."""
    texts = {tuple(sequence.token_ids) for sequence in answer.sequences}
    if len(answer.sequences) == 1 or len(texts) > 1 or options.get("num_beams", 1) > 1:
        return False
    if "temperature" in options:
        return options["temperature"] == 0
    try:
        return client.model(timeout_s=NOTE_TIMEOUT_S).defaults.get("temperature", 1.0) == 0
    except CallError:  # a note isn't worth an error
        return False


def _note_greedy(num_answers: int) -> None:
    print(
        f"(the {num_answers} answers are equal: at temperature 0 sampling is greedy. --temperature "
        f"0.8 samples different ones, --beams {num_answers} finds them by beam search)",
        file=sys.stderr,
    )
