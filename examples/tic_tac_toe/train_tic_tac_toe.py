"""Reinforcement learning in one process: a LoRA adapter, GRPO, and the engine that serves the weights being trained.

Shows: `ludic.run` with an env of your own; every flag of `ludic train` works here, too.
Needs: a model. One that names cells at all learns sooner: see ../sft.py.
Takes: an estimated hour per step of 128 games with smollm2-135m on two CPU cores; take fewer there, or use a GPU.

    python examples/tic_tac_toe/train_tic_tac_toe.py --model runs/sft --name tic_tac_toe
    python examples/tic_tac_toe/train_tic_tac_toe.py --rollouts-per-update 32 --steps 5 --eval-episodes 50
"""

from game import MAX_MOVES, BothSeats, last_cell

from ludic.cli.script import parse_script, run_script, train_script
from ludic.run import build


def main(args: list[str]) -> int:
    flags, config = parse_script(
        __doc__, args, name="tic_tac_toe", lr=1e-4, lora_rank=8, max_tokens=32, max_steps=MAX_MOVES, unreadable="stop",
        agent_set={"incomplete_completion_penalty": -1.0},  # a reply that is cut off is as bad as an illegal move
        eval_every=10, eval_at_start=True, best_metric="eval/win_rate", checkpoint_every=10,
    )  # fmt: skip
    return train_script(build(config, env=BothSeats, parser=last_cell), flags)


if __name__ == "__main__":
    run_script(main)
