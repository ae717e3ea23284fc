"""Rewards and regularisers of the settings: what scores episodes, and what holds the policy near a reference."""

from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Feature
from ludic.run.given import Parts
from ludic.run.parts.rewards import make_rewards
from ludic.run.resolve import ResolvedRun


class Scored(Feature):
    """Scorers and weights of rewards, besides what the env gives."""

    name = "reward"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.reward.reward or config.reward.judge or config.reward.reward_weight or parts.scorers)

    def check(self, run: ResolvedRun) -> None:
        make_rewards(run.config.reward, run.config.agent, run.parts)
        run.config.reward.check_siblings(run.group_size, "--group-size")

    def says(self, run: ResolvedRun) -> list[str]:
        rewards = make_rewards(run.config.reward, run.config.agent, run.parts)
        if rewards is None:
            return []
        names = dict.fromkeys(["env", *rewards.weights, *(scorer.name for scorer in rewards.scorers)])
        return [f"Rewards: {', '.join(f'{rewards.weight_of(name):g} × {name}' for name in names)}."]


class NearReference(Feature):
    """A KL to a frozen reference."""

    name = "kl_coeff"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.algo.kl_coeff)

    def says(self, run: ResolvedRun) -> list[str]:
        algo = run.config.algo
        usual = "the model under the adapter" if run.config.model.lora_rank else "a frozen copy of its first weights"
        return [f"The policy is held near {algo.reference or usual}: {algo.kl_coeff:g} × KL ({algo.kl_estimator})."]
