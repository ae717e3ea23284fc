"""Filters of single samples, and preprocess hooks on whole batches.

A filter reads `SAWItem.origin`; True keeps an item. An item whose origin does not state a fact is kept by the filters that
drop, and dropped by those that keep. Every named filter is a predicate and a factory of itself, so `drop_truncated`,
`drop_truncated()` and `drop_truncated(item)` all do what they look like.

A preprocess hook takes a batch, as an algorithm gets it, and returns a new one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, overload

import numpy as np

from ludic.types import (
    ConfigError,
    FloatArray,
    GroupKey,
    MessageSpan,
    SampleAttachments,
    SampleFilter,
    SAWBatch,
    SAWItem,
    Step,
    is_parse_failure,
    samples_by_session,
)
from ludic.types.columns import NOTHING_SAMPLED

PreprocessFn: TypeAlias = Callable[[SAWBatch], SAWBatch]

# --- filters ---


class NamedFilter:
    """A filter that may also be called without an item, and then gives itself."""

    def __init__(self, keeps: Callable[[SAWItem], bool]) -> None:
        self._keeps = keeps
        self.__name__ = keeps.__name__
        self.__doc__ = keeps.__doc__

    @overload
    def __call__(self) -> "NamedFilter": ...
    @overload
    def __call__(self, item: SAWItem) -> bool: ...
    def __call__(self, item: SAWItem | None = None) -> "NamedFilter | bool":
        return self if item is None else self._keeps(item)

    def __repr__(self) -> str:
        return self.__name__


@NamedFilter
def keep_all(item: SAWItem) -> bool:
    """Keep everything."""
    return True


@NamedFilter
def drop_truncated(item: SAWItem) -> bool:
    """Drop what a limit of the env or the protocol cut off."""
    return not item.origin.truncated


@NamedFilter
def drop_incomplete_completions(item: SAWItem) -> bool:
    """Drop replies that the model did not finish (it ran out of tokens)."""
    return item.origin.finish_reason != "length"


@NamedFilter
def drop_parse_errors(item: SAWItem) -> bool:
    """Drop replies that could not be read as an action."""
    return not item.origin.parse_error


@NamedFilter
def keep_env_steps(item: SAWItem) -> bool:
    """Keep turns that reached the env."""
    return item.origin.step_kind == "env"


@NamedFilter
def keep_agent_steps(item: SAWItem) -> bool:
    """Keep turns that ended with a model call and never reached the env."""
    return item.origin.step_kind == "agent"


def combine(*filters: SampleFilter) -> SampleFilter:
    """Keep what every filter keeps."""
    return lambda item: all(keeps(item) for keeps in filters)


def any_of(*filters: SampleFilter) -> SampleFilter:
    """Keep what at least one filter keeps."""
    return lambda item: any(keeps(item) for keeps in filters)


def apply_filter(items: Iterable[SAWItem], sample_filter: SampleFilter) -> list[SAWItem]:
    """The items that the filter keeps, in order."""
    return [item for item in items if sample_filter(item)]


def default_step_selector(step: Step) -> bool:
    """Steps that close a turn: env steps, and replies to the env that could not be read."""
    return step.kind == "env" or is_parse_failure(step)


# --- preprocess hooks ---


def compose_preprocess(*fns: PreprocessFn) -> PreprocessFn:
    """All hooks, one after the other."""

    def composed(batch: SAWBatch) -> SAWBatch:
        for fn in fns:
            batch = fn(batch)
        return batch

    return composed


def validate_actor_logps(batch: SAWBatch) -> SAWBatch:
    """The batch itself, or a ValueError if an item lacks the log-probs that importance ratios are made of."""
    missing = [i for i, item in enumerate(batch.items) if item.actor_logps is None]
    if missing:
        raise ValueError(
            f"{_share(missing, batch)} no actor log-probs, which this algorithm's ratios need. Ask the sampler for "
            "them: InferenceSpec(return_=ReturnSpec.for_rl())."
        )
    logps = [item.actor_logps for item in batch.items if item.actor_logps is not None]
    broken = [i for i, own in enumerate(logps) if not np.isfinite(own).all()]
    if broken:
        raise ValueError(
            f"{_share(broken, batch)} actor log-probs that are not finite. A token that was sampled has a probability "
            "above 0; look at what the sampler returns."
        )
    return batch


def _share(indices: list[int], batch: SAWBatch) -> str:
    shown = ", ".join(map(str, indices[:8])) + (", …" if len(indices) > 8 else "")
    return f"{len(indices)} of {len(batch)} items (indices {shown}) have"


def forget_temperature(batch: SAWBatch) -> SAWBatch:
    """The batch as if its tokens had been sampled at temperature 1, from the whole vocabulary.

    For imitation, which trains the model's own distribution. The sampler's log-probs are dropped too: compared with the model's
    own they would look like a mismatch of sampler and trainer.
    """
    forgotten: dict[str, Any] = {"temperature": None, "candidates": None, "untrainable_sampling": None}
    if any(_is_processed(item.attachments) or item.actor_logps is None for item in batch.items):
        forgotten["actor_logps"] = None  # of all: a batch knows them of every sample or of none
    items = [replace(item, attachments=replace(item.attachments, **forgotten)) for item in batch.items]
    return SAWBatch(items=items, meta=dict(batch.meta))


def _is_processed(attached: SampleAttachments) -> bool:
    """True if the sampler's log-probs are of another distribution than the model's own. Greedy ones are the model's own."""
    is_scaled = attached.temperature not in (None, 0, 1)
    return is_scaled or attached.candidates is not None or attached.untrainable_sampling is not None


