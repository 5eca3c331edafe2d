"""`quill train-speed`: the tiny preset's training against a plain nanoGPT-style loop.

Both run in this process, in turns, on the same tokens; the best round of each counts.
Knows: both loops, the clock. Does not know: files, quality.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from model.batches import TextBatches
from model.config import ModelConfig
from model.display import Display
from model.distributed import Peers
from model.nanogpt import NanoGPT, NanoLoop
from model.presets import preset
from model.recipes import RECIPES
from model.training import Trainer
from model.transformer import Transformer

NUM_TOKENS = 200_000


def run(args: argparse.Namespace) -> None:
    contenders = make_contenders()
    rates = dict.fromkeys(contenders, 0.0)
    with Display("train-speed", args.rounds * len(contenders)) as display:
        for turn in range(args.rounds * len(contenders)):
            name = list(contenders)[turn % len(contenders)]
            rates[name] = max(rates[name], measure(contenders[name].run_step, args.steps))
            display.update(turn + 1, f"{name} {rates[name]:,.0f} tok/s")
    _report(contenders, rates)


@dataclasses.dataclass(frozen=True)
class Contender:
    run_step: Callable[[], object]
    num_parameters: int


def make_contenders() -> dict[str, Contender]:
    torch.manual_seed(0)
    config, recipe = preset("tiny"), RECIPES["tiny"]
    ids = torch.randint(0, config.vocab_size, (NUM_TOKENS,), dtype=torch.int32)
    num_rows = recipe.batch_tokens // config.context
    shapes = {"quill tiny": config, "quill, GPT shape": _gpt_shape(config)}
    peers = Peers(rank=0, num_processes=1, device=torch.device("cpu"))
    contenders = {}
    for name, shape in shapes.items():
        batches = TextBatches(ids, config.context, num_rows, seed=0)
        trainer = Trainer(Transformer(shape), batches, recipe, peers)
        contenders[name] = Contender(trainer.run_step, trainer.model.num_parameters())
    plain = NanoGPT(
        config.vocab_size, config.context, config.d_model, config.num_layers, config.num_heads
    )
    loop = NanoLoop(plain, ids, config.context, num_rows)
    size = sum(parameter.numel() for parameter in plain.parameters())
    contenders["nanoGPT loop"] = Contender(loop.run_step, size)
    return contenders


def _gpt_shape(config: ModelConfig) -> ModelConfig:
    """The tiny preset with nanoGPT's parts: the same arithmetic on both sides."""
    return dataclasses.replace(
        config, positions="learned", norm="layer", activation="gelu", d_ff=4 * config.d_model
    )


def measure(run_step: Callable[[], object], num_steps: int) -> float:
    """Tokens a second over some steps, after one that doesn't count."""
    run_step()
    started = time.perf_counter()
    for _ in range(num_steps):
        run_step()
    return num_steps * RECIPES["tiny"].batch_tokens / (time.perf_counter() - started)


def _report(contenders: dict[str, Contender], rates: dict[str, float]) -> None:
    table = Table("", "parameters", "tokens/s", "ratio to nanoGPT")
    for name, contender in contenders.items():
        ratio = rates[name] / rates["nanoGPT loop"]
        table.add_row(name, f"{contender.num_parameters:,}", f"{rates[name]:,.0f}", f"{ratio:.3f}")
    Console().print(table)
