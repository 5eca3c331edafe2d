"""The subcommands of model and their arguments.

Imports nothing heavy: `--help` must answer at once, with no torch loaded.
"""

from pathlib import Path

from quill.command_table import Command, Option, Subparsers, add_commands
from quill.model.sources.kinds import HELP

_DEVICE = Option("--device", None, None, str, "auto", {"choices": ("auto", "cpu", "cuda")})
_DATA = (
    "data",
    Option("--corpus", "sotu, en-de, en-es, en-fr or kjv-web", "NAME", str),
    Option(
        "--text", "your own text files, or directories of *.txt", "FILE", Path, None, {"nargs": "+"}
    ),
    Option("--pairs", "your own pairs: source, tab, target on a line", "TSV", Path),
)
_TRAIN = (
    Option("--preset", "the shape and its recipe (default tiny)", "NAME", str),
    Option("--out", "where the run goes", "RUN", Path),
    Option(
        "--resume",
        "continue a run as it was begun; with --steps it gets another number of steps in all, and "
        "the learning rate's curve is laid over that many",
        "RUN",
        Path,
    ),
    _DEVICE,
    *_DATA,
    "shape",
    Option("--vocab-size", "tokens in the vocabulary", "N"),
    Option("--context", "the longest sequence, in tokens", "N"),
    Option("--dropout", None, "P", float),
    "recipe",
    Option("--steps", "in total, also of a resumed run", "N"),
    Option("--batch-tokens", "in one step, overall", "N"),
    Option("--micro-batches", "micro-batches of a batch (gradient accumulation)", "N"),
    Option("--learning-rate", "the peak", "R", float),
    Option("--schedule", more={"choices": ("cosine", "inverse_sqrt")}),
    Option("--warmup", "steps up to the peak", "N"),
    Option("--weight-decay", "on matrices only", "R", float),
    Option("--clip", "the largest gradient norm", "R", float),
    Option("--label-smoothing", None, "P", float),
    Option("--seed", None, "N"),
    Option("--evaluate-every", "steps between evaluations", "N"),
    Option("--save-every", "steps between checkpoints", "N"),
    Option("--keep", "how many checkpoints to keep", "N"),
)
_EVAL = (
    Option("checkpoint?", f"{HELP}; but no bundle", "SOURCE", str),
    _DEVICE,
    Option("--limit", "only the first N pairs, or items of each task", "N"),
    "held-out data",
    Option(
        "--stride",
        "tokens scored in each window; the rest is context (default: half the context)",
        "N",
    ),
    Option("--part", "of the pairs", None, str, "test", {"choices": ("held-out", "test")}),
    Option("--beams", "1 is greedy only", "N", int, 4),
    Option(
        "--answers",
        "write each pair's translations there, for `quill bench reference`",
        "FILE",
        Path,
    ),
    *_DATA,
    "benchmarks",
    Option(
        "--tasks",
        "hellaswag, piqa, arc_easy, arc_challenge, winogrande, boolq, lambada, gsm8k, humaneval, "
        "mbpp, bfcl (bfcl_simple, bfcl_multiple, bfcl_parallel), with commas between them",
        "LIST",
        str,
    ),
    Option(
        "--server",
        "evaluate a server: HOST:PORT of Quill's gRPC, or http://HOST:PORT/v1 of any server with "
        "OpenAI's protocol",
        "ADDRESS",
        str,
    ),
    Option("--shots", "examples before each question (default: 0; of gsm8k 8)", "K"),
    Option("--chat", "send prompts as a user's message, with the model's chat template"),
    Option("--max-new-tokens", "of an answer", "N", int, 512),
    Option("--temperature", "0 is greedy", "T", float, 0.0),
    Option("--samples", "answers to each item, with seeds one after another", "N", int, 1),
    Option("--seed", None, "N", int, 0),
    Option(
        "--tool-choice",
        "of bfcl; required for chat templates that know no tools",
        None,
        str,
        "auto",
        {"choices": ("auto", "required")},
    ),
    Option(
        "--allow-code-execution",
        "run the programs that the model writes on this machine, in a sandbox",
    ),
    Option("--data", "your own items: TASK.jsonl, an item a line", "DIR", Path),
    Option("--out", "where results and answers go (default evals/TIME)", "DIR", Path),
    Option("--concurrency", "requests at a time, to a server", "N", int, 8),
    Option("--model", "by OpenAI's protocol (default: the server's first)", "NAME", str),
    Option("--api-key-file", "a file with the API key (default: $QUILL_API_KEY)", "FILE", Path),
    Option("--tls", "gRPC: use TLS and trust this machine's authorities"),
    Option("--ca", "use TLS and trust this certificate authority", "PEM", Path),
)
_IMPORT = (
    Option(
        "source",
        "a Hugging Face directory, a GGUF file, a name of `quill models`, or hf:ORG/NAME of a hub",
        "SOURCE",
        str,
    ),
    Option(
        "--out",
        "where the checkpoint goes (default for a model by name or of a hub: Quill's cache)",
        "DIR",
        Path,
    ),
    Option("--force", "replace an import that is there"),
)
_ATTENTION = (
    Option("text", "the input", "TEXT", str),
    Option("--checkpoint", HELP, "SOURCE", str, None, {"required": True}),
    Option("--target", "seq2seq: the translation (default: the model's own)", "TEXT", str),
    Option("--layers", "like 0,5, or all (default: four from first to last)", "LIST", str),
    Option("--heads", "like 0,5", "LIST", str, "all"),
    Option(
        "--out",
        "where the picture goes, or the numbers if it ends in .json",
        "PNG",
        Path,
        Path("attention.png"),
    ),
)

COMMANDS = (
    Command(
        "train",
        "quill.model.training.train:run",
        "train a Transformer",
        _TRAIN,
        "Trains a network and leaves checkpoints, a log and a loss curve in --out. Options that "
        "aren't given come from the preset's recipe. For several processes: torchrun "
        "--nproc-per-node N -m quill train ...",
        "train",
    ),
    Command(
        "eval",
        "quill.model.benchmarks.benchmark:run",
        "score a model on benchmarks or held-out text",
        _EVAL,
        "With --tasks: benchmarks, on a checkpoint or a server. Without: perplexity and bits per "
        "byte for a causal model; an encoder's accuracy on masked tokens; BLEU and chrF for a "
        "seq2seq model, next to copying the source.",
        "export",
    ),
    Command(
        "import",
        "quill.model.importers.import_weights:run",
        "import a GGUF file or a Hugging Face model",
        _IMPORT,
        "Turns a GGUF file or a Hugging Face directory into a checkpoint, for training and "
        "looking into it. To serve a model no import is needed: quill serve SOURCE.",
        "train",
    ),
    Command(
        "attention",
        "quill.model.evaluation.attention_maps:run",
        "plot attention maps",
        _ATTENTION,
        "Plots a network's attention maps for a text, one for each layer and head; for a seq2seq "
        "model the cross-attention from target to source.",
        "train",
    ),
    Command(
        "average",
        "quill.model.checkpoint.averaging:run",
        "the mean of a run's last checkpoints",
        (
            Option("run_directory", "the --out of train", "RUN", Path),
            Option("--last", "how many", "N", int, 5),
            Option("--out", None, "CHECKPOINT", Path, None, {"required": True}),
        ),
        "Writes a checkpoint whose weights are the mean of a run's last ones: the paper's way to "
        "end a run. Train with --keep to have several.",
        "train",
    ),
)


def register(subparsers: Subparsers) -> None:
    """Adds the subcommands to the command line."""
    add_commands(subparsers, COMMANDS)
