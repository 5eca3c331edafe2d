"""`quill train-speed`: the tiny preset's training against a plain nanoGPT-style loop.

Each loop is measured in a separate process, alternately, on the same tokens; the best round
of each counts. Knows: both loops, the clock. Does not know: files, quality.
"""

import argparse
import dataclasses
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from quill.model.data.batches import TextBatches
from quill.model.evaluation.nanogpt import NanoGPT, NanoLoop
from quill.model.network.config import ModelConfig
from quill.model.network.presets import preset
from quill.model.network.transformer import Transformer
from quill.model.progress import Display
from quill.model.training.allocator import keep_freed_memory
from quill.model.training.distributed import Peers
from quill.model.training.recipes import RECIPES
from quill.model.training.trainer import Trainer

NUM_TOKENS = 200_000
PLAIN = "nanoGPT loop"
CONTENDERS = ("quill tiny", "quill, GPT shape", PLAIN)


@dataclass(frozen=True)
class Contender:
    """Something that can train a step."""

    run_step: Callable[[], object]
    num_parameters: int


@dataclass(frozen=True)
class Speed:
    """What was seen of a contender."""

    num_parameters: int
    tokens_per_s: float


def run(args: argparse.Namespace) -> None:
    best: dict[str, Speed] = {}
    num_turns = args.rounds * len(CONTENDERS)
    with Display("train-speed", num_turns) as display:
        for turn in range(num_turns):
            name = CONTENDERS[turn % len(CONTENDERS)]
            speed = measure_apart(name, args.steps)
            if name not in best or speed.tokens_per_s > best[name].tokens_per_s:
                best[name] = speed
            display.update(turn + 1, f"{name} {speed.tokens_per_s:,.0f} tok/s")
    _report(best)


def measure_apart(name: str, num_steps: int) -> Speed:
    """In a new process: how memory is kept is a setting of the whole process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (name, num_steps))


def measure(name: str, num_steps: int) -> Speed:
    """Tokens a second over some steps, after two that don't count."""
    contender = make_contender(name)
    contender.run_step()
    contender.run_step()
    started = time.perf_counter()
    for _ in range(num_steps):
        contender.run_step()
    elapsed_s = time.perf_counter() - started
    rate = num_steps * RECIPES["tiny"].batch_tokens / elapsed_s
    return Speed(contender.num_parameters, rate)


def make_contender(name: str) -> Contender:
    torch.manual_seed(0)
    config, recipe = preset("tiny"), RECIPES["tiny"]
    ids = torch.randint(0, config.vocab_size, (NUM_TOKENS,), dtype=torch.int32)
    num_sequences = recipe.batch_tokens // config.context
    if name == PLAIN:
        plain = NanoGPT(
            config.vocab_size, config.context, config.d_model, config.num_layers, config.num_heads
        )
        size = sum(parameter.numel() for parameter in plain.parameters())
        return Contender(NanoLoop(plain, ids, config.context, num_sequences).run_step, size)
    keep_freed_memory()  # as `quill train` does
    shape = config if name == "quill tiny" else _gpt_shape(config)
    batches = TextBatches(ids, config.context, num_sequences, seed=0)
    peers = Peers(rank=0, num_processes=1, device=torch.device("cpu"))
    trainer = Trainer(Transformer(shape), batches, recipe, peers)
    return Contender(trainer.run_step, trainer.model.num_parameters())


def _gpt_shape(config: ModelConfig) -> ModelConfig:
    """The tiny preset with nanoGPT's parts: the same arithmetic on both sides."""
    return dataclasses.replace(
        config, positions="learned", norm="layer", activation="gelu", d_ff=4 * config.d_model
    )


def _report(best: dict[str, Speed]) -> None:
    table = Table("", "parameters", "tokens/s", "ratio to nanoGPT")
    for name, speed in best.items():
        ratio = speed.tokens_per_s / best[PLAIN].tokens_per_s
        table.add_row(
            name, f"{speed.num_parameters:,}", f"{speed.tokens_per_s:,.0f}", f"{ratio:.3f}"
        )
    Console().print(table)
