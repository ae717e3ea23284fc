"""When and how a trainer hands its weights on: whole, gathered from ranks, as an adapter, or shared in place."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ludic.distributed.publish.gather import publish_gathered
from ludic.distributed.ranks import Ranks
from ludic.models.lora import dense_parameters, dense_weights
from ludic.training.learner.rank_setup import RankPlan
from ludic.types import AdapterPublisher, ChecksServers, InPlacePublisher, PolicyPublisher

logger = logging.getLogger(__name__)

ParamFilter = Callable[[str, torch.Tensor], bool]


class WeightUpdates:
    """The weights of one model, on their way to whatever serves them. All ranks call it alike; the first one sends."""

    def __init__(
        self,
        model: Any,
        publisher: PolicyPublisher | None,
        *,
        ranks: Ranks,
        roles: RankPlan,
        is_spread: bool,
        param_filter: ParamFilter | None,
        every: int | None,
    ) -> None:
        self.publisher = publisher
        self._model, self._ranks, self._roles = model, ranks, roles
        self._is_spread, self._wanted = is_spread, param_filter or _everything
        self._every = every if every is not None else 1
        self._published: int | None = None
        """The version that other processes serve, as far as we know; None before the first."""

    def while_changing_weights(self, version: int) -> contextlib.AbstractContextManager[None]:
        """An engine that holds these very weights stands still meanwhile."""
        if isinstance(self.publisher, InPlacePublisher):
            return self.publisher.updating(version)
        return contextlib.nullcontext()

    def after_step(self, version: int) -> bool:
        """Whether whoever samples next samples from this version; an engine that shares the weights has it already."""
        if self._roles.publishes:
            if not self._every or version % self._every:
                return False
            self._push(version)
        return True

    def begin(self, version: int, *, is_resumed: bool) -> None:
        """Servers get what was restored; an engine that shares the weights may have served another run, whose versions end."""
        if is_resumed and self._roles.publishes:
            self._push(version)
        if isinstance(self.publisher, InPlacePublisher):
            self.publisher.publish({}, version=version)

    def restore_servers(self, version: int) -> None:
        """A server that was restarted has forgotten the weights; it gets them again before anybody samples from it."""
        if not self._roles.checks_servers or self._published is None:
            return
        is_lost = False
        if self._ranks.is_first and isinstance(self.publisher, ChecksServers):
            is_lost = not self.publisher.is_current(self._published)
        if self._ranks.broadcast(is_lost):
            logger.warning("a server has lost version %d (was it restarted?); publishing again", self._published)
            self._push(version)

    def _push(self, version: int) -> None:
        def hand_on(weights: Mapping[str, torch.Tensor]) -> None:
            assert self.publisher is not None, "whoever calls it has one"
            self.publisher.publish(weights, version=version)

        if isinstance(self.publisher, AdapterPublisher):
            hand_on({})
        elif self._is_spread:  # a filter sees names, shapes and types; values only come one by one
            chosen = [w for w in dense_weights(self._model) if self._wanted(w.name, w.without_values())]
            publish_gathered(chosen, self._ranks, hand_on)
        else:
            hand_on({name: weight for name, weight in dense_parameters(self._model) if self._wanted(name, weight)})
        self._published = version


def _everything(name: str, weight: torch.Tensor) -> bool:
    return True
