"""The commands that call a server, and those for its operators, with their arguments.

Knows: argparse. Does not know: requests. Imports nothing heavy: `--help` must answer at once.
"""

import argparse
from pathlib import Path

from quill.server.auth.caller import BURST_S
from quill.server.cli.arguments import (
    ADDRESS,
    SEVERAL,
    Subparsers,
    add_access,
    add_address,
    add_fields,
    address,
    addresses,
    natural,
    positive,
    seconds,
)
from quill.server.fields import EMBED, FILL_MASK, GENERATE

# Of three settings these gave the best conversations with SmolLM2-135M: a higher temperature gave
# nonsense, a lower one repetitions.
CHAT_SAMPLING = {"temperature": 0.4, "top_p": 0.9, "repetition_penalty": 1.1}
# A chat shows one plain answer.
CHAT_FIELDS = tuple(
    field
    for field in GENERATE.values()
    if field.name not in ("num_sequences", "logprobs", "prompt_logprobs", "echo")
)


def add_client_commands(subparsers: Subparsers) -> None:
    _add_generate(subparsers)
    _add_chat(subparsers)
    _add_embed(subparsers)
    _add_fill_mask(subparsers)
    _add_batch(subparsers)
    _add_keys(subparsers)
    _add_reload(subparsers)
    _add_health(subparsers)
    _add_top(subparsers)


def _add_generate(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="generate text on a running server",
        description="Generates the continuation of a prompt and prints it as it is generated.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads stdin")
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message of a chat"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the whole response as JSON, at the end"
    )
    _add_call(parser)
    add_fields(parser, GENERATE.values())
    _add_constraint(parser)
    parser.set_defaults(run="quill.server.cli.generate:generate", extra="client")


def _add_chat(subparsers: Subparsers) -> None:
    sampling = ", ".join(f"{name} {value}" for name, value in CHAT_SAMPLING.items())
    parser = subparsers.add_parser(
        "chat",
        help="chat with a model on a running server",
        description="Chats with a model. Ctrl-C stops an answer; Ctrl-D or /quit ends the chat. If "
        f"neither you nor the model set how to sample, it is {sampling}.",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "--tools",
        metavar="FILE.py",
        help="functions that the model may call, with type hints and docstrings; they run on this "
        "machine, each call after you said yes. /call TEXT requires a call",
    )
    _add_call(parser)
    add_fields(parser, CHAT_FIELDS)
    _add_constraint(parser)
    parser.set_defaults(run="quill.server.cli.chat:chat", extra="client")


def _add_constraint(parser: argparse.ArgumentParser) -> None:
    title = parser.add_argument_group("structured output")
    group = title.add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema", metavar="FILE", help="the answer is JSON of the schema in this file"
    )
    group.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    group.add_argument("--regex", metavar="REGEX", help="the whole answer matches this regex")
    group.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help="the answer is one of these; may be given several times",
    )
    group.add_argument(
        "--grammar", metavar="FILE", help="the answer matches the grammar in this file (Lark, GBNF)"
    )


def _add_embed(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "embed",
        help="compute embeddings of texts on a running server",
        description="Prints an embedding for each text, one a line, or writes them to a file.",
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="- reads stdin, one text a line")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write embeddings as .npy; with --compare a .png"
    )
    parser.add_argument(
        "--compare",
        metavar="WORD",
        help="instead, plot the similarity of this word's embeddings in several sentences",
    )
    parser.add_argument(
        "--sentences",
        type=Path,
        metavar="FILE",
        help="with --compare: one sentence a line (default: the TEXTs, or examples with apple)",
    )
    parser.add_argument("--json", action="store_true", help="print the whole response as JSON")
    _add_call(parser)
    add_fields(parser, EMBED.values())
    parser.set_defaults(run="quill.server.cli.embed:embed", extra="serve")


def _add_fill_mask(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "fill-mask",
        help="predict masked tokens on a running server",
        description="Prints the most likely tokens for each mask token of a text.",
    )
    parser.add_argument(
        "text", metavar="TEXT", help='such as "The [MASK] of the union"; - reads stdin'
    )
    parser.add_argument("--json", action="store_true", help="print the whole response as JSON")
    _add_call(parser)
    add_fields(parser, [FILL_MASK["top_k"]])
    parser.set_defaults(run="quill.server.cli.embed:fill_mask", extra="serve")


def _add_call(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="the deadline (default: none)"
    )
    add_address(parser, many=True)


