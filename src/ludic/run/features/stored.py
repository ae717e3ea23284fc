"""Runs that learn from files instead of playing: stored rollouts, preferences, and the answers of sft."""

from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Feature, because
from ludic.run.given import Parts
from ludic.run.resolve import ResolvedRun
from ludic.types import ConfigError

_PLAYING = ("max_lag", "close_batch_at", "dynamic_sampling", "curriculum")
_WHY = "its samples come from a file, and nothing is played. Leave one out."


class StoredRollouts(Feature):
    """Rollouts that `ludic rescore` or another run wrote."""

    name = "rollouts"
    excludes = because(_WHY, *_PLAYING)

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.rollouts.rollouts)

    def check(self, run: ResolvedRun) -> None:
        for path in run.config.rollouts.rollouts:
            if not path.is_file():
                raise ConfigError(
                    f"rollouts = {path}: there is no such file. `ludic rescore` writes one, and runs into rollouts/."
                )


class _Texts(Feature):
    excludes = because(
        _WHY,
        *_PLAYING,
        "rollouts",
        "filter",
        "teacher",
        "[teachers]",
        "[[envs]]",
        "[[recorded]]",
        "league_every",
        "[replay]",
    )
    needs = because("nothing is played, except to evaluate in this process.", "engine = 'local'")


class Preferences(_Texts):
    """Pairs or labels of a file, for dpo, ipo and kto."""

    name = "preferences"
    excludes = _Texts.excludes | because(_WHY, "data")

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return config.rollouts.preferences is not None


class Answers(_Texts):
    """Questions with their answers, for sft."""

    name = "data (with sft)"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return config.stored is not None and config.rollouts.preferences is None