def drop_zero_weight_samples(batch: SAWBatch, *, eps: float = 1e-4) -> SAWBatch:
    """The batch without items that could not move the policy: |weight| ≤ eps on every action token.

    Their share is in meta["zero_weight_frac"].
    """
    _check_eps("drop_zero_weight_samples", eps)
    kept = [item for item in batch.items if _largest_weight(item) > eps]
    return _reduced(batch, kept, "zero_weight_frac")


def _largest_weight(item: SAWItem) -> float:
    own = item.attachments.token_weights
    return abs(item.weight) if own is None else float(np.abs(own).max(initial=0.0))


def filter_zero_variance_groups(batch: SAWBatch, *, eps: float = 1e-6) -> SAWBatch:
    """The batch without groups whose rollouts all have the same weights: comparing them teaches nothing.

    Weights are compared rollout by rollout, however many items (segments, turns, threads of its session) each has. Items
    without a group, and groups with one rollout, pass. The share of dropped items is in meta["zvp_filter_frac"].
    """
    _check_eps("filter_zero_variance_groups", eps)
    groups: dict[GroupKey, list[list[SAWItem]]] = {}
    for session in samples_by_session(batch.items):
        if (key := session[0].origin.group) is not None:
            groups.setdefault(key, []).append(session)
    flat = {key for key, rollouts in groups.items() if _are_alike(rollouts, eps)}
    kept = [item for item in batch.items if item.origin.group not in flat]
    return _reduced(batch, kept, "zvp_filter_frac")


def _are_alike(rollouts: Iterable[list[SAWItem]], eps: float) -> bool:
    profiles = [_profile(items, eps) for items in rollouts]
    if len(profiles) < 2 or len({len(profile) for profile in profiles}) > 1:
        return False
    spread = np.std(np.array(profiles, dtype=np.float64), axis=0, ddof=1)
    return bool((spread <= eps).all())


def _profile(items: list[SAWItem], eps: float) -> FloatArray:
    """The weights of a rollout in order, repetitions left out: how many tokens share a weight does not matter."""
    weights = np.concatenate([_weights(item) for item in items])
    is_new = np.abs(np.diff(weights, prepend=np.float32(np.inf))) > eps
    return weights[is_new]


def _weights(item: SAWItem) -> FloatArray:
    """Weights of its action tokens, or the item's one weight."""
    own = item.attachments.token_weights
    return own if own is not None else np.array([item.weight], dtype=np.float32)


def _reduced(batch: SAWBatch, kept: list[SAWItem], share_key: str) -> SAWBatch:
    dropped = len(batch.items) - len(kept)
    return SAWBatch(items=kept, meta={**batch.meta, share_key: dropped / len(batch.items) if batch.items else 0.0})


def _check_eps(function: str, eps: float) -> None:
    if not eps >= 0:
        raise ConfigError(f"{function}(eps={eps}); it must be 0 or more.")


# --- roles: hooks that choose by the message that a token came from ---


