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
    add_command,
    add_fields,
    add_option,
    address,
    addresses,
    natural,
    positive,
)
from quill.server.fields import EMBED, FILL_MASK, GENERATE
from quill.server.settings import seconds

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
    _add_encoder_commands(subparsers)
    _add_batch(subparsers)
    _add_keys(subparsers)
    _add_reload_and_health(subparsers)
    _add_top(subparsers)


def _add_generate(subparsers: Subparsers) -> None:
    parser = add_command(
        *(subparsers, "generate", "quill.server.cli.generate:generate", "client"),
        help="generate text on a running server",
        description="Generates the continuation of a prompt and prints it as it is generated.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads stdin")
    add_option(parser, "--chat", "send the prompt as a user's message of a chat")
    add_option(parser, "--json", "print the whole response as JSON, at the end")
    _add_call(parser)
    add_fields(parser, GENERATE.values())
    _add_constraint(parser)


def _add_chat(subparsers: Subparsers) -> None:
    sampling = ", ".join(f"{name} {value}" for name, value in CHAT_SAMPLING.items())
    parser = add_command(
        *(subparsers, "chat", "quill.server.cli.chat:chat", "client"),
        help="chat with a model on a running server",
        description="Chats with a model. Ctrl-C stops an answer; Ctrl-D or /quit ends the chat. If "
        f"neither you nor the model set how to sample, it is {sampling}.",
    )
    add_option(parser, "--system", "the system prompt", str, "TEXT")
    tools = (
        "functions that the model may call, with type hints and docstrings; they run on this "
        "machine, each call after you said yes. /call TEXT requires a call"
    )
    add_option(parser, "--tools", tools, str, "FILE.py")
    _add_call(parser)
    add_fields(parser, CHAT_FIELDS)
    _add_constraint(parser)


def _add_constraint(parser: argparse.ArgumentParser) -> None:
    title = parser.add_argument_group("structured output")
    group = title.add_mutually_exclusive_group()
    add_option(group, "--json-schema", "the answer is JSON of the schema in this file", str, "FILE")
    add_option(group, "--json-object", "the answer is a JSON object")
    add_option(group, "--regex", "the whole answer matches this regex", str, "REGEX")
    choice = "the answer is one of these; may be given several times"
    add_option(group, "--choice", choice, str, "TEXT", action="append")
    grammar = "the answer matches the grammar in this file (Lark, GBNF)"
    add_option(group, "--grammar", grammar, str, "FILE")


def _add_encoder_commands(subparsers: Subparsers) -> None:
    embed = add_command(
        *(subparsers, "embed", "quill.server.cli.embed:embed", "serve"),
        help="compute embeddings of texts on a running server",
        description="Prints an embedding for each text, one a line, or writes them to a file.",
    )
    embed.add_argument("texts", nargs="*", metavar="TEXT", help="- reads stdin, one text a line")
    out = "write embeddings as .npy; with --compare a .png"
    add_option(embed, "--out", out, Path, "FILE")
    plot = "plot the similarity of this word's embeddings in the TEXTs (default: with apple)"
    add_option(embed, "--compare", plot, str, "WORD")
    fill_mask = add_command(
        *(subparsers, "fill-mask", "quill.server.cli.embed:fill_mask", "serve"),
        help="predict masked tokens on a running server",
        description="Prints the most likely tokens for each mask token of a text.",
    )
    text = 'such as "The [MASK] of the union"; - reads stdin'
    fill_mask.add_argument("text", metavar="TEXT", help=text)
    for parser, fields in ((embed, list(EMBED.values())), (fill_mask, [FILL_MASK["top_k"]])):
        add_option(parser, "--json", "print the whole response as JSON")
        _add_call(parser)
        add_fields(parser, fields)


def _add_call(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--timeout", "the deadline (default: none)", float, "SECONDS")
    add_address(parser, many=True)


def _add_batch(subparsers: Subparsers) -> None:
    parser = add_command(
        *(subparsers, "batch", "quill.server.client.tools.batch:batch", "client"),
        help="answer a file of requests on running servers",
        description="Answers every line of a file, in order, and resumes where it was stopped if "
        "it is started again. A line is a JSON object with prompt, messages or input, and options "
        "by the names of generation.proto, or a line of OpenAI's batch files. A line without a "
        "seed gets one by its number, so the same file has the same answers. The exit code is 4 if "
        "lines failed.",
    )
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="a JSON object a line")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="an answer a line")
    add_address(parser, many=True)
    http = "the servers' HTTP ports, for lines of OpenAI's files (default: gRPC port + 2)"
    add_option(parser, "--http", http, address, "HOST:PORT", action="append")
    at_once = "how many lines are requested at once, on all servers together"
    add_option(parser, "--concurrency", at_once, positive, "N", 32)
    add_option(parser, "--seed", "changes the seeds of lines that have none", natural, "N", 0)
    wait = "how long to wait while no server answers"
    add_option(parser, "--unavailable-timeout", wait, seconds, "SECONDS", 300.0)
    deadline = "the deadline of a line (default: none)"
    add_option(parser, "--timeout", deadline, seconds, "SECONDS")


def _add_top(subparsers: Subparsers) -> None:
    parser = add_command(
        *(subparsers, "top", "quill.server.client.tools.top:top", "client"),
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
    add_option(parser, "--interval", "between updates", seconds, "SECONDS", 1.0)
    once = "print one table and exit; the exit code is 1 if no server serves"
    add_option(parser, "--once", once)
    add_access(parser)
    parser.set_defaults(default_address=ADDRESS)


def _add_reload_and_health(subparsers: Subparsers) -> None:
    reload = add_command(
        *(subparsers, "reload", "quill.server.cli.operator:reload", "serve"),
        help="make a server load its bundle again, without a pause",
        description="Makes a running server load its bundle again. Needs an admin's API key; "
        "without API keys send the server SIGHUP instead.",
    )
    health = add_command(
        *(subparsers, "health", "quill.server.cli.operator:health", "serve"),
        help="check whether a server serves",
        description="Checks whether a server serves. The exit code is 0 if so, else 1.",
    )
    for parser, default in ((reload, "none"), (health, "5")):
        add_address(parser)
        add_option(parser, "--timeout", f"default: {default}", seconds, "SECONDS")


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
        run, about = f"quill.server.cli.operator:{action}_keys", f"{text.capitalize()}."
        each = add_command(actions, action, run, "serve", help=text, description=about)
        each.add_argument("file", type=Path, metavar="FILE", help="as for `quill serve --api-keys`")
        if action != "list":
            each.add_argument("name", metavar="NAME", help="the client's name, as in the logs")
        if action == "add":
            _add_quotas(each)


def _add_quotas(parser: argparse.ArgumentParser) -> None:
    burst = f"a burst of {BURST_S:g} seconds' worth is allowed, and always one"
    delay = "a call that exceeds it delays the next ones"
    for flag, text in (
        ("--requests-per-minute", f"on average; {burst} (default: no limit)"),
        ("--max-concurrent", "calls that run or wait at the same time (default: no limit)"),
        ("--tokens-per-minute", f"of prompts and answers, on average; {delay} (default: no limit)"),
        ("--max-prompt-tokens", "of one call (default: the context length)"),
    ):
        add_option(parser, flag, text, positive, "N")
    add_option(parser, "--admin", "may reload the bundle")
