r"""GSM8K: a one-shot prompt, boxed answers, math-verify, GRPO; accuracy and pass@8 on held-out questions, the best checkpoint kept.

Shows: a context of your own in a run; pass@k while training. Every flag of `ludic train` works here, too.
Needs: a model; the questions from --data and --eval-data, or from the hub through `datasets` (the extra datasets).
Takes: an estimated hour or more per step of 512 answers with smollm2-135m on two CPU cores; take fewer there, or use a GPU.

    python examples/gsm8k/gsm8k.py --model meta-llama/Llama-3.2-1B-Instruct --steps 100
    python examples/gsm8k/gsm8k.py --data gsm8k_train.jsonl --eval-data gsm8k_test.jsonl --rollouts-per-update 32 --steps 2
    ludic eval runs/gsm8k --data gsm8k_test.jsonl --samples 8 --pass-k 1,8          # accuracy, pass@k, majority@k afterwards
"""
# ruff: noqa: T201 - a script prints

import json
from pathlib import Path

from ludic.cli.script import parse_script, run_script, train_script
from ludic.context import FullDialog
from ludic.run import Run, build
from ludic.run.folder import metrics_with
from ludic.types import Info, Observation

EXAMPLE_QUESTION = "A baker fills 6 trays with 12 rolls each and sells 50 of the rolls. How many rolls are left?"
EXAMPLE_ANSWER = "There are 6 * 12 = 72 rolls. After selling 50, 72 - 50 = 22 are left. The answer is \\boxed{22}."


class OneShot(FullDialog):
    """Every conversation begins with a worked problem, so that a model sees the format before it must use it."""

    def on_env_reset(self, obs: Observation, info: Info) -> None:
        super().on_env_reset(EXAMPLE_QUESTION, {})
        self.add_assistant_step(EXAMPLE_ANSWER)
        super().on_env_reset(obs, info)


def main(args: list[str]) -> int:
    flags, config = parse_script(
        __doc__, args, name="gsm8k", data=Path("hub:openai/gsm8k:main:train"), eval_data=Path("hub:openai/gsm8k:main:test"),
        rollouts_per_update=512, group_size=8, concurrency=256, steps=100, too_long="drop",
        eval_every=10, eval_episodes=100, eval_pass_k=8, eval_temperature=1.0, eval_concurrency=256,
        checkpoint_every=10, checkpoint_keep=1, best_metric="eval/accuracy",
    )  # fmt: skip
    run = build(config, env="gsm8k", context=OneShot, parser="boxed")
    code = train_script(run, flags)
    if code == 0 and not flags.dry_run:
        print_results(run)
    return code


def print_results(run: Run) -> None:
    pass_k = f"pass@{run.config.eval.eval_pass_k}"
    print(f"step  accuracy  {pass_k}")
    for row in metrics_with(run.folder, "eval/accuracy"):
        print(f"{row['step']:4}  {row['eval/accuracy']:8.1%}  {row.get(f'eval/{pass_k}', row['eval/accuracy']):6.1%}")
    best = run.folder / "checkpoints" / "best.json"
    if best.exists():
        print(f"The best checkpoint is {best.parent / json.loads(best.read_text())['path']}")


if __name__ == "__main__":
    run_script(main)
