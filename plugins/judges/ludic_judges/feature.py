"""The judge as a feature of runs and evaluations: the flags --judge… of the section [reward]."""

import weakref
from collections.abc import Hashable
from dataclasses import fields
from typing import Any

from ludic.run.config.reward import RewardSettings
from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Feature
from ludic.run.given import Parts
from ludic.types import Scorer


class Judge(Feature):
    """A model that grades episodes."""

    name = "judge"

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return config.reward.judge is not None

    def scorer(self, settings: RewardSettings) -> Scorer:
        """The same object for several envs and for evaluations, so that its model is loaded once."""
        key = tuple(getattr(settings, one.name) for one in fields(settings) if one.name.startswith("judge"))
        made: Scorer | None = self._made.get(key)
        if made is None:
            made = self._made[key] = _make(settings)
        return made


def _make(settings: RewardSettings) -> Scorer:
    from ludic_judges.lazy import LazyJudge

    def load(model: str) -> Any:
        from ludic.run.model import load_judge  # needs torch; a judge behind a URL does not

        return load_judge(model, device=settings.judge_device)

    return LazyJudge(settings, load=load)


JUDGE = Judge()
