"""`quill train`: from arguments, or from a run to be resumed, to a finished run.

Knows: the arguments and run.json. Does not know: how training works (model/training/run.py).
"""

import argparse
import dataclasses
import functools
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quill.json_records import RecordError, from_json
from quill.model.checkpoint.checkpoint import Checkpoint, check_weights, load_checkpoint
from quill.model.checkpoint.run_directory import (
    TrainingState,
    check_no_run,
    clean_leftovers,
    load_state,
    not_a_run,
    read_run,
    read_source,
    step_directories,
    write_run,
)
from quill.model.data.source import DataSource, choose_source
from quill.model.data.tokenizer import Tokenizer
from quill.model.errors import CheckpointError, ConfigError, InterruptedWorkError
from quill.model.network.config import ModelConfig
from quill.model.network.network import Network
from quill.model.network.networks import make_network
from quill.model.network.presets import preset
from quill.model.progress import track
from quill.model.training.allocator import keep_freed_memory
from quill.model.training.distributed import Peers, join_peers
from quill.model.training.recipes import RECIPES, Recipe
from quill.model.training.run import Outcome, Run
from quill.model.training.task import Task, load_task
from quill.model.training.trainer import Trainer

RECIPE_ARGUMENTS = {
    "steps": "num_steps",
    "batch_tokens": "batch_tokens",
    "micro_batches": "num_micro_batches",
    "learning_rate": "learning_rate",
    "schedule": "schedule",
    "warmup": "warmup_steps",
    "weight_decay": "weight_decay",
    "clip": "max_gradient_norm",
    "label_smoothing": "label_smoothing",
    "seed": "seed",
    "evaluate_every": "evaluate_every",
    "save_every": "save_every",
    "keep": "keep_checkpoints",
}
CONFIG_ARGUMENTS = {"vocab_size": "vocab_size", "context": "context", "dropout": "dropout"}


@dataclass(frozen=True)
class Order:
    """The complete settings of a run: enough to start the same run again."""

    config: ModelConfig
    recipe: Recipe
    source: DataSource

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.config.to_dict(),
            "recipe": asdict(self.recipe),
            "data": asdict(self.source),
        }

    def provenance(self) -> dict[str, Any]:
        """The provenance in a checkpoint. Names of the user's files stay out of it."""
        return {
            "trained_by": "quill",
            "recipe": asdict(self.recipe),
            "data": {"corpus": self.source.corpus},
        }


def run(args: argparse.Namespace) -> None:
    keep_freed_memory()
    with join_peers(args.device) as peers:
        outcome = _resume(args, peers) if args.resume else _start(args, peers)
        if peers.leads:
            _report(outcome)
        if not outcome.finished:
            raise InterruptedWorkError(
                f"continue with `quill train --resume {outcome.checkpoint.parent}`"
            )


def _start(args: argparse.Namespace, peers: Peers) -> Outcome:
    if args.out is None:
        raise ConfigError("--out is missing: say where the run goes, for instance --out runs/tiny")
    if peers.leads:
        check_no_run(args.out)  # before minutes of preparation
    order = read_order(args, peers.num_processes)
    task = _load(order, None, peers)
    order = dataclasses.replace(
        order,
        config=_fit_vocabulary(order.config, task.tokenizer),
        source=dataclasses.replace(order.source, fingerprint=task.fingerprint),
    )
    if peers.leads:
        write_run(args.out, order.to_dict())
    torch.manual_seed(order.recipe.seed)
    return _train(args.out, order, make_network(order.config), task, peers, None)


def _resume(args: argparse.Namespace, peers: Peers) -> Outcome:
    _check_alone(args)
    path: Path = args.resume
    order = _read_back(path)
    steps = step_directories(path)
    checkpoint = load_checkpoint(steps[-1]) if steps else None
    state = load_state(steps[-1]) if steps else None
    num_done = 0 if state is None else state.step
    if args.steps is not None:
        order = _with_steps(order, args.steps, num_done)
    elif peers.leads and num_done >= order.recipe.num_steps:
        print(f"{path} is finished: {num_done:,} steps are done. --steps N, above that, adds some")
    if checkpoint is not None and checkpoint.config != order.config:
        raise CheckpointError(
            f"{steps[-1]} has another shape than the one that {path} was begun with"
        )
    tokenizer = None if checkpoint is None else checkpoint.tokenizer
    task = _load(order, tokenizer, peers)
    if peers.leads:
        clean_leftovers(path, num_done)
        if args.steps is not None:
            _say_new_schedule(order.recipe)
            write_run(path, order.to_dict())
    if checkpoint is not None:
        return _train(path, order, _copy_into_model(checkpoint), task, peers, state)
    # Killed before its first checkpoint: it begins again.
    torch.manual_seed(order.recipe.seed)
    return _train(path, order, make_network(order.config), task, peers, None)


