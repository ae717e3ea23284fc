"""Runs with several envs ([[envs]]) and with several policies ([policies.NAME]), and what they exclude."""

from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Feature, because
from ludic.run.given import Parts
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.resolve import ResolvedRun
from ludic.types import ConfigError, FollowsDrift


class Envs(Feature):
    """Groups of several envs in each batch."""

    name = "[[envs]]"
    excludes = because(
        "that is for runs with one env.",
        "rollouts", "curriculum", "league_every", "protocol= as an object", "data= as an object",
    )  # fmt: skip

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.envs)

    def check(self, run: ResolvedRun) -> None:
        if isinstance(make_algorithm(run).credit_assigner, FollowsDrift):
            raise ConfigError(
                f"algo = {run.config.algo.algo!r} tracks single prompts, which only one env can number. Take grpo."
            )


class SeveralPolicies(Feature):
    """Policies that play together, each with its own model, algorithm and trainer."""

    name = "[policies.…]"
    excludes = because(
        "that is for runs that train one policy. Leave one out; docs/multi_policy.md says what several policies can do, and "
        "what is done in code.",
        "[[envs]]", "[[recorded]]", "[replay]", "rollouts", "preferences", "data (with sft)", "max_lag", "close_batch_at",
        "dynamic_sampling", "curriculum", "teacher", "[teachers]", "updates_per_batch", "mini_batches", "quantize_base",
        "protocol", "source=", "algo= as an object", "model= as an object",
        "reward= of an agent behind the gateway", "policies= of an agent behind the gateway",
    )  # fmt: skip
    needs = because("every policy has an engine in this process.", "engine = 'local'")

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.policies)
