"""Training runs with LoRA adapters over one frozen base model; rows of several runs share forward and backward passes.

`TrainingBase` holds the base model and computes the jobs of its runs; the server's scheduler calls it from one thread. A
`TrainingRun` holds an adapter, the gradient that adds up until the next step, and AdamW. Passes are packed by the learner's own
parts (`ludic.training.learner`), losses are in losses.py.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludic.distributed.ranks import Ranks
from ludic.models.adapters import AdapterBank, AdapterSpec, LoraAdapter
from ludic.models.packed_attention import to_device
from ludic.models.prefix_tree import TokenTree, first_fit, prefix_groups
from ludic.training.learner.optimizer import LocalAdamW
from ludic.training.learner.packing import ActionFields, PackedBatch
from ludic.training.learner.policy import TrainedPolicy, check_shared_prefixes
from ludic.types import ConfigError, FloatArray, NotFinite, OutOfGPUMemory, SAWItem
from ludic_tinker.server.bodies import AdamSettings
from ludic_tinker.server.losses import Row, check_rows, loss_of
from ludic_tinker.server.targets import target_logps

logger = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""The moments of AdamW, as torch names them."""
_PARITY = 0.05
"""Nats per token by which shared prefixes may change log-probs on a GPU; see `check_shared_prefixes`."""


