"""Several processes that train one network: which one this is, and how they agree.

Knows: torchrun's variables, process groups. Does not know: what is trained.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from quill.model.errors import ConfigError


@dataclass(frozen=True)
class Peers:
    """This process's place among those that share the work."""

    rank: int
    num_processes: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks to the person."""
        return self.rank == 0

    @property
    def together(self) -> bool:
        return self.num_processes > 1

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process: they must all stop at the same step."""
        return self.sum(float(flag)) > 0

    def sum(self, value: float) -> float:
        if not self.together:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.item()

    def added(self, tensor: Tensor) -> Tensor:
        """The sum of all processes' tensors."""
        if self.together:
            dist.all_reduce(tensor)
        return tensor


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is CUDA where there is one. CUDA that isn't there is an error, never a fallback."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda was given, but this PyTorch "
            f"({torch.__version__}) finds no working CUDA device. Use --device cpu or auto"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def join_peers(device_name: str) -> Iterator[Peers]:
    """Joins the other processes if torchrun started this one; otherwise there is one process."""
    if "RANK" not in os.environ:
        yield Peers(rank=0, num_processes=1, device=choose_device(device_name))
        return
    device = choose_device(device_name, int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Peers(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()
