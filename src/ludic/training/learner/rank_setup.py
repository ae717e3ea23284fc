"""What ranks make sure of before the first step: that all were told the same, and who of them does what."""

from dataclasses import dataclass, fields
from typing import Any

from ludic.distributed.fsdp import is_sharded, settings_of
from ludic.distributed.ranks import Ranks, require_same
from ludic.distributed.tensor_parallel import is_tensor_parallel
from ludic.models.head import is_decoder, plain_model
from ludic.training.algorithms import RLAlgorithm
from ludic.training.checkpoint.manager import CheckpointConfig
from ludic.training.config import TrainerConfig
from ludic.training.losses import ForeignLoss, Loss
from ludic.types import BatchSource, ChecksServers, ConfigError, InPlacePublisher, PolicyPublisher


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The same on every rank."""

    publishes: bool
    """The first rank has somebody to send weights to; the others help to gather them."""
    checks_servers: bool
    """Before every step, the first rank asks whether what was published is still served."""
    has_source_per_rank: bool
    """Every rank of several fetches, and not only the first."""
    num_shares: int
    """Into how many shares a batch is cut: as many as ranks, or 1 if they compute the same samples (tensor parallel)."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a rank was started with."""

    cfg: TrainerConfig
    algo: RLAlgorithm
    model: Any
    checkpoint_config: CheckpointConfig | None
    publisher: PolicyPublisher | None
    batch_source: BatchSource | None


def check_ranks_agree(ranks: Ranks, told: RankSettings) -> RankPlan:
    """ConfigError on all ranks if they cannot train together."""
    is_cut = is_tensor_parallel(told.model)
    if ranks.world_size > 1 and not (is_sharded(told.model) or is_cut):
        raise ConfigError(
            f"There are {ranks.world_size} ranks, but the model is whole on each of them; their weights would drift apart. "
            "Spread it first: ludic.distributed.fsdp.shard_model(model)."
        )
    if ranks.world_size > 1:
        require_same(ranks, _facts(told))
    sources = ranks.broadcast(ranks.gather(told.batch_source is not None))
    if not (all(sources) or (sources[0] and not any(sources[1:]))):
        raise ConfigError(
            f"Of {len(sources)} ranks, these have a batch source: {[r for r, has in enumerate(sources) if has]}. Give one to "
            "the first rank only (batch_source=None on the others), or to every rank."
        )
    return ranks.broadcast(
        RankPlan(
            publishes=told.publisher is not None and not isinstance(told.publisher, InPlacePublisher),
            checks_servers=isinstance(told.publisher, ChecksServers),
            has_source_per_rank=len(sources) > 1 and all(sources),
            num_shares=1 if is_cut else ranks.world_size,
        )
    )


def _facts(told: RankSettings) -> dict[str, str]:
    """Everything that must be the same on all ranks, by name."""
    model, checkpoints = told.model, told.checkpoint_config
    settings: list[Any] = [told.cfg, *([settings_of(model)] if is_sharded(model) else [])]
    settings += [] if checkpoints is None else [checkpoints]
    facts = {f"{type(s).__name__}.{f.name}": repr(getattr(s, f.name)) for s in settings for f in fields(s)}
    del facts["TrainerConfig.extra"]  # free for anything, such as a note on where the rank runs
    config = plain_model(model).config.to_dict() if is_decoder(model) else {}
    facts |= {f"the model's {name}": repr(value) for name, value in config.items() if name != "_name_or_path"}
    facts["checkpoints"] = "off" if checkpoints is None else "on"
    facts["the algorithm"] = f"{told.algo.name} with {_name(told.algo.loss)}"
    facts["the trainable parameters"] = str(sum(p.numel() for p in model.parameters() if p.requires_grad))
    return facts


def _name(loss: Loss) -> str:
    return type(loss.loss if isinstance(loss, ForeignLoss) else loss).__name__
