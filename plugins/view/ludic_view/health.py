"""Advisories: what looks wrong in a run, how much of it, and what to do. Each rule reads the last updates and is one function.

Thresholds are those of the library's own guards where it has them: parity_tolerance, max_failed_share and max_lag.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

import numpy as np

from ludic.training.causes import likely_cause
from ludic_view.files import Card, compared_groups, is_zero_spread
from ludic_view.index import RunIndex

WINDOW = 5
"""Updates that a rule looks at: the last ones, so that an advisory goes away once its cause is gone."""
MAX_ZERO_SPREAD = 0.5
MAX_TRUNCATED = 0.25
MAX_PARSE_ERRORS = 0.25
MAX_FAILED = 0.05
PARITY_TOLERANCE = 0.05
"""`TrainerConfig.parity_tolerance`, which a run cannot set."""
ENTROPY_LEFT = 0.1
"""Share of the first updates' entropy below which it has collapsed."""
MIN_STRAGGLER_S = 5.0
MAX_STRAGGLER_SHARE = 0.5
"""Share of an update's generation that its last tenth of episodes may take alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Advisory:
    """One thing to look at."""

    level: Literal["error", "warning", "info"]
    code: str
    title: str
    detail: str
    advice: str
    step: int | None = None
    """The update at which it shows best."""
    link: str | None = None
    """The view of the page that shows it."""
    explained_by: tuple[str, ...] = ()
    """Codes of its causes: the advisory is left out when one of them is shown, since its advice would be about a consequence."""


def advisories(index: RunIndex) -> list[dict[str, Any]]:
    """Errors first, then warnings."""
    run = _Run(index)
    found = [advisory for rule in RULES for advisory in rule(run)]
    codes = {advisory.code for advisory in found}
    causes = (advisory for advisory in found if codes.isdisjoint(advisory.explained_by))
    ordered = sorted(causes, key=lambda advisory: ("error", "warning", "info").index(advisory.level))
    return [{name: getattr(each, name) for name in _Advisory.__slots__} for each in ordered]


class _Run:
    """The part of a run that rules look at."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self.cards = [card for card in index.cards if not card.is_abandoned]
        steps = sorted({card.step for card in self.cards})[-WINDOW:]
        self.recent = [card for card in self.cards if card.step in steps]
        self.played = [card for card in self.recent if card.failure is None]
        unread = [card for card in self.played if card.stop == "parse_error" or 2 * card.parse_errors > card.calls]
        is_mostly_unread = _share(len(unread), len(self.played)) > 0.5
        self.unread_causes = ("parse_errors", "truncation") if is_mostly_unread else ()
        """Cause of equal rewards, if most rollouts have hardly a reply that was read."""
        self.rows = [(step, index.metrics[step]) for step in sorted(index.metrics)]

    def cause(self) -> str | None:
        """The terminal's diagnosis of most of the last updates, if they had no gradient; None if their metrics do not tell."""
        recent = [row for _, row in self.rows if row.get("train/grad_norm") is not None][-WINDOW:]
        idle = [row for row in recent if row["train/grad_norm"] == 0 and row.get("train/zero_weight_rate") is not None]
        return likely_cause(idle, [row for _, row in self.rows]) if 2 * len(idle) > len(recent) else None

    def limit(self, name: str, default: float | None = None) -> float | None:
        """A number among the settings of rollouts."""
        value = self.index.setting("rollouts", name)
        return value if isinstance(value, (int, float)) and abs(value) < 2**63 else default

    def metric(self, name: str) -> list[tuple[int, float]]:
        return [(step, value) for step, row in self.rows if (value := row.get(name)) is not None]

    def worst_step(self, is_bad: Callable[[Card], bool]) -> int | None:
        counts = Counter(card.step for card in self.recent if is_bad(card))
        return counts.most_common(1)[0][0] if counts else None

    def link(self, *parts: object, query: str = "") -> str:
        return "#/run/" + "/".join(quote(str(part), safe="") for part in (self.index.id, *parts)) + query


