"""Stability of off-policy corrections on stale data: the embedded engine serves weights that are k updates old.

Each cell is one correction, one lag, three seeds: a tiny Llama learns to write lines of which half are letters
(letter_lines.py) with group-relative weights. A second experiment leaves the lag at 0 and disturbs the sampler's weights
instead, by noise of a given share of each matrix's spread: sampler and trainer then differ for good, as another precision
makes them differ. Lag counts batches. Ways with "×4" take four optimizer steps on each (two passes of two mini-batches) at 0.3 of
the learning rate; those with "KL" are held near the first weights. Ways named as a preset are that preset, averaged over tokens
where `ludic train` does so.

    OMP_NUM_THREADS=1 python research/experiments/stale_data.py                          # all: table, research/results/stale_data.jsonl, .png
    OMP_NUM_THREADS=1 python research/experiments/stale_data.py --lags 8 --seeds 0 --only none token-TIS
    OMP_NUM_THREADS=1 python research/experiments/stale_data.py --only grpo rloo --noises --out research/results/stale_data_presets.jsonl
    OMP_NUM_THREADS=1 python research/experiments/stale_data.py --from research/results/stale_data.jsonl      # table and plot alone
"""

import argparse
import asyncio
import copy
import inspect
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from letter_lines import engine_of, lines, tiny_model

from ludic import registry
from ludic.inference.local import LocalEngine
from ludic.run.config.training import AlgoSettings
from ludic.run.resolve import NEGATIVE_MASK, open_reduction
from ludic.training import RLAlgorithm, Trainer, TrainerConfig
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.losses import (
    CorrectedLoss,
    Correction,
    DivergenceMask,
    Loss,
    MaskedCausalLMCrossEntropyLoss,
    NegativeSequenceMask,
    Regularized,
    SequenceMask,
    SequenceRejection,
    SequenceTruncation,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    TokenMask,
    TokenTruncation,
)
from ludic.training.losses.corrections import make_correction
from ludic_pipeline.generation import SAMPLE_BAND, TOKEN_BAND

MASKED = ("cispo", "scalerl", "sapo")
"""Presets that are also run with the negative sequence mask."""
ON_POLICY = (
    "none", "PPO clip", "PPO clip ×4", "decoupled ×4", "grpo", "scalerl", "rloo", "reinforce", "maxrl", "sapo", "gmpo", "dr_grpo",
    "reinforce_pp", "reinforce_baseline", *(f"{name}{mask} ×4" for name in MASKED for mask in ("", ", negative mask")),
)  # fmt: skip
"""If every ratio is 1, and all samples are equally long, the other corrections equal none, and the other presets grpo."""
RESULTS = Path(__file__).parents[1] / "results"
GROUP_SIZE = 8


def corrected(*corrections: Correction) -> Loss:
    """−A ln π, a loss without a ratio, times the corrections."""
    return CorrectedLoss(MaskedCausalLMCrossEntropyLoss(), corrections)


def clipped(**settings: Any) -> Loss:
    return TokenClippedSurrogateLoss(length_normalize=True, **settings)


def near_the_first(*, weighted: bool) -> Loss:
    """PPO's clip, and a KL to the weights from before training."""
    return Regularized(
        clipped(),
        {"kl": TokenKLLoss(coeff=0.02, to="reference", estimator="k3", importance_weighted=weighted, weight_cap=2.0)},
    )


def preset(name: str, group_size: int = GROUP_SIZE) -> RLAlgorithm:
    """As `ludic train` makes it: averaged over tokens where the preset leaves that open."""
    parameters = inspect.signature(registry.spec("algorithm", name).load()).parameters
    settings: dict[str, Any] = {"group_size": group_size} if "group_size" in parameters else {}
    if reduction := open_reduction(AlgoSettings(algo=name)):
        settings["reduction"] = reduction
    return registry.make("algorithm", name, **settings)