def _add_batch(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "batch",
        help="answer a file of requests on running servers",
        description="Answers every line of a file, in order, and resumes where it was stopped if "
        "it is started again. A line is a JSON object with prompt, messages or input, and options "
        "by the names of generation.proto, or a line of OpenAI's batch files. A line without a "
        "seed gets one by its number, so the same file has the same answers. The exit code is 4 if "
        "lines failed.",
    )
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="a JSON object a line")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="an answer a line")
    parser.add_argument(
        "--address",
        action="append",
        type=addresses,
        metavar="HOST:PORT",
        help=f"may be given several times, or {SEVERAL}, for servers of the same model "
        f"(default {ADDRESS})",
    )
    parser.add_argument(
        "--http",
        action="append",
        type=address,
        metavar="HOST:PORT",
        help="the servers' HTTP ports, for lines of OpenAI's files (default: gRPC port + 2)",
    )
    add_access(parser)
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=32,
        metavar="N",
        help="how many lines are requested at once, on all servers together (default 32)",
    )
    parser.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="changes the seeds of lines that have none (default 0)",
    )
    parser.add_argument(
        "--unavailable-timeout",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait while no server answers (default 300)",
    )
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help="the deadline of a line (default: none)"
    )
    run = "quill.server.client.tools.batch:batch"
    parser.set_defaults(run=run, extra="client", default_address=ADDRESS)


def _add_top(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch the metrics of running servers in the terminal",
        description="Shows the metrics of servers: health, sequences running, requests waiting, "
        "tokens/s, time to first token (TTFT) and inter-token latency (ITL) as median / p95, KV "
        "cache usage, prefix cache hit rate and accepted draft tokens.",
    )
    parser.add_argument(
        "addresses",
        nargs="*",
        type=addresses,
        metavar="HOST:PORT",
        help="a server's metrics or HTTP port, or its gRPC port if the metrics are at the next "
        f"one; {SEVERAL}, which is resolved again each time (default {ADDRESS})",
    )
    parser.add_argument(
        "--interval",
        type=seconds,
        default=1.0,
        metavar="SECONDS",
        help="between updates (default 1)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one table and exit; the exit code is 1 if no server serves",
    )
    add_access(parser)
    run = "quill.server.client.tools.top:top"
    parser.set_defaults(run=run, extra="client", default_address=ADDRESS)


def _add_reload(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "reload",
        help="make a server load its bundle again, without a pause",
        description="Makes a running server load its bundle again. Needs an admin's API key; "
        "without API keys send the server SIGHUP instead.",
    )
    add_address(parser)
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="default: none")
    parser.set_defaults(run="quill.server.cli.operator:reload", extra="serve")


def _add_health(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "health",
        help="check whether a server serves",
        description="Checks whether a server serves. The exit code is 0 if so, else 1.",
    )
    add_address(parser)
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="default: 5")
    parser.set_defaults(run="quill.server.cli.operator:health", extra="serve")


def _add_keys(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "keys",
        help="add, list and revoke the API keys of a server",
        description="Adds, lists and revokes API keys. A running server reads the file again by "
        "itself.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for action, text in (
        ("add", "add a key and print it"),
        ("list", "list names and quotas"),
        ("revoke", "reject a key from now on"),
    ):
        each = actions.add_parser(action, help=text, description=f"{text.capitalize()}.")
        each.add_argument("file", type=Path, metavar="FILE", help="as for `quill serve --api-keys`")
        if action != "list":
            each.add_argument("name", metavar="NAME", help="the client's name, as in the logs")
        if action == "add":
            _add_quotas(each)
        each.set_defaults(run=f"quill.server.cli.operator:{action}_keys", extra="serve")


def _add_quotas(parser: argparse.ArgumentParser) -> None:
    for flag, text in (
        (
            "--requests-per-minute",
            f"on average; a burst of {BURST_S:g} seconds' worth is allowed, and always one "
            "(default: no limit)",
        ),
        ("--max-concurrent", "calls that run or wait at the same time (default: no limit)"),
        (
            "--tokens-per-minute",
            "of prompts and answers, on average; a call that exceeds it delays the next ones "
            "(default: no limit)",
        ),
        ("--max-prompt-tokens", "of one call (default: the context length)"),
    ):
        parser.add_argument(flag, type=positive, metavar="N", help=text)
    parser.add_argument("--admin", action="store_true", help="may reload the bundle")