Rule: TypeAlias = Callable[[_Run], Iterator[_Advisory]]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _failed_run(run: _Run) -> Iterator[_Advisory]:
    error = run.index.failure()
    if error is not None:
        yield _Advisory(
            level="error",
            code="failed_run",
            title="An error has ended the run",
            detail=error,
            advice="Remove its cause, then go on from the newest checkpoint: the same command with --resume.",
            link=run.link("metrics"),
        )


def _zero_spread(run: _Run) -> Iterator[_Advisory]:
    groups = {key: members for key, members in compared_groups(run.played).items() if len(members) > 1}
    zero = [members for members in groups.values() if is_zero_spread(members)]
    if _share(len(zero), len(groups)) <= MAX_ZERO_SPREAD:
        return
    step = Counter(members[0].step for members in zero).most_common(1)[0][0]
    rewards = Counter(members[0].reward for members in zero).most_common(1)[0][0]
    all_rewards = [card.reward for card in run.cards if card.failure is None]
    best = max(all_rewards)
    num_best = sum(members[0].reward == best for members in zero)
    if min(all_rewards) < best and _share(num_best, len(groups)) > MAX_ZERO_SPREAD:
        yield _Advisory(
            level="info",
            code="solved",
            title=f"{num_best} of {len(groups)} groups earn the run's best reward, {best:g}, throughout",
            detail="These tasks are solved. Nothing is learned from a group whose rollouts all earn the same.",
            advice="Stop here, or continue with harder tasks.",
            step=step,
            link=run.link("step", step, query="?zero_spread=1"),
        )
        return
    yield _Advisory(
        level="warning",
        code="zero_spread",
        title=f"{len(zero)} of {len(groups)} groups earned one reward throughout",
        detail=f"Nothing is learned from a group whose rollouts all earn the same; most of these earn {rewards:g}.",
        advice=run.cause()
        or "Choose tasks that are neither too easy nor too hard, raise --group-size or --temperature, or let dynamic sampling "
        "leave such groups out (--algo dapo).",
        explained_by=(*run.unread_causes, "entropy_collapse"),
        step=step,
        link=run.link("step", step, query="?zero_spread=1"),
    )


def _truncation(run: _Run) -> Iterator[_Advisory]:
    reads_cut = run.index.setting("agent", "cut_off") == "read" or run.index.setting("agent", "max_tokens") == 1
    by_reply = (None, "terminated", "parse_error")
    # An agent that reads replies as they are, of one token for example, wants them to be cut; but not if they cannot be read.
    unread = {card.id for card in run.played if card.parse_errors > card.unreadable}
    cut = [card for card in run.played if card.truncated]
    cut = [card for card in cut if card.id in unread or not (reads_cut and card.stop in by_reply)]
    if _share(len(cut), len(run.played)) <= MAX_TRUNCATED:
        return
    stops = Counter("max_tokens" if card.stop in by_reply else card.stop for card in cut)
    step = run.worst_step(lambda card: card.truncated)
    yield _Advisory(
        level="warning",
        code="truncation",
        title=f"{_share(len(cut), len(run.played)):.0%} of the last rollouts were cut off",
        detail=f"By: {', '.join(f'{name} ({count})' for name, count in stops.most_common(3))}.",
        advice="Give replies more --max-tokens and episodes more --max-steps or --max-seq-len; or reward shorter answers. "
        "docs/truncation.md compares what can be done with cut samples.",
        step=step,
        link=run.link("step", step, query="?truncated=1"),
    )


def _parse_errors(run: _Run) -> Iterator[_Advisory]:
    bad = [card for card in run.played if card.unreadable]
    if _share(len(bad), len(run.played)) <= MAX_PARSE_ERRORS:
        return
    step = run.worst_step(lambda card: card.unreadable > 0)
    yield _Advisory(
        level="warning",
        code="parse_errors",
        title=f"{_share(len(bad), len(run.played)):.0%} of the last rollouts have replies that could not be read",
        detail=f"{sum(card.unreadable for card in bad)} replies in {len(bad)} rollouts; replies that were cut off are not counted.",
        advice="Compare the replies with the format that the prompt asks for and with --parser.",
        step=step,
        link=run.link("step", step, query="?parse_error=1"),
    )


