"""`train` and `evaluate`: an existing agent, its tasks and a reward function, in one call.

    async def agent(task, *, base_url, api_key, model): ...
    ludic.gateway.train(agent=agent, tasks="questions.jsonl", reward=score, model="smollm2-135m", algo="grpo")

Thin over `ludic.run.build`, whose settings they take. `ludic_serve.gateway` loads it when
one of the two is used.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ludic.batch_gen.requests.samples import read_samples
from ludic.eval import EvalReport
from ludic.run import Run, TrainResult, build
from ludic.run.resolve import slug
from ludic.types import ConfigError
from ludic_serve.gateway.protocol import RewardFunction, TaskEnv
from ludic_serve.gateway.session import Policy

Tasks: TypeAlias = str | Path | Sequence[Mapping[str, Any] | str]
"""A JSONL file with one task per line (or hub:NAME:SPLIT), or the tasks themselves: dicts or texts. The agent gets one of them."""


def train(
    *,
    agent: Callable[..., Any] | str | None = None,
    tasks: Tasks,
    reward: RewardFunction,
    model: Any = "smollm2-135m",
    algo: Any = "grpo",
    group_size: int | None = None,
    steps: int = 50,
    eval_tasks: Tasks | None = None,
    policies: Mapping[str, Policy] | None = None,
    resume: bool = False,
    **settings: Any,
) -> TrainResult:
    """Train the model behind the agent; the result is in a folder under runs/, named after the agent unless `name` is given.

    `agent` is a function or file.py:function; or give `agent_command`. `reward(task, answer, session)` returns a number, numbers by
    name, or numbers by the id of a model call. `settings` are all those of `ludic train`, with underscores.
    """
    settings = {"group_size": group_size, "steps": steps, **settings}
    with _task_run(agent, tasks, reward, model, algo, eval_tasks, policies, settings) as run:
        return run.resume() if resume else run.train()


def evaluate(
    *,
    agent: Callable[..., Any] | str | None = None,
    tasks: Tasks,
    reward: RewardFunction,
    model: Any = "smollm2-135m",
    policies: Mapping[str, Policy] | None = None,
    **settings: Any,
) -> EvalReport:
    """Play each task once (`eval_pass_k` times) and report the rewards. Nothing is written."""
    tasks = _read(tasks)
    settings = {"eval_episodes": len(tasks), **settings}
    with _task_run(agent, tasks, reward, model, None, tasks, policies, settings) as run:
        return run.evaluate()


def _task_run(
    agent: Callable[..., Any] | str | None,
    tasks: Tasks,
    reward: RewardFunction,
    model: Any,
    algo: Any,
    eval_tasks: Tasks | None,
    policies: Mapping[str, Policy] | None,
    settings: Mapping[str, Any],
) -> Run:
    """The run of `train` and `evaluate`."""
    if agent is None and settings.get("agent_command") is None:
        raise ConfigError("No agent: give agent=, a function or file.py:function, or agent_command=.")
    if not callable(reward):
        raise ConfigError(f"reward is {reward!r:.100}; give a function: reward(task, answer, session) -> number.")
    given = {name: value for name, value in settings.items() if value is not None}
    name = (
        agent
        if isinstance(agent, str)
        else getattr(agent, "__name__", None) or settings.get("agent_command") or "agent"
    )
    short = (part if isinstance(part, str) else type(part).__name__ for part in (model, algo or "grpo"))
    given.setdefault("name", slug("-".join((name.rpartition(":")[2].split()[0], *(Path(part).name for part in short)))))
    if algo is not None:
        given["algo"] = algo
    return build(
        env=TaskEnv,
        agent=agent,
        data=_read(tasks),
        eval_data=None if eval_tasks is None else _read(eval_tasks),
        model=model,
        reward=reward,
        policies=policies,
        **given,
    )


def _read(tasks: Tasks) -> list[Any]:
    found = list(read_samples(Path(tasks), "tasks") if isinstance(tasks, str | Path) else tasks)
    if not found:
        raise ConfigError("There are no tasks; give a JSONL file with one per line, or a list of dicts or texts.")
    return found
