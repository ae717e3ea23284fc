"""When and how a learner publishes its weights: whole, gathered from ranks, as an adapter, or shared in place.

Only this module asks what a publisher can do.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from ludic.distributed.publisher import SharedWeightsPublisher, publish_gathered
from ludic.distributed.ranks import Ranks
from ludic.models.lora import dense_parameters, dense_weights
from ludic.types import AdapterPublisher, ChecksServers, ConfigError, InPlacePublisher, PolicyPublisher

logger = logging.getLogger(__name__)

ParamFilter: TypeAlias = Callable[[str, torch.Tensor], bool]
"""True if the weight of this name is published."""


def is_due(every: int | None, version: int, since: int) -> bool:
    """True if one of the versions after `since` is published, if every n-th one is; None is 1, 0 is never."""
    every = 1 if every is None else every
    return every > 0 and version // every > since // every


class WeightUpdates:
    """Publishes the weights of one model. All ranks make the same calls; the first one sends."""

    def __init__(
        self,
        model: Any,
        publisher: PolicyPublisher | None,
        *,
        ranks: Ranks,
        is_spread: bool,
        param_filter: ParamFilter | None,
        every: int | None,
    ) -> None:
        """`is_spread`: each rank has only a part of the weights. `every`: publish after every n-th step; None is 1, 0 is never."""
        self.publisher = publisher
        self._model, self._ranks = model, ranks
        self._is_spread, self._filter, self._every = is_spread, param_filter, every
        self._in_place = publisher if isinstance(publisher, InPlacePublisher) else None
        self._verifies = publisher if isinstance(publisher, ChecksServers) else None
        self._adapter = publisher if isinstance(publisher, AdapterPublisher) else None
        sends = publisher is not None and self._in_place is None
        self._sends, self._can_verify = ranks.broadcast((sends, self._verifies is not None))
        """Those of the first rank: the others help to gather weights, and have no publisher."""
        self._published: int | None = None
        """The last version that was sent; None before the first."""

    @property
    def shares_weights(self) -> bool:
        """True if the publisher's engine holds the very weights that are trained."""
        return self._in_place is not None

    def check(self) -> None:
        """ConfigError if publisher, model and settings do not fit each other; on the rank that calls it."""
        name = type(self.publisher).__name__
        if self._in_place is not None:
            self._check_in_place(self._in_place)
        if self._adapter is not None:
            if self._is_spread:
                raise ConfigError(
                    f"{name} reads the adapter from the model, whose weights are spread over ranks. Publish merged weights: "
                    "create_vllm_publisher(client)."
                )
            self._adapter.require_trained(self._model)
            if self._filter is not None:
                raise ConfigError(
                    "param_filter chooses among merged weights, but the publisher sends the adapter alone."
                )
        if self._every and self.publisher is None and self._ranks.is_first:
            raise ConfigError(f"sync_every_steps={self._every}, but there is no publisher to sync through.")

    def _check_in_place(self, publisher: InPlacePublisher) -> None:
        name = type(publisher).__name__
        if self._is_spread:
            raise ConfigError(
                f"{name} serves the very weights that are trained, but these are spread over ranks. Serve a copy of the model: "
                "with vLLM, or ludic.distributed.ClientPublisher(LocalEngine(copy))."
            )
        if isinstance(publisher, SharedWeightsPublisher):
            publisher.require_shared(self._model)
        if self._every not in (None, 1):
            raise ConfigError(
                f"sync_every_steps={self._every}, but {name} serves the very weights that are trained: every step is published. "
                "Leave it None."
            )

    def begin(self, version: int, *, is_resumed: bool) -> None:
        """Send restored weights to servers. An engine that shares the weights gets the version: it may have served another run."""
        if is_resumed and self._sends:
            self._send(version)
        if self._in_place is not None:
            self._in_place.publish({}, version=version)

    def pause_engine(self, version: int) -> contextlib.AbstractContextManager[None]:
        """Entered around a change of the weights: an engine that shares them waits, and continues with `version`."""
        return contextlib.nullcontext() if self._in_place is None else self._in_place.updating(version)

    def after_batch(self, version: int, since: int) -> bool:
        """Send if one of the versions after `since` is due; returns whether the next samples are of this version. An engine that
        shares the weights has it already."""
        if self._sends:
            if not is_due(self._every, version, since):
                return False
            self._send(version)
        return True

    def check_servers(self, version: int) -> None:
        """Send again if a server has lost the weights by a restart."""
        if not self._can_verify or self._published is None:
            return
        is_lost = False
        if self._ranks.is_first and self._verifies is not None:
            is_lost = not self._verifies.is_current(self._published)
        if self._ranks.broadcast(is_lost):
            logger.warning("a server has lost version %d (was it restarted?); publishing again", self._published)
            self._send(version)

    def _send(self, version: int) -> None:
        def send(weights: Mapping[str, torch.Tensor]) -> None:
            assert self.publisher is not None, "only the first rank sends, and it has a publisher"
            self.publisher.publish(weights, version=version)

        wanted = self._filter or (lambda name, weight: True)
        if self._adapter is not None:
            send({})
        elif self._is_spread:  # a filter sees names, shapes and types; values only come one by one
            chosen = [w for w in dense_weights(self._model) if wanted(w.name, w.without_values())]
            publish_gathered(chosen, self._ranks, send)
        else:
            send({name: weight for name, weight in dense_parameters(self._model) if wanted(name, weight)})
        self._published = version