def _gauge(metric: str, limit: float, *, is_least: bool = False, title: str, **facts: Any) -> Rule:
    """The rule that the median of a metric is at most this, or at least. `title` has {worst}, the value of the worst update."""

    def rule(run: _Run) -> Iterator[_Advisory]:
        recent = run.metric(metric)[-WINDOW:]
        middle = median(value for _, value in recent) if recent else limit
        if middle < limit if is_least else middle > limit:
            step, worst = (min if is_least else max)(recent, key=lambda found: found[1])
            yield _Advisory(title=title.format(worst=worst), step=step, link=run.link("step", step), **facts)

    return rule


_mismatch = _gauge(
    "train/logp_difference_abs",
    PARITY_TOLERANCE,
    level="warning",
    code="mismatch",
    title="Sampler and trainer disagree by {worst:.3f} nats per token",
    detail=f"More than parity_tolerance={PARITY_TOLERANCE:g}. At lag 0 the two should agree up to rounding.",
    advice="Usual causes: another precision, a sampling temperature that samples do not record, an adapter that only one of them "
    "has, stale samples. train/kl_actor_policy_q1 to _q4 show where in a sample they differ; --corrections masks what is too far "
    "away.",
)
_ess = _gauge(
    "train/ess",
    0.5,
    is_least=True,
    level="warning",
    code="ess",
    title="Only {worst:.0%} of the tokens count after importance weighting",
    detail="The effective sample size is low: a few tokens with large ratios decide the update.",
    advice="Lower --max-lag or --lr, or correct for it (docs/importance_sampling.md).",
)
_clipping = _gauge(
    "train/clip_frac",
    0.3,
    level="info",
    code="clipping",
    title="The loss clips {worst:.0%} of the tokens",
    detail="Clipped tokens get no gradient.",
    advice="Lower --lr or --max-lag, so that the policy moves less between sampling and training.",
)


def _entropy(run: _Run) -> Iterator[_Advisory]:
    values = run.metric("train/entropy")
    if len(values) <= WINDOW:
        return
    # It may fall within an update or two, so the beginning is the highest of the first.
    first, last = max(value for _, value in values[:WINDOW]), median(value for _, value in values[-WINDOW:])
    if first <= 0 or last >= ENTROPY_LEFT * first:
        return
    yield _Advisory(
        level="warning",
        code="entropy_collapse",
        title=f"Entropy has fallen from {first:.3g} to {last:.3g} nats per token",
        detail="The policy hardly varies its replies any more, so siblings are alike and there is little left to compare.",
        advice="Lower --lr, most of all if it fell within a few updates; clip higher (--algo-set clip_eps_high=0.28), add an "
        "entropy bonus or a KL penalty; or stop here if the reward is what you want.",
        explained_by=("solved",),
        step=values[-1][0],
        link=run.link("metrics"),
    )


def _no_gradient(run: _Run) -> Iterator[_Advisory]:
    norms = run.metric("train/grad_norm")[-WINDOW:]
    idle = [step for step, norm in norms if norm == 0]
    if not idle or 2 * len(idle) <= len(norms):
        return
    yield _Advisory(
        level="warning",
        code="no_gradient",
        title=f"The gradient was zero in {len(idle)} of the last {len(norms)} updates",
        detail="Nothing is learned in such an update: all weights are zero, or the loss drops every sample.",
        advice=run.cause()
        or "Look at the rewards of the groups first; then at parse errors, clipping and corrections.",
        explained_by=(*run.unread_causes, "failed_run", "solved", "zero_spread", "entropy_collapse"),
        step=idle[-1],
        link=run.link("step", idle[-1]),
    )


