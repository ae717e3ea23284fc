"""`RLAlgorithm`: a credit rule and a loss under one name; `Preset`: one of them as data."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from ludic.models.head import whole_logits
from ludic.training.credit_assignment import EpisodeCredit
from ludic.training.critic.gae import Advantages, CriticKind
from ludic.training.filters import (
    compose_preprocess,
    drop_zero_weight_samples,
    filter_zero_variance_groups,
    validate_actor_logps,
)
from ludic.training.losses import Loss, as_loss
from ludic.types import CreditAssigner, SAWBatch

Preprocess: TypeAlias = Callable[[SAWBatch], SAWBatch]
Settings: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RLAlgorithm:
    """A credit rule and a loss: they define what a batch of rollouts teaches."""

    name: str
    credit_assigner: CreditAssigner
    """Turns rollouts into one weight per step."""
    loss: Loss
    """Turns action tokens and their weights into a scalar. An object with `compute(logits, batch)`, or a callable, is wrapped in a
    `ForeignLoss`."""
    advantages: Advantages | None = None
    """For algorithms with a critic: how its values turn rewards into weights, just before the update."""
    critic: CriticKind = CriticKind.SHARED
    """For algorithms with a critic: what it looks at."""
    preprocess: Preprocess | None = None
    """Checks and filters on the samples before they become tensors."""
    needs_teacher_logps: bool = False
    """Samples must come with a teacher's log-probs."""
    needs_message_spans: bool = False
    """Samples must say which message each token came from (`InferenceSpec.message_spans`)."""
    compares_components: bool = False
    """Credit compares each reward component of a group, not only their sum."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", as_loss(self.loss))

    def compute_loss(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one padded batch with a single forward pass; the trainer packs instead."""
        return self.loss.compute(whole_logits(model, batch["input_ids"], batch["attention_mask"]), batch)


def with_episode_credit(algorithm: RLAlgorithm) -> RLAlgorithm:
    """The algorithm with one credit per episode (`EpisodeCredit`), for agents whose sessions have several threads."""
    rule = algorithm.credit_assigner
    return algorithm if isinstance(rule, EpisodeCredit) else replace(algorithm, credit_assigner=EpisodeCredit(rule))


def checked(
    *,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    filter_zvp: bool = False,
    zvp_filter_eps: float = 1e-6,
) -> Preprocess:
    """The preprocessing of most presets: drop zero-variance groups and zero weights, then require the sampler's log-probs."""
    steps: list[Preprocess] = []
    if filter_zvp:
        steps.append(partial(filter_zero_variance_groups, eps=zvp_filter_eps))
    if drop_zero_weight:
        steps.append(partial(drop_zero_weight_samples, eps=drop_zero_weight_eps))
    return compose_preprocess(*steps, validate_actor_logps)


@dataclass(frozen=True, kw_only=True, eq=False)
class Preset:
    """A credit rule, a loss and a preprocessing, each with its settings and their defaults. A call makes the algorithm.

    Every setting is a keyword of the call, and so is `name`. The signature lists them with their defaults.
    """

    name: str
    doc: str
    credit: Callable[..., CreditAssigner]
    credit_settings: Settings
    loss: Callable[..., Loss]
    loss_settings: Settings
    preprocess: Callable[..., Preprocess] = checked
    preprocess_settings: Settings = field(default_factory=dict)
    facts: Settings = field(default_factory=dict)
    """Fields of the `RLAlgorithm`, such as `needs_teacher_logps`."""
    masked_when_old: bool = False
    """True if it loses reward on samples of 4 batches ago and holds it with a mask (stale_data_presets.jsonl in research/)."""

    def __post_init__(self) -> None:
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in self.settings.items()
        ]
        signature = inspect.Signature(keywords, return_annotation=RLAlgorithm)
        vars(self).update(__signature__=signature, __name__=f"make_{self.name}", __doc__=inspect.cleandoc(self.doc))

    @property
    def settings(self) -> Settings:
        """All settings with their defaults."""
        return {**self.credit_settings, **self.loss_settings, **self.preprocess_settings, "name": self.name}

    def __call__(self, **given: Any) -> RLAlgorithm:
        defaults = self.settings
        unknown = given.keys() - defaults.keys()
        if unknown:
            raise TypeError(f"make_{self.name}() has no setting {min(unknown)!r}; it has {', '.join(defaults)}.")
        values = {**defaults, **given}

        def chosen(settings: Settings) -> dict[str, Any]:
            return {name: values[name] for name in settings}

        return RLAlgorithm(
            name=values["name"],
            credit_assigner=self.credit(**chosen(self.credit_settings)),
            loss=self.loss(**chosen(self.loss_settings)),
            preprocess=self.preprocess(**chosen(self.preprocess_settings)),
            **self.facts,
        )


def settings_of(make: Callable[..., RLAlgorithm]) -> Settings:
    """The settings of a preset, or of a function that makes an algorithm, with their defaults."""
    if isinstance(make, Preset):
        return make.settings
    return {name: parameter.default for name, parameter in inspect.signature(make).parameters.items()}
