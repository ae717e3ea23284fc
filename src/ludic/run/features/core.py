"""The features of the core, in the order in which they are put around the source of batches; and the check of all pairs."""

from collections.abc import Iterator

from ludic.run.config.run_config import RunConfig
from ludic.run.features import facts
from ludic.run.features.base import LOCAL, Feature, plugin_features
from ludic.run.features.curriculum import HasCurriculum
from ludic.run.features.league import HasLeague
from ludic.run.features.sources import (
    Answers,
    DomainTeachers,
    Envs,
    NearReference,
    Preferences,
    Recorded,
    Replay,
    Scored,
    SeveralPolicies,
    StoredRollouts,
    Teacher,
)
from ludic.run.given import Parts

FEATURES: tuple[Feature, ...] = (
    LOCAL,
    SeveralPolicies(),
    Envs(),
    Preferences(),
    Answers(),
    StoredRollouts(),
    Scored(),
    facts.DYNAMIC_SAMPLING,
    facts.CLOSE_BATCH_AT,
    HasCurriculum(),
    facts.FILTER,
    NearReference(),
    facts.ENTROPY_BONUS,
    Recorded(),
    Replay(),
    HasLeague(),
    Teacher(),
    DomainTeachers(),
    *facts.FACTS,
)


def features() -> list[Feature]:
    """The features of the core and of all plug-ins that are installed."""
    return [*FEATURES, *plugin_features()]


def features_on(config: RunConfig, parts: Parts) -> list[Feature]:
    """The features that a run has."""
    return [feature for feature in features() if feature.is_on(config, parts)]


def pair_problems(config: RunConfig, parts: Parts) -> Iterator[str]:
    """Features of a run that exclude each other, and features that lack what they need."""
    on = {feature.name: feature for feature in features_on(config, parts)}
    for feature in on.values():
        for other in [name for name in feature.excludes if name in on]:
            pair = f"{feature.shown(config)} and {on[other].shown(config)}"
            yield f"{pair} exclude each other: {feature.excludes[other]}"
        for needed in [name for name in feature.needs if name not in on]:
            yield f"{feature.shown(config)} is for {needed}: {feature.needs[needed]}"
