"""From a source's batch to one that can be trained on: fresh enough, kept by the algorithm, and of a length that fits.

Also the metrics of a batch before its update, and the state of the data for checkpoints. `TrainingLoop` calls it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ludic.training.algorithms import RLAlgorithm
from ludic.training.config import TrainerConfig
from ludic.training.guards import check_masks
from ludic.training.learner.metrics import batch_stats
from ludic.training.learner.packing import TooLong, fit_length
from ludic.training.learner.rank_batches import NothingToTrainOn, PreparedBatch
from ludic.training.losses import Loss
from ludic.types import BatchSource, ConfigError, Reducer, SAWBatch, SAWItem, Stateful

_NO_SAMPLES = "num_rollouts_without_samples"


async def fetch(source: BatchSource, algo: RLAlgorithm, cfg: TrainerConfig, step: int) -> PreparedBatch:
    """The next batch that has anything to train on."""
    left_out: dict[str, float] = {}
    for _ in range(cfg.max_empty_batches):
        prepared = prepare(await source.next_batch(), algo, cfg, step)
        if prepared.items:
            return prepared
        counts = {**prepared.counts, _NO_SAMPLES: float(prepared.meta.get(_NO_SAMPLES, 0))}
        left_out = {name: left_out.get(name, 0) + count for name, count in counts.items()}
        await asyncio.sleep(0)  # an empty source must not block the event loop
    raise NothingToTrainOn(
        f"{cfg.max_empty_batches} batches in a row had nothing to train on at step {step}; left out: {left_out}. "
        "Are all rewards of each group equal (zero weights), is everything older than max_lag, too long, or filtered? Were any "
        "tokens sampled?"
    )


def prepare(batch: SAWBatch, algo: RLAlgorithm, cfg: TrainerConfig, step: int) -> PreparedBatch:
    """Leave out what is too old, what the algorithm does not want, and what does not fit."""
    num_received = len(batch.items)
    fresh = [item for item in batch.items if _is_fresh(item, cfg.max_lag, step)]
    kept = SAWBatch(items=fresh, meta=dict(batch.meta))
    if algo.preprocess is not None and fresh:
        kept = algo.preprocess(kept)
    require_trainable_sampling(kept.items, algo.loss)
    fitted = fit_length(kept.items, cfg.max_seq_len, TooLong(cfg.too_long))
    items = [item for item in fitted.items if item.num_action_tokens]
    counts = {
        "num_stale": float(num_received - len(fresh)),
        "num_filtered": float(len(fresh) - len(kept.items)),
        "num_too_long": float(fitted.num_dropped),
        "num_cut": float(fitted.num_truncated),
        "num_without_action": float(len(fitted.items) - len(items)),
    }
    return PreparedBatch(items, kept.meta, counts)


def _is_fresh(item: SAWItem, max_lag: int | None, step: int) -> bool:
    if max_lag is None or item.oldest_version is None:
        return True
    return step - item.oldest_version <= max_lag


def describe(
    whole: PreparedBatch, step: int, reducers: Mapping[str, Reducer] | None, tokenizer: Any = None
) -> dict[str, float]:
    """The metrics of a batch before it is trained on."""
    if step == 0:
        check_masks(whole.items, tokenizer)
    lags = [step - item.oldest_version for item in whole.items if item.oldest_version is not None]
    stats = {**batch_stats(whole.items, whole.meta, reducers), **whole.counts}
    return stats | ({"lag_mean": sum(lags) / len(lags), "lag_max": float(max(lags))} if lags else {})


# Refuses samples whose probabilities the trainer cannot compute as the sampler did: a wrong ratio teaches silently.

_FULL = "Turn that off: top_p=1, top_k=0, min_p=0, min_tokens=0, no penalties"


def require_trainable_sampling(items: Sequence[SAWItem], loss: Loss) -> None:
    """ConfigError for the first sample that this loss would compare with something else than what it was drawn from."""
    if not loss.needs.old_logps:
        return
    for item in items:
        attached = item.attachments
        if attached.untrainable_sampling is not None and attached.actor_logps is not None:
            raise ConfigError(
                f"{_name(item)} was sampled with {attached.untrainable_sampling}, and the remaining candidates were not recorded: "
                f"its log-probs are of a distribution that the trainer cannot repeat. {_FULL}. The embedded engine records it "
                "for top_p, top_k and min_p, if log-probs are asked for: ReturnSpec.for_rl()."
            )
        has_candidates = attached.candidates is not None and len(attached.candidates.ids) > 0
        if has_candidates and attached.teacher_logps is not None:
            raise ConfigError(
                f"{_name(item)} was drawn from a part of the vocabulary, but its teacher's log-probs are over all of it; their "
                f"difference means nothing. {_FULL}, no max_think."
            )


def _name(item: SAWItem) -> str:
    return f"A sample (rollout {item.origin.rollout_id})"


# Where the data of a run stands: the state of what makes batches.


def data_states(algo: RLAlgorithm, source: BatchSource | None) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in _parts(algo, source).items()}


def load_data_states(algo: RLAlgorithm, source: BatchSource | None, state: Mapping[str, Any]) -> None:
    for name, part in _parts(algo, source).items():
        if name in state:
            part.load_state_dict(state[name])


def _parts(algo: RLAlgorithm, source: BatchSource | None) -> dict[str, Stateful]:
    # The source last: one that works ahead knows the credit rule's state before the batches that are made again.
    parts: dict[str, Any] = {"credit_assigner": algo.credit_assigner, "batch_source": source}
    return {name: part for name, part in parts.items() if isinstance(part, Stateful)}