def _check_alone(args: argparse.Namespace) -> None:
    names = {"out", "preset", "corpus", "text", "pairs", *RECIPE_ARGUMENTS, *CONFIG_ARGUMENTS}
    given = sorted(name for name in names - {"steps"} if vars(args)[name] is not None)
    if given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} can't be given with --resume, which continues a run "
            "as it was begun; it takes only --steps and --device"
        )


def _read_back(path: Path) -> Order:
    description = read_run(path)
    try:
        config = ModelConfig.from_dict(description["model"])
        recipe = from_json(Recipe, description["recipe"])
    except (KeyError, RecordError) as error:
        raise not_a_run(path, error) from error
    return Order(config, recipe, read_source(path))


def _with_steps(order: Order, num_steps: int, num_done: int) -> Order:
    if num_steps <= num_done:
        raise ConfigError(
            f"--steps is {num_steps}, and {num_done} steps are done already; it counts from the "
            "run's first step, so give a larger number"
        )
    return dataclasses.replace(order, recipe=dataclasses.replace(order.recipe, num_steps=num_steps))


def _say_new_schedule(recipe: Recipe) -> None:
    print(f"The run gets {recipe.num_steps:,} steps in all.", end=" ")
    if recipe.schedule == "inverse_sqrt":
        print("Its schedule doesn't depend on that: it ends as if begun with so many.")
    else:
        print(
            "The learning rate follows the cosine over all of them from here on, so it may rise "
            "again; a run begun with so many would end at other weights."
        )


def _load(order: Order, tokenizer: Tokenizer | None, peers: Peers) -> Task:
    if not peers.leads:
        return load_task(order.config, order.source, tokenizer)
    learns = "" if tokenizer else f", learning a vocabulary of {order.config.vocab_size:,} tokens"
    print(f"Reading the data{learns} …", flush=True)
    encoding = functools.partial(track, title="encoding")
    return load_task(order.config, order.source, tokenizer, encoding)


def _copy_into_model(checkpoint: Checkpoint) -> Network:
    """Fills a new network with the weights.

    Sharing memory with what the file's reader made would be quicker, but there tensors begin at
    any address, and the matrix library promises the same rounding only where they are aligned
    alike: the resumed run must end at exactly the same weights.
    """
    model = make_network(checkpoint.config)
    check_weights(model, checkpoint.weights)
    model.load_state_dict(dict(checkpoint.weights))
    return model


def _train(
    path: Path,
    order: Order,
    model: Network,
    task: Task,
    peers: Peers,
    state: TrainingState | None,
) -> Outcome:
    trainer = Trainer(model, task.batches(order.recipe), order.recipe, peers)
    if state is not None:
        trainer.resume(state)
    if peers.leads:
        if trainer.step < order.recipe.num_steps:
            _warn_of_warmup(order.recipe)
        print(
            f"{order.config.family} model of {model.num_parameters():,} parameters on "
            f"{peers.device}; {task.describe()}; {order.recipe.num_steps:,} steps of "
            f"{order.recipe.batch_tokens:,} tokens",
            flush=True,
        )
    return Run(path, trainer, task, order.recipe, peers, order.provenance()).go()


def _warn_of_warmup(recipe: Recipe) -> None:
    if recipe.warmup_steps > recipe.num_steps:
        print(
            f"Warning: the warm-up is {recipe.warmup_steps:,} steps and the whole run "
            f"{recipe.num_steps:,}, so the learning rate never gets to its peak. Give --warmup a "
            "number below --steps",
            file=sys.stderr,
        )


def read_order(args: argparse.Namespace, num_processes: int) -> Order:
    name = args.preset or "tiny"
    config = dataclasses.replace(preset(name), **_given(args, CONFIG_ARGUMENTS))
    recipe = dataclasses.replace(RECIPES[name], **_given(args, RECIPE_ARGUMENTS))
    if args.micro_batches is None:
        recipe = dataclasses.replace(recipe, num_micro_batches=num_processes)
    source = choose_source(config.family, args.corpus, args.text, args.pairs)
    return Order(config, recipe, source)


def _given(args: argparse.Namespace, names: dict[str, str]) -> dict[str, Any]:
    values = vars(args)
    return {field: values[name] for name, field in names.items() if values[name] is not None}


def _fit_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """A small text yields a smaller vocabulary than requested."""
    return dataclasses.replace(config, vocab_size=tokenizer.vocab_size)


def _report(outcome: Outcome) -> None:
    if outcome.score is not None:
        score = outcome.score
        found = (
            f"{score.bits_per_byte:.4f} bits per byte"
            if score.accuracy is None
            else f"{score.accuracy:.2%} of {score.num_tokens:,} hidden tokens found"
        )
        print(
            f"Finished after {outcome.num_steps:,} steps. Held out: loss {score.loss:.4f}, "
            f"perplexity {score.perplexity:.2f}, {found}\n"
            f"Checkpoint: {outcome.checkpoint}"
        )
