"""One training step after another: gradients, the optimizer, what several processes share.

Knows: batches, losses, the learning rate of a step.
Does not know: when to measure, save or stop (model/training/run.py), corpora, arguments.

Everything random is a function of (seed, step, micro-batch). So a checkpoint has only the weights
(with the experts' balance) and the optimizer's state, a resumed run computes exactly the same
weights, and several processes compute what one does.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quill.model.checkpoint.run_directory import TrainingState, pack_optimizer, unpack_optimizer
from quill.model.data.batches import Batch, Batches, mix
from quill.model.errors import ConfigError, ModelError
from quill.model.network.network import Network
from quill.model.network.transformer import Transformer
from quill.model.training.distributed import Peers
from quill.model.training.loss import Objective
from quill.model.training.recipes import Recipe


@dataclass(frozen=True)
class StepResult:
    """What one step measured."""

    step: int  # how many steps are done
    loss: float  # nats a target token
    gradient_norm: float
    learning_rate: float
    num_tokens: int


class Trainer:
    """Computes one step after another. The network's weights change in place."""

    def __init__(self, model: Network, batches: Batches, recipe: Recipe, peers: Peers) -> None:
        if recipe.num_micro_batches % peers.num_processes:
            raise ConfigError(
                f"{recipe.num_micro_batches} micro-batches can't be distributed over "
                f"{peers.num_processes} processes; --micro-batches must be a multiple of that"
            )
        self.model = model.to(peers.device)
        self.step = 0
        self._batches = batches
        self._recipe = recipe
        self._peers = peers
        self._names, self._optimizer = make_optimizer(self.model, recipe)
        objective = Objective(self.model, recipe.label_smoothing)
        self._objective: nn.Module = (
            DistributedDataParallel(objective) if peers.together else objective
        )

    def run_step(self) -> StepResult:
        batch = self._batches.batch(self.step)
        learning_rate = self._recipe.learning_rate_at(self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self.model.train()
        loss = self._accumulate_gradients(batch)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._recipe.max_gradient_norm)
        if not torch.isfinite(norm):
            raise ModelError(
                f"the gradients of step {self.step + 1} aren't finite (loss {loss:.3f}); lower "
                "--learning-rate and resume from the last checkpoint"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._rebalance_experts()
        self.step += 1
        # An encoder's targets are few; what it reads is all of its tokens.
        reads_all = self.model.config.family == "encoder"
        num_tokens = batch.inputs_BT.numel() if reads_all else batch.num_targets
        return StepResult(self.step, loss, norm.item(), learning_rate, num_tokens)

    def _rebalance_experts(self) -> None:
        """By the load of the whole batch, without an auxiliary loss."""
        experts = self.model.expert_layers() if isinstance(self.model, Transformer) else ()
        for layer in experts:
            assert layer.load_E is not None
            layer.rebalance(self._peers.added(layer.load_E), self._recipe.balance_rate)
            layer.load_E = None

    def _accumulate_gradients(self, batch: Batch) -> float:
        """Adds up the gradients of this process's micro-batches; returns the batch's mean loss."""
        num_targets = batch.num_targets
        num_parts = self._recipe.num_micro_batches
        indices = range(self._peers.rank, num_parts, self._peers.num_processes)
        total = 0.0
        for index in indices:
            torch.manual_seed(mix(self._recipe.seed, self.step, index))  # for dropout
            with self._sync_only_if(index == indices[-1]):
                loss = self._loss(batch.micro_batch(index, num_parts), num_targets)
                # DDP averages over processes; the sum is wanted.
                (loss * self._peers.num_processes).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return self._peers.sum(total)

    def _loss(self, micro_batch: Batch, num_targets: int) -> Tensor:
        device = self._peers.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            summed: Tensor = self._objective(micro_batch.to(device))
        return summed / num_targets

    def _sync_only_if(self, last: bool) -> contextlib.AbstractContextManager[None]:
        if last or not isinstance(self._objective, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._objective.no_sync()

    def state(self) -> TrainingState:
        return TrainingState(self.step, pack_optimizer(self._optimizer, self._names))

    def resume(self, state: TrainingState) -> None:
        unpack_optimizer(self._optimizer, self._names, state.optimizer)
        self.step = state.step


def make_optimizer(model: nn.Module, recipe: Recipe) -> tuple[list[str], torch.optim.AdamW]:
    """AdamW with weight decay on matrices only; and the parameters' names in its order."""
    named = list(model.named_parameters())
    matrices = [(name, parameter) for name, parameter in named if parameter.dim() >= 2]
    vectors = [(name, parameter) for name, parameter in named if parameter.dim() < 2]
    groups = [
        {"params": [p for _, p in matrices], "weight_decay": recipe.weight_decay},
        {"params": [p for _, p in vectors], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.adam_eps,
        fused=True,
    )
    return [name for name, _ in (*matrices, *vectors)], optimizer