def train_on_messages(batch: SAWBatch, *, choose: Callable[[MessageSpan], bool]) -> SAWBatch:
    """The batch with other action tokens: the texts of the chosen messages; for imitation, which needs no sampler.

    Of a sampled reply these are its sampled tokens, of another message of an assistant its text and its closing. Numbers per
    action token (log-probs, rewards) do not fit the new ones and are dropped; samples without a chosen message are left out.
    """
    items = []
    for item in batch.items:
        mask = item.span_mask(choose)
        for span in item.attachments.message_spans:
            own = item.action_mask[span.start : span.end]
            if choose(span) and own.any():
                mask[span.start : span.end] = own
            elif choose(span) and span.role == "assistant":
                mask[span.text_start : span.end] = True
        mask[:1] = False  # nothing comes before the first token that could predict it
        if mask.any():
            attachments = replace(item.attachments, **NOTHING_SAMPLED)
            items.append(replace(item, action_mask=mask, attachments=attachments))
    return SAWBatch(items=items, meta=dict(batch.meta))


def train_on_roles(batch: SAWBatch, *, roles: Sequence[str]) -> SAWBatch:
    """`train_on_messages` of these roles: system, user, assistant, tool."""
    wanted = frozenset(roles)
    return train_on_messages(batch, choose=lambda span: span.role in wanted)


def observe_roles(batch: SAWBatch, *, roles: Sequence[str]) -> SAWBatch:
    """The batch whose observation tokens (`SAWItem.observation_mask`) are only the texts of messages of these roles."""
    named = tuple(roles)
    items = [replace(item, attachments=replace(item.attachments, observed_roles=named)) for item in batch.items]
    for item in items:
        item.observation_mask  # noqa: B018 - raises if a sample does not know its messages
    return SAWBatch(items=items, meta=dict(batch.meta))


ROLES = ("system", "user", "assistant", "tool")


def checked_roles(roles: str | Sequence[str]) -> tuple[str, ...]:
    """The roles of `train_on`; ConfigError for an unknown one."""
    given = (roles,) if isinstance(roles, str) else tuple(roles)
    for role in given:
        if role not in ROLES:
            raise ConfigError(f"train_on = {list(given)}: there is no role {role!r}; there are {', '.join(ROLES)}.")
    return given


# --- rejection: hooks that choose which samples are good enough to be imitated ---


def keep_rewarded(batch: SAWBatch, *, min_reward: float = 1.0) -> SAWBatch:
    """The samples of rollouts that earned `min_reward` in total, threads of their sessions included; their share is in
    meta["accepted_frac"]."""
    accepted = {id(i) for own in samples_by_session(batch.items) if _total_reward(own) >= min_reward for i in own}
    kept = [item for item in batch.items if id(item) in accepted]
    share = len(kept) / len(batch.items) if batch.items else 0.0
    return SAWBatch(items=kept, meta={**batch.meta, "accepted_frac": share})


def keep_distinct(batch: SAWBatch) -> SAWBatch:
    """The batch with each token sequence once; the share left out is in meta["duplicate_frac"]."""
    first: dict[bytes, SAWItem] = {}
    for item in batch.items:
        first.setdefault(item.input_ids.tobytes(), item)
    share = 1 - len(first) / len(batch.items) if batch.items else 0.0
    return SAWBatch(items=list(first.values()), meta={**batch.meta, "duplicate_frac": share})


def keep_few_per_group(batch: SAWBatch, *, max_rollouts: int) -> SAWBatch:
    """At most `max_rollouts` of each group, those with the highest reward, so that easy prompts do not outweigh the others.

    Groups are those of credit assignment (`GroupKey`): each role of an episode has its own. Of equal ones the first are kept.
    Samples without a group pass.
    """
    if max_rollouts < 1:
        raise ConfigError(f"max_rollouts={max_rollouts}; keep at least 1, or leave samples out by min_reward.")
    groups: dict[GroupKey | None, list[list[SAWItem]]] = {}
    for session in samples_by_session(batch.items):
        groups.setdefault(session[0].origin.group, []).append(session)
    chosen = {
        id(item)
        for group, sessions in groups.items()
        for place, session in enumerate(sorted(sessions, key=lambda session: -_total_reward(session)))
        if group is None or place < max_rollouts
        for item in session
    }
    return SAWBatch(items=[item for item in batch.items if id(item) in chosen], meta=dict(batch.meta))


def _total_reward(session: Sequence[SAWItem]) -> float:
    """Total reward of the rollouts these samples come from."""
    rewards = {item.origin.rollout_id: item.origin.total_reward for item in session}
    known = [reward for reward in rewards.values() if reward is not None]
    if len(known) < len(rewards):
        raise ConfigError(
            "A sample has no reward of its rollout (origin.total_reward), so it cannot be accepted or rejected. Items that Ludic "
            "makes from rollouts have it; give your own SampleOrigin(total_reward=…), or use make_sft for demonstrations."
        )
    return sum(known)
