"""Checks samples of another process before they are trained on, so that a bad group is dropped and the run continues.

First the numbers, which must be finite and in range; then everything that the trainer does with samples before the forward
pass, so that the algorithm's own checks apply too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ludic.training.algorithms import RLAlgorithm
from ludic.training.config import TrainerConfig
from ludic.training.learner.batches import prepare
from ludic.training.learner.gradients import batch_facts
from ludic.training.learner.metrics import PREFIXES, batch_stats, prefixed
from ludic.training.learner.packing import action_fields
from ludic.training.learner.policy import require_known_ids, vocabulary_of
from ludic.types import LudicError, Reducer, SAWBatch, SAWItem

MAX_WEIGHT = 1e9
"""Times the largest ratio that losses let through (e^MAX_LOG_RATIO), squared for a norm and summed, it is finite in float32."""
TEMPERATURES = (1e-4, 1e4)
MAX_REWARD = 1e30
ROUNDING = 0.01
"""A log-prob may be above 0 by so much: samplers round."""
_WEIGHED = ("token_weights", "token_rewards", "token_values", "token_returns")


class UntrainableSamples(LudicError, ValueError):
    """Samples that this run cannot train on."""


class TrainableSamples:
    """The check of one trainer: its algorithm, its limits, its model's vocabulary and positions."""

    def __init__(
        self, algo: RLAlgorithm, cfg: TrainerConfig, model: Any, reducers: Mapping[str, Reducer] | None = None
    ) -> None:
        self._algo, self._reducers = algo, reducers
        self._cfg = replace(cfg, max_lag=None)  # how old samples may be is the source's matter
        self._vocab_size, self._max_positions = vocabulary_of(model), positions_of(model)

    def __call__(self, items: Sequence[SAWItem]) -> None:
        require_known_ids(
            items, self._vocab_size, UntrainableSamples, "Check that actor and learner have the same model."
        )
        for item in items:
            self._check_length(item)
            _check_numbers(item)
            _check_facts(item)
        self._rehearse(items)

    def _check_length(self, item: SAWItem) -> None:
        if self._max_positions is not None and len(item.input_ids) > self._max_positions:
            raise UntrainableSamples(
                f"A sample has {len(item.input_ids)} tokens; the model has {self._max_positions} positions."
            )

    def _rehearse(self, items: Sequence[SAWItem]) -> None:
        """Do what the trainer does with a batch, on the CPU and without the model."""
        prepared = prepare(SAWBatch(items=list(items)), self._algo, self._cfg, 0)
        kept = prepared.items
        if not kept:
            return  # filtered, which the trainer counts
        if self._algo.advantages is not None:
            kept = self._algo.advantages.credit(kept, [np.zeros(item.num_action_tokens, np.float32) for item in kept])
        batch_facts(kept)
        prefixed(batch_stats(kept, prepared.meta, self._reducers))
        action_fields(kept, [np.arange(len(item.input_ids)) for item in kept], torch.device("cpu"))


def _check_numbers(item: SAWItem) -> None:
    attached = item.attachments
    arrays = {name: array for name in _WEIGHED if (array := getattr(attached, name)) is not None and len(array)}
    sizes = {"weight": abs(item.weight), **{name: float(np.abs(array).max()) for name, array in arrays.items()}}
    for name, size in sizes.items():
        if not size <= MAX_WEIGHT:
            raise UntrainableSamples(
                f"{name} of a sample is as large as {size:g}; up to {MAX_WEIGHT:g} is trained on. Scale the rewards."
            )
    for name, logps in (("actor_logps", item.actor_logps), ("teacher_logps", attached.teacher_logps)):
        if logps is not None and (logps > ROUNDING).any():
            raise UntrainableSamples(f"{name} of a sample go up to {logps.max():g}; a log-probability is at most 0.")
    low, high = TEMPERATURES
    if attached.temperature and not low <= attached.temperature <= high:
        raise UntrainableSamples(
            f"A sample has the temperature {attached.temperature:g}; 0 and {low:g} to {high:g} are trained on."
        )


def _check_facts(item: SAWItem) -> None:
    named = [*(item.origin.reward_components or {}).values(), *(item.origin.scores or {}).values()]
    for reward in (item.origin.reward, item.origin.total_reward, *named):
        if reward is not None and not abs(reward) <= MAX_REWARD:
            raise UntrainableSamples(
                f"A sample's rollout earned {reward:g}; a reward is a finite number, up to {MAX_REWARD:g}."
            )
    result = item.meta.get("result")
    if isinstance(result, str) and result.startswith(PREFIXES):
        raise UntrainableSamples(
            f"A sample's rollout ended with the result {result!r:.100}, which would be taken for a metric."
        )


def positions_of(model: Any) -> int | None:
    """The number of positions of a model with learned ones; None for those that compute them (rotary)."""
    tables = {
        name.rpartition(".")[2]: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    return min((t.num_embeddings for name, t in tables.items() if name == "wpe" or "position" in name), default=None)
