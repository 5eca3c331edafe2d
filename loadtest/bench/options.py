"""The arguments of `quill bench`. Imports nothing heavy: `--help` must answer at once.

A command is an entry of COMMANDS; its function is in quill.loadtest.bench.
"""

from pathlib import Path

from quill.command_table import Command, Option, Subparsers, add_commands
from quill.model.sources.catalogue import DEFAULT
from quill.model.sources.kinds import HELP
from quill.server.cli.arguments import address, natural, positive

BUNDLE = Option("bundle?", f"{HELP} (default: {DEFAULT})", "SOURCE", str)
THREADS = Option("--threads", "default: one a core", "N", positive)
PRECISIONS = Option("--precision", "with commas; default: all of the bundle's", "NAMES", str)
PRECISION = Option("--precision", "default: the server's choice", "NAME", str)
FP32 = Option("--precision", "with commas", "NAMES", str, "fp32")
OUT = Option("--out", "write the results there, too", "DIRECTORY", Path)
AGAINST = Option(
    "--against",
    "another checkout of Quill with its own .venv, in turns; may be given several times",
    "DIRECTORY",
    Path,
    None,
    {"action": "append", "default": []},
)
ANSWER = Option("--answer", "of each answer", "TOKENS", positive, 64)


def rounds(usual: int) -> Option:
    return Option("--rounds", "the best counts", "N", positive, usual)


def users(usual: int) -> Option:
    return Option("--users", "concurrent clients", "N", positive, usual)


def duration(usual: float) -> Option:
    return Option("--duration", "of a round", "SECONDS", float, usual)


COMMANDS = (
    Command(
        "engine",
        "engine:run_engine",
        "prefill and decode steps, without a network",
        (
            *(BUNDLE, THREADS, PRECISIONS, OUT, rounds(5), AGAINST),
            Option("--long", "prompts of up to 8,000 tokens instead"),
        ),
    ),
    Command(
        "peers",
        "contest:run_peers",
        "the same beside other programs, with the best of them at equal quality",
        (
            *(BUNDLE, THREADS, PRECISIONS, OUT, rounds(5)),
            Option("--passages", "of 255 tokens each, for quality", "N", positive, 8),
            Option("--peers", "with commas; default: all", "NAMES", str),
            Option("--resume", "what --out has of this commit isn't measured again"),
        ),
        "The model must be a GGUF file of `quill models`. Programs that aren't there are skipped: "
        "`make peers` and `make peers-vllm` install them.",
    ),
    Command(
        "speculative",
        "engine:run_speculative",
        "the speed-up of one sequence by speculative decoding (prompt lookup)",
        (BUNDLE, THREADS, PRECISION, OUT, rounds(3)),
    ),
    Command(
        "structured",
        "structured:run",
        "structured output: valid, the same alone, as fast as unconstrained; adversarial schemas",
        (
            *(BUNDLE, THREADS, PRECISION, OUT, rounds(3)),
            Option("--seeds", "of each of fifty schemas", "N", positive, 20),
            Option("--alone", "requests that are sent again, alone", "N", natural, 500),
            Option("--parts", "with commas", "NAMES", str, "answers,speed,adversarial"),
        ),
    ),
    Command(
        "server",
        "server:run_server",
        "closed-loop users that stream, and peak memory",
        (
            *(BUNDLE, THREADS, PRECISION, OUT, rounds(3), users(32), duration(20.0), ANSWER),
            Option("--context", "of a request, without the shared prefix", "TOKENS", positive, 256),
            Option("--shared-prefix", "that all prompts begin with", "TOKENS", natural, 0),
            Option("--temperature", "0 is greedy", "T", float, 0.0),
            Option("--protocols", "also over HTTP and KServe v2, in turns"),
            Option("--peers", "also llama.cpp's llama-server, in turns. Needs `make peers`"),
            AGAINST,
            Option(
                "--beside",
                "a Quill of any version that runs there already; may be given several times",
                "ADDRESS",
                address,
                None,
                {"action": "append", "default": []},
            ),
        ),
    ),
    Command(
        "streams",
        "server:run_streams",
        "gRPC against the bare engine, sampling, gaps, cancellation",
        (
            *(BUNDLE, THREADS, PRECISION, OUT, rounds(3)),
            Option("--streams", "concurrent", "N", positive, 32),
            Option("--long-prompt", "that is read beside streams", "TOKENS", positive, 4000),
        ),
    ),
    Command(
        "restart",
        "restart:run_restart",
        "first tokens after a restart with --prefix-cache-dir; gaps of streams beside",
        (
            *(BUNDLE, THREADS, PRECISION, OUT),
            Option("--prompts", "one after another, on each of four servers", "N", positive, 100),
            Option("--prompt-tokens", "of each", "TOKENS", positive, 2000),
            Option("--answer", "of each answer", "TOKENS", positive, 16),
        ),
        "The directory is a temporary one, as large as the prompts' KV caches.",
    ),
    Command(
        "cluster",
        "server:run_cluster",
        "replicas on Ray against as many plain servers, in turns",
        (
            *(BUNDLE, THREADS, OUT, rounds(3), users(16), duration(10.0), ANSWER),
            Option("--replicas", "of each side", "N", positive, 2),
        ),
        "Needs the extra cluster.",
        "cluster",
    ),
    Command(
        "translate",
        "translate:run_translate",
        "a translation model, greedy and with beams, also beside CTranslate2",
        (
            Option("bundle", "of a translation model, as `quill serve` takes it", "SOURCE", str),
            Option("sources", "a sentence a line", "FILE", Path),
            Option(
                "--checkpoint",
                "that the bundle was exported from: CTranslate2 gets its weights",
                "DIR",
                Path,
            ),
            Option("--peers-python", "default: that of `make peers`", "PYTHON", Path),
            *(FP32, THREADS, OUT, rounds(5)),
            Option("--limit", "sources at most", "N", positive, 200),
        ),
    ),
    Command(
        "embed",
        "translate:run_embed",
        "an encoder's embeddings, beside padded batches and transformers",
        (
            Option("bundle", "of an encoder, as `quill serve` takes it", "SOURCE", str),
            Option("--texts", "a text a line (default: random ones)", "FILE", Path),
            Option(
                "--transformers",
                "the Hugging Face directory that the bundle came from: one text after another",
                "DIR",
                Path,
            ),
            Option("--batch", "of the padded batches", "N", positive, 32),
            *(FP32, THREADS, OUT, rounds(3)),
            Option("--limit", "texts at most", "N", positive, 1000),
        ),
    ),
    Command(
        "reference",
        "translate:run_reference",
        "a served translation model against PyTorch, line by line, with BLEU",
        (
            Option("bundle", "of a translation model, as `quill serve` takes it", "SOURCE", str),
            Option("answers", "of `quill eval --answers`", "FILE", Path),
            *(users(16), FP32),
            Option("--limit", "the first N lines only", "N", positive),
        ),
        "Sends what `quill eval RUN --answers FILE` had answered by PyTorch, and compares every "
        "token. With fp32 a difference is an error.",
        "train",
    ),
)


def add_bench(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure speed, quality and memory, also of other programs",
        description="Measures backends in turns: tokens a second, beside quality and memory.",
    )
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    for command in COMMANDS:
        run, extra = f"quill.loadtest.bench.{command.run}", command.extra or "loadtest"
        add_commands(kinds, [command._replace(run=run, extra=extra)])