class TrainingRun:
    """One adapter in training."""

    def __init__(self, adapter: LoraAdapter) -> None:
        self.adapter = adapter
        self.num_steps = 0
        self.gradient: Tensor | None = None
        """The sum since the last step, in the order of `adapter.flat`."""
        self._flat = nn.Parameter(adapter.flat)
        self._in_order = sorted(adapter.parameters(), key=lambda parameter: parameter.storage_offset())
        self._names = sorted(adapter.named(), key=lambda name: adapter.named()[name].storage_offset())
        self._optimizer = LocalAdamW([self._flat], fused=True)

    def take_gradients(self) -> Tensor:
        """The gradient that backward passes left on the parameters, in the order of `adapter.flat`; the parameters forget it."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._in_order]
        self.drop_gradients()
        return torch.cat([part.reshape(-1) for part in parts])

    def add_gradient(self, found: Tensor) -> None:
        """Add a pass's gradient to that of earlier ones."""
        self.gradient = found if self.gradient is None else self.gradient.add_(found)

    def drop_gradients(self) -> None:
        """Forget the gradients that backward passes have left on the parameters."""
        for parameter in self._in_order:
            parameter.grad = None

    def step(self, adam: AdamSettings) -> dict[str, float]:
        """One step of AdamW with the gradient since the last one, which is then cleared. Without a gradient nothing changes."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            return {"unclipped_grad_l2:mean": 0.0}
        norm = float(gradient.norm())
        if not math.isfinite(norm):
            raise NotFinite(
                f"The gradient of step {self.num_steps + 1} is not finite; the weights were not changed and the gradient is "
                "cleared. Look at the log-probs and advantages of the batch, or lower the learning rate."
            )
        if adam.grad_clip_norm:
            gradient *= min(1.0, adam.grad_clip_norm / (norm + 1e-6))  # as torch's clip_grad_norm_
        [group] = self._optimizer.param_groups
        group.update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        self._flat.grad = gradient
        self._optimizer.step()
        self._flat.grad = None
        self.num_steps += 1
        return {"unclipped_grad_l2:mean": norm}

    # --- saving ---

    def state(self, *, gradient: bool = False) -> dict[str, Tensor]:
        """Copies of weights and optimizer, by name; with `gradient`, also of the gradient since the last step."""
        found = {f"weights/{name}": value for name, value in self._named(self.adapter.flat).items()}
        found["num_steps"] = torch.tensor(self.num_steps)
        moments = self._optimizer.state.get(self._flat, {})
        for kind in _MOMENTS if moments else ():
            found |= {f"{kind}/{name}": value for name, value in self._named(moments[kind]).items()}
        if gradient and self.gradient is not None:
            found |= {f"gradient/{name}": value for name, value in self._named(self.gradient).items()}
        return {name: value.detach().clone() for name, value in found.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], *, optimizer: bool) -> None:
        """Continue from a saved state; without `optimizer` from its weights alone. The gradient is replaced as well."""
        self.adapter.load(_under("weights", state))
        self._optimizer.state.clear()
        self.num_steps, self.gradient = 0, None
        if not optimizer:
            return
        self.num_steps = int(state["num_steps"])
        if any(name.startswith(f"{_MOMENTS[0]}/") for name in state):
            steps = torch.tensor(float(self.num_steps), device=self._flat.device)
            moments = {kind: self._flatten(_under(kind, state)) for kind in _MOMENTS}
            self._optimizer.state[self._flat] = {"step": steps, **moments}
        if any(name.startswith("gradient/") for name in state):
            self.gradient = self._flatten(_under("gradient", state))

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor under the names of the weights."""
        parts = flat.split([p.numel() for p in self._in_order])
        return {name: part.view_as(p) for name, part, p in zip(self._names, parts, self._in_order, strict=True)}

    def _flatten(self, named: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([named[name].reshape(-1) for name in self._names]).to(self._flat)


def _under(kind: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{kind}/"): value for name, value in state.items() if name.startswith(f"{kind}/")}


@dataclass(frozen=True, slots=True)
class PassJob:
    """One forward or forward_backward request."""

    run: TrainingRun
    rows: Sequence[Row]
    loss: str
    config: Mapping[str, float]
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class PassOutput:
    """The answer to a request."""

    logprobs: list[FloatArray]
    """Log-probs of each row's targets, in their shape."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A row of a job."""

    job: int
    number: int
    row: Row
    run: int
    """Number of its run among those of the jobs."""


# Letters: T flat tokens of a pass, P targets of all its rows, D hidden size.
class TrainingBase:
    """One frozen base model and the passes of all runs over it. Call it from one thread."""

    def __init__(self, model: Any, *, token_budget: int) -> None:
        """`token_budget`: tokens of one pass, and of the longest row."""
        self.token_budget = token_budget
        self._model = model
        self._bank = AdapterBank(model)
        self._policy = TrainedPolicy(self._bank.model, share_prefixes=True, mixed_precision_dtype=None)
        if not self._policy.packed:
            raise ConfigError(
                f"{type(model).__name__} cannot be served for training: its samples cannot be packed into one row."
            )
        check_shared_prefixes(self._policy, _two_with_a_prefix(self.vocab_size), _PARITY, Ranks())
        self.device = self._policy.device

    @property
    def vocab_size(self) -> int:
        return self._bank.head.shape[0]

    def new_run(self, spec: AdapterSpec) -> TrainingRun:
        return TrainingRun(LoraAdapter.create(self._model, spec))

    def check(self, loss: str, rows: Sequence[Row], config: Mapping[str, Any]) -> None:
        """Raise ConfigError for a request that `compute` would refuse."""
        check_rows(loss, rows, config, vocab_size=self.vocab_size, max_tokens=self.token_budget)

    def compute(self, jobs: Sequence[PassJob]) -> list[PassOutput | Exception]:
        """The results of all jobs, whose rows share passes; gradients are added to those of their runs.

        An error of a job is its own result and leaves its run's gradient as it was. A run may have several jobs.
        """
        results: dict[int, PassOutput | Exception] = {}
        for number, job in enumerate(jobs):
            try:
                self.check(job.loss, job.rows, job.config)
            except ConfigError as error:
                results[number] = error
        for forward_only in (True, False):
            mine = [i for i, job in enumerate(jobs) if job.forward_only == forward_only and i not in results]
            results |= zip(mine, self._together([jobs[i] for i in mine], forward_only), strict=True)
        return [results[number] for number in range(len(jobs))]

    def _together(self, jobs: Sequence[PassJob], forward_only: bool) -> list[PassOutput | Exception]:
        if not jobs:
            return []
        runs = list({id(job.run): job.run for job in jobs}.values())
        found: list[Tensor] = []
        try:
            outputs = self._passes(jobs, forward_only)
            if not forward_only:
                found = [run.take_gradients() for run in runs]
            if len(runs) > 1 and self.device.type == "cuda" and not _are_finite(outputs, found):
                raise NotFinite("Log-probs or gradients are not finite")
        except Exception as error:  # noqa: BLE001 - the error of one run must not fail the others
            for run in runs:
                run.drop_gradients()
            if len(jobs) > 1:
                logger.warning("%d jobs failed together (%s); each is computed alone.", len(jobs), error)
                return [result for job in jobs for result in self._together([job], forward_only)]
            return [_explained(error, self.token_budget)]
        for run, gradient in zip(runs, found, strict=False):
            run.add_gradient(gradient)
        return list(outputs)

    def _passes(self, jobs: Sequence[PassJob], forward_only: bool) -> list[PassOutput]:
        logprobs: list[list[FloatArray]] = [[np.empty(0, np.float32)] * len(job.rows) for job in jobs]
        losses = [0.0] * len(jobs)
        for placed in self._bins(jobs):
            for job, number, own in self._pass(jobs, placed, losses, forward_only):
                logprobs[job][number] = own
        return [PassOutput(own, {"loss:sum": loss}) for own, loss in zip(logprobs, losses, strict=True)]

    def _bins(self, jobs: Sequence[PassJob]) -> list[list[_Placed]]:
        """The rows of each pass: those of one run together, and rows with a common prefix in the same pass."""
        numbers: dict[int, int] = {}
        by_run: list[list[_Placed]] = []
        for index, job in enumerate(jobs):
            run = numbers.setdefault(id(job.run), len(numbers))
            if run == len(by_run):
                by_run.append([])
            by_run[run] += [_Placed(index, number, row, run) for number, row in enumerate(job.rows)]
        groups: list[tuple[list[_Placed], int]] = []
        for rows in by_run:
            if self._policy.share_prefixes:
                found = prefix_groups([placed.row.tokens for placed in rows], self.token_budget)
            else:
                found = [([i], len(placed.row.tokens)) for i, placed in enumerate(rows)]
            found.sort(key=lambda group: -group[1])
            groups += [([rows[i] for i in members], size) for members, size in found]
        return first_fit(groups, self.token_budget)

    def _pass(
        self, jobs: Sequence[PassJob], placed: list[_Placed], losses: list[float], forward_only: bool
    ) -> Iterator[tuple[int, int, FloatArray]]:
        """One forward pass and its backward pass; yields (job, row, log-probs). Losses are added to `losses`."""
        placed = sorted(placed, key=lambda own: (own.run, own.job, own.number))
        batch, spans = self._packed(jobs, placed)
        token_P, target_P = _target_pairs(placed, batch.paths, self.device)
        with torch.set_grad_enabled(not forward_only), self._bank.using(spans):
            hidden_TD = self._policy.hidden(batch)
        head = target_logps(self._bank, hidden_TD, spans, token_P, target_P, for_backward=not forward_only)
        sizes = [own.row.targets.size for own in placed]
        ends = np.cumsum([0, *sizes]).tolist()
        grads = []
        for index, members in groupby(range(len(placed)), key=lambda i: placed[i].job):
            rows = list(members)
            own = slice(ends[rows[0]], ends[rows[-1] + 1])
            loss, grad = _loss(jobs[index], [placed[i].row for i in rows], head.logps_P[own], forward_only)
            losses[index] += loss
            grads.append(grad)
        if not forward_only:
            grad_TD = head.backward(torch.cat(grads))
            if hidden_TD.requires_grad:  # an adapter of the head alone leaves the decoder as it is
                hidden_TD.backward(grad_TD)
        logps = head.logps_P.cpu().numpy()
        for own_row, (start, end) in zip(placed, pairwise(ends), strict=True):
            yield own_row.job, own_row.number, logps[start:end].reshape(own_row.row.targets.shape)

    def _packed(
        self, jobs: Sequence[PassJob], placed: Sequence[_Placed]
    ) -> tuple[PackedBatch, list[tuple[LoraAdapter, int]]]:
        """The flat tokens of rows in the order of their runs, and each run's adapter with its number of tokens."""
        trees, spans = [], []
        for _, members in groupby(placed, key=lambda own: own.run):
            own = list(members)
            min_shared = {} if self._policy.share_prefixes else {"min_shared": self.token_budget + 1}
            trees.append(TokenTree.of([p.row.tokens for p in own], **min_shared))
            spans.append((jobs[own[0].job].run.adapter, trees[-1].num_tokens))
        tree = TokenTree.joined(trees)
        lengths = [len(p.row.tokens) for p in placed]
        is_shared = tree.num_tokens < sum(lengths)
        batch = PackedBatch(
            ids_T=to_device(tree.ids_T, self.device),
            positions_T=to_device(tree.positions_T, self.device),
            lengths=lengths if is_shared else np.diff([*tree.starts_C, tree.num_tokens]).tolist(),
            actions=_NO_ACTIONS,
            items=[],
            paths=tree.paths,
            tree=tree if is_shared else None,
        )
        return batch, spans


def _are_finite(outputs: Sequence[PassOutput], gradients: Sequence[Tensor]) -> bool:
    """On a GPU adapters are stacked, so what is not finite in one run may have reached another."""
    if not all(np.isfinite(own).all() for output in outputs for own in output.logprobs):
        return False
    return not gradients or bool(torch.stack([gradient.isfinite().all() for gradient in gradients]).all())


def _explained(error: Exception, token_budget: int) -> Exception:
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfGPUMemory(
            f"The GPU has no room for a pass of {token_budget} tokens ({error}). Lower the server's token budget."
        )
    return error


def _loss(job: PassJob, rows: Sequence[Row], logps_P: Tensor, forward_only: bool) -> tuple[float, Tensor]:
    """The loss of rows of a job, and the gradient of their targets' log-probs."""
    device = logps_P.device
    leaf_P = logps_P.detach().requires_grad_(not forward_only)
    inputs = {
        name: to_device(np.concatenate([row.inputs[name].reshape(-1) for row in rows]).astype(np.float32), device)
        for name in rows[0].inputs
    }
    row_P = to_device(np.repeat(np.arange(len(rows)), [row.targets.size for row in rows]), device)
    with torch.set_grad_enabled(not forward_only):
        loss = loss_of(job.loss, leaf_P, inputs, row_P, len(rows), job.config)
    if forward_only:
        return float(loss), leaf_P
    (grad_P,) = torch.autograd.grad(loss, leaf_P)
    return float(loss.detach()), grad_P


def _target_pairs(
    placed: Sequence[_Placed], paths: Sequence[np.ndarray], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The flat token that predicts each target of all rows, and the target's id."""
    tokens = [np.repeat(path, own.row.targets.size // len(path)) for own, path in zip(placed, paths, strict=True)]
    targets = [own.row.targets.reshape(-1) for own in placed]
    return to_device(np.concatenate(tokens), device), to_device(np.concatenate(targets).astype(np.int64), device)


_NONE = torch.empty(0)
_NO_ACTIONS = ActionFields(_NONE, _NONE, _NONE, _NONE, _NONE, num_items=0)
"""A pass here reads all hidden states."""


def _two_with_a_prefix(vocab_size: int) -> list[SAWItem]:
    ids = np.arange(24, dtype=np.int32) * 7 % vocab_size
    other = np.concatenate([ids[:20], ids[20:][::-1]])
    mask = np.arange(24) >= 20
    return [SAWItem(own, None, mask, 1.0) for own in (ids, other)]
