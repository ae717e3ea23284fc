"""Which of the planned episodes an earlier run has finished."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ludic.batch_gen.episodes import Episode, EpisodePlan
from ludic.batch_gen.request_key import request_key
from ludic.batch_gen.writer import FinishedEpisodes, StoredEpisode
from ludic.types import ConfigError


@dataclass(slots=True)
class Resumed:
    """The plans of a resumed run, and what of it is in the file."""

    plans: list[EpisodePlan]
    stored: dict[int, StoredEpisode] = field(default_factory=dict)
    """By the plan's index."""


def resume_plans(plans: Iterable[EpisodePlan], finished: FinishedEpisodes, *, max_steps: int) -> Resumed:
    """Match plans with finished episodes.

    A group keeps the id that it has in the file: ids are new in every run, and a group that was finished in two runs is
    still one group.
    """
    resumed = Resumed(list(plans))
    names: dict[str, str] = {}
    for plan in resumed.plans:
        found = finished.take(_key(plan, max_steps))
        if found is not None:
            resumed.stored[plan.index] = found
            if plan.group_id is not None and found.group_id is not None:
                names.setdefault(plan.group_id, found.group_id)
    resumed.plans = [_renamed(plan, names) for plan in resumed.plans]
    return resumed


def read_episode(plan: EpisodePlan, stored: StoredEpisode) -> Episode:
    rollouts = stored.read()
    for rollout in rollouts:
        rollout.meta["episode_idx"] = plan.index
    return Episode(plan=plan, rollouts=rollouts, num_attempts=0)


def _renamed(plan: EpisodePlan, names: dict[str, str]) -> EpisodePlan:
    name = names.get(plan.group_id or "")
    if name is None:
        return plan
    return replace(plan, request=replace(plan.request, meta={**plan.request.meta, "group_id": name}))


def _key(plan: EpisodePlan, max_steps: int) -> str:
    key = request_key(plan, max_steps=max_steps)
    if key is None:
        raise ConfigError(
            f"resume=True cannot find the request for env {plan.request.env.kind!r} in the file, since its arguments are not "
            "all JSON. Put plain values into EnvSpec.kwargs and ProtocolSpec.kwargs and build objects in the factory."
        )
    return key