def _failures(run: _Run) -> Iterator[_Advisory]:
    failed = [card for card in run.cards if card.failure is not None]
    if not failed:
        return
    share = _share(len([c for c in run.recent if c.failure is not None]), len(run.recent))
    limit = run.limit("max_failed_share", 0.5) or 0.0
    common, count = Counter(card.failure or "" for card in failed).most_common(1)[0]
    yield _Advisory(
        level="warning" if share > min(MAX_FAILED, limit) else "info",
        code="failed_episodes",
        title=f"{len(failed)} episodes failed, {share:.1%} of the last updates'",
        detail=f"{count} times: {common:.200}. A failed episode takes its whole group out of the batch; above "
        f"max_failed_share={limit:g} the run stops, unless a judge or reward function failed.",
        advice="Open one: its traceback names the line. A time limit is raised with --episode-timeout or --env-timeout.",
        step=failed[-1].step,
        link=run.link("rollout", failed[-1].id),
    )


def _stragglers(run: _Run) -> Iterator[_Advisory]:
    by_step: dict[int, list[Card]] = {}
    for card in run.recent:
        if card.started_ns is not None and card.ended_ns is not None:
            by_step.setdefault(card.step, []).append(card)
    worst: tuple[float, float, int, Card] | None = None
    for step, cards in by_step.items():
        if len(cards) < 8:
            continue
        ends = np.sort([card.ended_ns for card in cards]) / 1e9
        began = min(card.started_ns or 0 for card in cards) / 1e9
        alone, whole = float(ends[-1] - np.quantile(ends, 0.9)), float(ends[-1] - began)
        last = max(cards, key=lambda card: card.ended_ns or 0)
        if alone >= MIN_STRAGGLER_S and alone > MAX_STRAGGLER_SHARE * whole and (worst is None or alone > worst[0]):
            worst = alone, whole, step, last
    if worst is None:
        return
    alone, whole, step, last = worst
    yield _Advisory(
        level="warning",
        code="stragglers",
        title=f"The last tenth of the episodes takes {alone:.0f} of {whole:.0f} s",
        detail=f"In update {step} the other episodes had ended; the last one has {last.turns} turns and {last.tokens} tokens.",
        advice="Generate ahead (--max-lag 1), limit long episodes (--max-steps, --max-tokens, --episode-timeout), or look for a "
        "slow env or tool.",
        step=step,
        link=run.link("time", query=f"?step={step}"),
    )


def _lag(run: _Run) -> Iterator[_Advisory]:
    limit = run.limit("max_lag")
    stale = run.metric("train/num_stale")[-WINDOW:]
    num_stale = sum(value for _, value in stale)
    lags = run.metric("train/lag_max")[-WINDOW:]
    if num_stale:
        step = max(stale, key=lambda found: found[1])[0]
        yield _Advisory(
            level="warning",
            code="stale",
            title=f"{num_stale:.0f} samples were too old and left out of the last updates",
            detail="The policy has moved on too far since their oldest token"
            + (f": more than max_lag={limit} versions." if limit is not None else "."),
            advice="Fewer actors or a smaller --max-waiting keep samples fresher; a larger --max-lag with corrections uses them.",
            step=step,
            link=run.link("time", query=f"?step={step}"),
        )
    elif limit and lags and min(value for _, value in lags) >= limit:
        yield _Advisory(
            level="info",
            code="lag",
            title=f"Samples are as old as max_lag={limit} allows",
            detail="Every one of the last updates had samples at the limit.",
            advice="The learner is slower than sampling: give it more of the hardware, or lower the number of actors.",
            step=lags[-1][0],
            link=run.link("time"),
        )


def _damaged(run: _Run) -> Iterator[_Advisory]:
    if not (damage := run.index.damage()):
        return
    yield _Advisory(
        level="info",
        code="damaged",
        title="A part of the run's files cannot be read",
        detail=f"{'; '.join(damage)}. It is left out here.",
        advice="A full disk or a killed process leaves damaged lines; nothing has to be done about them. Settings have to "
        "be repaired.",
        link=run.link("metrics"),
    )


RULES: Sequence[Rule] = (
    _failed_run,
    _no_gradient,
    _zero_spread,
    _truncation,
    _parse_errors,
    _mismatch,
    _ess,
    _clipping,
    _entropy,
    _failures,
    _stragglers,
    _lag,
    _damaged,
)
