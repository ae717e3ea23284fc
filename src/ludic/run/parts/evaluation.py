"""How a run is evaluated while it trains: always the same tasks, of one env or several."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from ludic.eval import EngineEvaluator, Grading
from ludic.run.parts.episodes import EpisodeSetup
from ludic.run.parts.samples import env_arguments, eval_samples
from ludic.run.resolve import ResolvedRun
from ludic.types import InferenceSpec, ReturnSpec, Rollout, RolloutRequest, derive_seed

_EVAL_ENV_SEEDS, _EVAL_SAMPLING_SEEDS = 101, 102


def fixed_requests(
    setup: EpisodeSetup,
    num_episodes: int,
    inference: InferenceSpec,
    *,
    samples: Sequence[Any] | None = None,
    seed: int = 0,
) -> list[RolloutRequest]:
    """The same tasks every time: the first samples, or seeds that training does not use."""
    tasks = [None] * num_episodes if samples is None else samples[:num_episodes]
    return [
        setup.request(
            inference,
            sample,
            env_seed=derive_seed(seed, _EVAL_ENV_SEEDS, index),
            sampling_seed=derive_seed(seed, _EVAL_SAMPLING_SEEDS, index),
            meta={"sample_index": index},
        )
        for index, sample in enumerate(tasks)
    ]


def eval_requests(run: ResolvedRun, setup: EpisodeSetup) -> list[RolloutRequest]:
    """The tasks of an evaluation, the same at every one."""
    inference, settings = InferenceSpec(sampling=run.eval_sampling, return_=ReturnSpec.for_eval()), run.config.eval
    requests = fixed_requests(setup, settings.eval_episodes, inference, samples=eval_samples(run), seed=run.seed)
    return [replace(request, num_episodes=settings.eval_pass_k) for request in requests]


async def play(run: ResolvedRun, setup: EpisodeSetup) -> list[Rollout]:
    """Play the tasks of an evaluation."""
    engine = setup.engine(seed=run.seed, max_failed_share=run.config.rollouts.max_failed_share)
    concurrency = run.trainer.eval_concurrency or setup.concurrency
    return await engine.generate_rollouts(eval_requests(run, setup), max_steps=run.max_steps, concurrency=concurrency)


class EnvsEvaluator:
    """Evaluates the envs of a run one after the other; metrics are under their names, and the mean over envs."""

    def __init__(self, evaluators: Mapping[str, EngineEvaluator]) -> None:
        self._evaluators = evaluators

    async def eval(self, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
        records: list[dict[str, Any]] = []
        found: dict[str, dict[str, float]] = {}
        for name, evaluator in self._evaluators.items():
            more, metrics = await evaluator.eval(**settings)
            records += more
            found[name] = {key.removeprefix("eval/"): value for key, value in metrics.items()}
        named = {f"{name}/{key}": value for name, own in found.items() for key, value in own.items()}
        shared = [key for key in ("mean_reward", "accuracy") if all(own.get(key) is not None for own in found.values())]
        return records, named | {key: fmean(own[key] for own in found.values()) for key in shared}


def make_evaluator(run: ResolvedRun, setup: EpisodeSetup) -> EngineEvaluator:
    samples, requests = eval_samples(run), eval_requests(run, setup)
    env = run.env.make(env_arguments(run.config.env, None if samples is None else samples[0]))
    limit = run.config.rollouts.max_failed_share
    return EngineEvaluator(
        setup.engine(seed=run.seed, max_failed_share=limit, max_unscored_share=limit, purpose="evaluating"),
        requests_fn=lambda: requests,
        max_steps=run.max_steps,
        timeout_s=run.trainer.eval_timeout_s,
        concurrency=run.trainer.eval_concurrency or setup.concurrency,
        grading=Grading(success_reward=env.full_reward),
    )
