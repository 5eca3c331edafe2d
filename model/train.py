"""`quill train`: from arguments, or from a run to be resumed, to a finished run.

Knows: the arguments and run.json. Does not know: how training works (model/run.py).
"""

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import Checkpoint, check_weights, load_checkpoint
from model.config import ModelConfig
from model.distributed import Peers, join_peers
from model.errors import CheckpointError, ConfigError, InterruptedWorkError
from model.material import DataSource, Material, choose_source, load_material
from model.memory import keep_freed_memory
from model.presets import preset
from model.recipes import RECIPES, Recipe
from model.run import Outcome, Run
from model.tokenizer import Tokenizer
from model.training import Trainer
from model.training_state import (
    TrainingState,
    clean_leftovers,
    load_state,
    read_run,
    step_directories,
    write_run,
)
from model.transformer import Transformer

RECIPE_ARGUMENTS = {
    "steps": "num_steps",
    "batch_tokens": "batch_tokens",
    "pieces": "num_pieces",
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
    """What was asked for, in full: enough to start the run again from nothing."""

    config: ModelConfig
    recipe: Recipe
    source: DataSource

    def to_dict(self, fingerprint: str) -> dict[str, Any]:
        return {
            "model": self.config.to_dict(),
            "recipe": self.recipe.to_dict(),
            "data": self.source.to_dict() | {"fingerprint": fingerprint},
        }

    def provenance(self) -> dict[str, Any]:
        """What a checkpoint says of itself. Names of the user's own files stay with the run."""
        return {
            "trained_by": "quill",
            "recipe": self.recipe.to_dict(),
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
    order = read_order(args, peers.num_processes)
    material = load_material(order.config, order.source)
    order = dataclasses.replace(order, config=_fit_vocabulary(order.config, material.tokenizer))
    if peers.leads:
        write_run(args.out, order.to_dict(material.fingerprint))
    torch.manual_seed(order.recipe.seed)
    return _train(args.out, order, Transformer(order.config), material, peers, None)


def _resume(args: argparse.Namespace, peers: Peers) -> Outcome:
    given = [
        name for name in (*RECIPE_ARGUMENTS, *CONFIG_ARGUMENTS) if vars(args)[name] is not None
    ]
    if args.out is not None or args.preset is not None or given:
        raise ConfigError(
            "--resume continues a run as it was begun; it takes --device and no other option"
        )
    path: Path = args.resume
    description = read_run(path)
    try:
        order = Order(
            ModelConfig.from_dict(description["model"]),
            Recipe(**description["recipe"]),
            DataSource.from_dict(description["data"]),
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / 'run.json'} doesn't describe a training run: {error}"
        ) from error
    steps = step_directories(path)
    if not steps:
        return _resume_from_nothing(path, order, description, peers)
    checkpoint, state = load_checkpoint(steps[-1]), load_state(steps[-1])
    if checkpoint.config != order.config:
        raise CheckpointError(
            f"{steps[-1]} has another shape than the one that {path} was begun with"
        )
    material = load_material(order.config, order.source, checkpoint.tokenizer)
    _check_data(material, description)
    if peers.leads:
        clean_leftovers(path, state.step)
    return _train(path, order, _copy_into_model(checkpoint), material, peers, state)


def _copy_into_model(checkpoint: Checkpoint) -> Transformer:
    """Fills a new network with the weights.

    Sharing memory with what the file's reader made would be quicker, but there tensors begin at
    any address, and the matrix library promises the same rounding only where they are aligned
    alike: the resumed run must end at exactly the same weights.
    """
    model = Transformer(checkpoint.config)
    check_weights(model, checkpoint.weights)
    model.load_state_dict(checkpoint.weights)
    return model


def _resume_from_nothing(
    path: Path, order: Order, description: dict[str, Any], peers: Peers
) -> Outcome:
    """The run was killed before its first checkpoint: it begins again."""
    material = load_material(order.config, order.source)
    _check_data(material, description)
    if peers.leads:
        clean_leftovers(path, 0)
    torch.manual_seed(order.recipe.seed)
    return _train(path, order, Transformer(order.config), material, peers, None)


def _train(
    path: Path,
    order: Order,
    model: Transformer,
    material: Material,
    peers: Peers,
    state: TrainingState | None,
) -> Outcome:
    trainer = Trainer(model, material.batches(order.recipe), order.recipe, peers)
    if state is not None:
        trainer.resume(state)
    if peers.leads:
        print(
            f"{order.config.family} model of {model.num_parameters():,} parameters on "
            f"{peers.device}; {material.describe()}; {order.recipe.num_steps:,} steps of "
            f"{order.recipe.batch_tokens:,} tokens",
            flush=True,
        )
    return Run(path, trainer, material, order.recipe, peers, order.provenance()).go()


def read_order(args: argparse.Namespace, num_processes: int) -> Order:
    name = args.preset or "tiny"
    config = dataclasses.replace(preset(name), **_given(args, CONFIG_ARGUMENTS))
    recipe = dataclasses.replace(RECIPES[name], **_given(args, RECIPE_ARGUMENTS))
    if args.pieces is None:
        recipe = dataclasses.replace(recipe, num_pieces=num_processes)
    source = choose_source(config.family, args.corpus, args.text, args.pairs)
    return Order(config, recipe, source)


def _given(args: argparse.Namespace, names: dict[str, str]) -> dict[str, Any]:
    values = vars(args)
    return {field: values[name] for name, field in names.items() if values[name] is not None}


def _fit_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """A small text yields fewer pieces than asked for; the network needs no more rows than that."""
    return dataclasses.replace(config, vocab_size=tokenizer.vocab_size)


def _check_data(material: Material, description: dict[str, Any]) -> None:
    if material.fingerprint != description["data"].get("fingerprint"):
        raise CheckpointError(
            "the data isn't what the run was begun with; a run can't be resumed on other data"
        )


def _report(outcome: Outcome) -> None:
    if outcome.score is not None:
        score = outcome.score
        print(
            f"Finished after {outcome.num_steps:,} steps. Held out: loss {score.loss:.4f}, "
            f"perplexity {score.perplexity:.2f}, {score.bits_per_byte:.4f} bits per byte\n"
            f"Checkpoint: {outcome.checkpoint}"
        )