def masked(name: str, *masks: str) -> RLAlgorithm:
    """The preset inside the mask that some presets have by default, or inside these."""
    made = preset(name)
    return replace(made, loss=CorrectedLoss(made.loss, [make_correction(mask) for mask in masks or [NEGATIVE_MASK]]))


@dataclass(frozen=True, slots=True)
class Way:
    make: Callable[[], Loss | RLAlgorithm]
    """A loss is for group-normalised returns."""
    num_passes: int = 1
    """Over each batch, of two mini-batches each if there are several."""

    def algorithm(self, name: str) -> RLAlgorithm:
        made = self.make()
        if isinstance(made, RLAlgorithm):
            return made
        return RLAlgorithm(name=name, credit_assigner=GroupNormalizedReturn(GROUP_SIZE), loss=made)

    def trainer(self, lr: float) -> dict[str, Any]:
        if self.num_passes == 1:
            return {"lr": lr}
        return {"lr": 0.3 * lr, "updates_per_batch": self.num_passes, "mini_batches": 2}


DPPO_LIMIT = 0.001
"""Of 264 tokens each begins with a probability of 0.004: a limit for words of a language would never act."""
PRESETS = (
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "scalerl", "sapo", "gmpo", "rloo", "reinforce", "reinforce_baseline",
    "reinforce_pp", "maxrl",
)  # fmt: skip
PIPELINE_MASKS = ("token_mask={},{}".format(*TOKEN_BAND), "sequence_mask={},{}".format(*SAMPLE_BAND))
"""Those of engine = pipeline."""
WAYS: dict[str, Way] = {
    "none": Way(lambda: corrected()),
    "token-TIS": Way(lambda: corrected(TokenTruncation(2.0))),
    "seq-TIS": Way(lambda: corrected(SequenceTruncation(2.0))),
    "seq-reject": Way(lambda: corrected(SequenceRejection(2.0))),
    "token-mask": Way(lambda: corrected(TokenMask(0.5, 2.0))),
    "geometric": Way(lambda: corrected(SequenceMask(0.9, 1.1))),
    "negative mask": Way(lambda: corrected(NegativeSequenceMask(0.05))),
    "PPO clip": Way(clipped),
    "clip, negative mask": Way(lambda: CorrectedLoss(clipped(), [NegativeSequenceMask(0.05)])),
    "DPPO": Way(
        lambda: CorrectedLoss(clipped(clip_eps_low=1e6, clip_eps_high=1e6, ratio_clip=20), [DivergenceMask(DPPO_LIMIT)])
    ),
    "PPO clip ×4": Way(clipped, num_passes=2),
    "decoupled ×4": Way(lambda: clipped(behavior_cap=2.0), num_passes=2),
    "KL": Way(lambda: near_the_first(weighted=False)),
    "weighted KL": Way(lambda: near_the_first(weighted=True)),
    **{name: Way(partial(preset, name)) for name in PRESETS},
    **{f"{name}, negative mask": Way(partial(masked, name)) for name in MASKED},
    **{f"{name} ×4": Way(partial(preset, name), num_passes=2) for name in MASKED},
    **{f"{name}, negative mask ×4": Way(partial(masked, name), num_passes=2) for name in MASKED},
    "cispo, pipeline masks": Way(partial(masked, "cispo", *PIPELINE_MASKS)),
    "cispo, pipeline and negative masks": Way(partial(masked, "cispo", *PIPELINE_MASKS, NEGATIVE_MASK)),
}


