"""A process that saves checkpoints until it is killed. Every number in a checkpoint is its step."""

from itertools import count
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer would load it, which takes a second, in every process again

from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager


def make_parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_until_killed(root: Path, first_step: int) -> None:
    manager = CheckpointManager(CheckpointConfig(root, max_to_keep=1))
    model, optimizer = make_parts()
    for step in count(first_step):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
                optimizer.state[parameter]["exp_avg"].fill_(step)
        # Every third step is saved twice, so that a folder is also killed while it is being replaced.
        for _ in range(2 if step % 3 == 0 else 1):
            manager.save(step, model=model, optimizer=optimizer, state={"plain": step, "tensor": torch.tensor(step)})
