"""What scores the episodes of a run beside the env: the named scorers, the judge, and the given ones."""

import inspect

from ludic import registry
from ludic.rewards import RenamedScorer, Rewards, as_scorer
from ludic.rewards.shaping import SoftOverlong
from ludic.run.config.env_and_agent import AgentSettings
from ludic.run.config.reward import RewardSettings
from ludic.run.features.plugged import plugged
from ludic.run.given import Parts
from ludic.types import ConfigError, Scorer


def make_rewards(settings: RewardSettings, agent: AgentSettings, parts: Parts | None = None) -> Rewards | None:
    """The scorers of the settings and the given ones, with their weights; None if nothing is scored or weighted."""
    scorers = [_scorer(settings, name, id, agent.max_tokens) for name, id in settings.named]
    if settings.judge is not None:
        scorers.append(plugged("judge", f"judge = {settings.judge!r}").scorer(settings))
    scorers += [as_scorer(given) for given in (parts.scorers if parts is not None else ())]
    if not scorers and not settings.reward_weight:
        return None
    return Rewards(scorers, settings.reward_weight, max_concurrent=max(64, settings.judge_concurrency))


def _scorer(settings: RewardSettings, name: str, id: str, max_tokens: int | None) -> Scorer:
    given = {key.partition(".")[2]: value for key, value in settings.reward_set.items() if key.startswith(f"{name}.")}
    factory = registry.rewards.spec(id).load()
    is_renamed = f"{name}={id}" in settings.reward
    if factory is SoftOverlong:
        given.setdefault("max_tokens", max_tokens)  # of the run's replies
    parameters = inspect.signature(factory).parameters
    if is_renamed and inspect.isclass(factory) and "name" in parameters:
        given["name"] = name
    made = registry.rewards.make(id, **given)
    if not inspect.isclass(factory) and all(one.default is not one.empty for one in parameters.values()):
        made = made()  # a reward function takes a rollout; this one makes a scorer
        if not isinstance(made, Scorer):
            raise ConfigError(
                f"{id} takes no rollout and returned {made!r:.60}; without a rollout, it must return a scorer, such as a judge."
            )
    if is_renamed and isinstance(made, Scorer) and made.name != name:
        return RenamedScorer(made, name)
    return as_scorer(made, name if is_renamed or not isinstance(made, Scorer) else None)