class LaggingPublisher:
    """Serves the weights of `lag` updates ago, optionally with noise."""

    def __init__(self, engine: LocalEngine, lag: int, noise: float, seed: int) -> None:
        self._engine, self._noise = engine, noise
        self._waiting: deque[tuple[dict[str, Any], int | None]] = deque(maxlen=lag + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        copied = {name: value.detach().clone() for name, value in state_dict.items()}
        self._waiting.append((copied, version))
        if len(self._waiting) == self._waiting.maxlen:
            weights, of_version = self._waiting[0]
            self._engine.sync_weights({name: self._disturbed(w) for name, w in weights.items()}, version=of_version)

    def _disturbed(self, weight: torch.Tensor) -> torch.Tensor:
        if not self._noise or weight.ndim < 2:
            return weight
        return weight + self._noise * weight.std() * torch.randn(weight.shape, generator=self._generator)


def run(way: str, lag: int, noise: float, seed: int, num_batches: int, lr: float) -> dict[str, Any]:
    """Run once; returns the measurements."""
    started = time.perf_counter()
    model = tiny_model(seed)
    engine = engine_of(copy.deepcopy(model))
    algorithm = WAYS[way].algorithm(way)
    publisher = LaggingPublisher(engine, lag, noise, seed)
    publisher.publish(model.state_dict(), 0)
    trainer = Trainer(
        model=model,
        algo=algorithm,
        batch_source=lines(engine, algorithm, seed=seed, group_size=GROUP_SIZE),
        cfg=TrainerConfig(max_seq_len=64, weight_decay=0.0, seed=seed, parity_tolerance=1e9, **WAYS[way].trainer(lr)),
        publisher=publisher,
        reference=copy.deepcopy(model) if algorithm.loss.needs.reference else None,
    )
    history, ended = [], "done"
    try:
        for _ in range(num_batches):
            history.append([trainer.train_step_sync() for _ in range(trainer.cfg.steps_per_batch)][-1])
    except FloatingPointError as error:
        ended = str(error)
    engine.sync_weights(model.state_dict())
    reward = asyncio.run(_reward(engine, algorithm, seed))
    engine.close()
    return _record(way, lag, noise, seed, reward, history, ended) | {"seconds": time.perf_counter() - started}


async def _reward(engine: LocalEngine, algorithm: RLAlgorithm, seed: int) -> float:
    """Reward of the final weights on new lines."""
    batch = await lines(engine, algorithm, seed=seed + 500, num_prompts=16, group_size=GROUP_SIZE).next_batch()
    return fmean(item.origin.total_reward or 0.0 for item in batch.items)


def _record(
    way: str, lag: int, noise: float, seed: int, reward: float, history: Sequence[dict[str, float]], ended: str
) -> dict[str, Any]:
    def mean_of(name: str) -> float | None:
        values = [stats[name] for stats in history if name in stats]
        return fmean(values) if values else None

    curve = [round(stats["train/avg_total_reward"], 4) for stats in history]
    names = ["ess", "ess_sequence", "kl_actor_policy", "kl_actor_policy_q1", "kl_actor_policy_q4", "entropy"]
    names += ["correction_mean", "correction_zero_frac", "correction_capped_frac", "correction_ess", "clip_frac"]
    names += ["chi_square", "chi_square_sequence", "log_perplexity_gap", "behavior_capped_frac", "kl/kl_mean"]
    return {
        "way": way, "lag": lag, "noise": noise, "seed": seed, "final_reward": reward, "best_reward": max(curve), "ended": ended,
        "late_reward": fmean(curve[-len(curve) // 5 :]), "collapsed": ended != "done" or reward < curve[0], "curve": curve,
        **{name: mean_of(f"train/{name}") for name in names},
    }  # fmt: skip


# --- results ---


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: one row per correction and setting, means over seeds."""
    columns = (
        "way, lag, noise, late reward, worst seed, last weights, below the start, KL, chi², gap, ess, ess (sequence)"
    )
    columns += ", masked or clipped, capped"
    rows = [f"| {columns.replace(', ', ' | ')} |", "|---" * 14 + "|"]
    for way, lag, noise in _cells(records):
        own = [r for r in records if (r["way"], r["lag"], r["noise"]) == (way, lag, noise)]
        numbers = [
            _mean(own, name) for name in ("kl_actor_policy", "chi_square", "log_perplexity_gap", "ess", "ess_sequence")
        ]
        shares = [_mean(own, "correction_zero_frac", "clip_frac"), _mean(own, "correction_capped_frac")]
        rows.append(
            f"| {way} | {lag} | {noise:g} | {_mean(own, 'late_reward')} | {min(r['late_reward'] for r in own):.2f} | "
            f"{_mean(own, 'final_reward')} | {sum(r['collapsed'] for r in own)} of {len(own)} | "
            + " | ".join([*numbers, *shares])
            + " |"
        )
    return "\n".join(rows)


def _cells(records: Sequence[dict[str, Any]]) -> list[tuple[str, int, float]]:
    seen = {(r["way"], r["lag"], r["noise"]) for r in records}
    return sorted(seen, key=lambda cell: (cell[2], cell[1], list(WAYS).index(cell[0])))


def _mean(records: Sequence[dict[str, Any]], *names: str) -> str:
    """Of the first of these that the records have."""
    for name in names:
        values = [r[name] for r in records if r.get(name) is not None]
        if values:
            return f"{fmean(values):.3g}"
    return "–"


def _stand_in(way: str, record: dict[str, Any]) -> str:
    """The record that represents this correction: on-policy, that of no correction."""
    if record["lag"] or record["noise"] or way in ON_POLICY:
        return way
    return "grpo" if way in PRESETS else "none"


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Reward late in training against lag, and against noise; a line per correction, a dot per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    panels = [("lag", "updates between sampling and training", lambda r: r["noise"] == 0)]
    panels += [("noise", "noise on the sampler's weights (share of their spread), lag 0", lambda r: r["lag"] == 0)]
    colours = pyplot.colormaps["tab20"]
    for axis, (name, label, belongs) in zip(axes, panels, strict=True):
        values = sorted({r[name] for r in records if belongs(r)})
        for number, way in enumerate(w for w in WAYS if any(r["way"] == w for r in records)):
            own = [r for r in records if r["way"] == _stand_in(way, r) and belongs(r)]
            measured = [v for v in values if any(r[name] == v for r in own)]
            means = [fmean(r["late_reward"] for r in own if r[name] == v) for v in measured]
            places = [values.index(r[name]) + (number - 7) * 0.02 for r in own]
            axis.plot([values.index(v) for v in measured], means, color=colours(number), label=way, linewidth=1.6)
            axis.scatter(places, [r["late_reward"] for r in own], color=colours(number), s=9, alpha=0.6)
        axis.set_xticks(range(len(values)), [f"{v:g}" for v in values])
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("reward over the last fifth of the updates")
    axes[1].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--lags", nargs="*", type=int, default=[0, 4, 16])
    parser.add_argument("--noises", nargs="*", type=float, default=[0.5], help="at lag 0")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", type=Path, default=RESULTS / "stale_data.jsonl")
    parser.add_argument("--append", action="store_true", help="keep the results in --out, and run what is missing")
    parser.add_argument("--from", dest="source", type=Path, help="do not run; read these results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.source is None:
        settings = [(lag, 0.0) for lag in args.lags] + [(0, noise) for noise in args.noises]
        known = [json.loads(line) for line in args.out.read_text().splitlines()] if args.append else []
        args.out.write_text("".join(json.dumps(record) + "\n" for record in known))
        done = {(r["way"], r["lag"], r["noise"], r["seed"]) for r in known}
        for seed in args.seeds:
            for lag, noise in settings:
                for way in args.only if lag or noise else [way for way in args.only if way in ON_POLICY]:
                    if (way, lag, noise, seed) in done:
                        continue
                    record = run(way, lag, noise, seed, args.batches, args.lr)
                    print({k: v for k, v in record.items() if k != "curve"}, flush=True)
                    with args.out.open("a") as file:
                        file.write(json.dumps(record) + "\n")
    path = args.source or args.out
    records = [json.loads(line) for line in path.read_text().splitlines()]
    print(table(records))
    plot(records, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
