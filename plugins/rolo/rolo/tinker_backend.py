"""`TinkerModel`: the Tinker service samples and trains a LoRA of one of its models; `TinkerRenderer` renders for it."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ludic.batch_gen.external_rollouts import OneBatchSource
from ludic.distributed import TinkerPolicy
from ludic.inference import TinkerConfig
from ludic.inference.templates.conversation import up_to_stop
from ludic.training import TinkerTrainer, TrainerConfig, make_dr_grpo
from ludic.types import SamplingParams
from ludic_tinker.template import CookbookTemplate, tinker_template
from rolo.library import ChatRenderer, ClientPolicy, ModelConfig, saw_batch
from rolo.model import TrainingBatch, UpdateResult


@dataclass(frozen=True, kw_only=True)
class TinkerModelConfig(ModelConfig):
    learning_rate: float = 8e-5
    lora_rank: int | None = 32
    project_id: str | None = None
    """A project that exists; None is $TINKER_PROJECT_ID, or the account's default."""
    base_url: str | None = None
    """None is $TINKER_BASE_URL, or the service itself. The key is $TINKER_API_KEY."""
    renderer_name: str | None = None
    """A renderer of tinker_cookbook; None: its recommendation if it is installed, else the tokenizer's template."""

    def connection(self) -> TinkerConfig:
        lora: dict[str, Any] = {"base_model": self.model_name, "lora_rank": self.lora_rank, "lora_seed": self.seed}
        return TinkerConfig(**lora, project_id=self.project_id, base_url=self.base_url, max_context=self.max_seq_len)


class TinkerModel:
    """Close it to end the session."""

    def __init__(self, config: TinkerModelConfig, *, tokenizer: Any = None) -> None:
        """Without `tokenizer`, the service names it, and it is fetched from the hub."""
        self.config, self._given, length = config, OneBatchSource(), config.max_seq_len
        self.remote = TinkerPolicy(config.connection(), tokenizer=tokenizer)
        self.template = tinker_template(config.model_name, self.remote.tokenizer, config.renderer_name)
        self.trainer = TinkerTrainer(
            model=self.remote,
            algo=make_dr_grpo(drop_zero_weight=True),  # for its loss: advantages are computed before
            batch_source=self._given,
            cfg=TrainerConfig(lr=config.learning_rate, max_seq_len=length, micro_token_budget=length, seed=config.seed),
        )

    def policy(self) -> ClientPolicy:
        sampling = SamplingParams(temperature=self.config.temperature, max_tokens=self.config.max_tokens)
        own = self.template.stops(sampling) if isinstance(self.template, CookbookTemplate) else {}
        return ClientPolicy(self.remote.client, replace(sampling, **own))

    def renderer(self) -> "TinkerRenderer":
        return TinkerRenderer(self)

    async def update(self, batch: TrainingBatch) -> UpdateResult:
        self._given.give(saw_batch(batch, self.config.temperature))
        metrics = await self.trainer.train_step()
        return UpdateResult(metrics["train/loss"], metrics)

    async def save(self, folder: Path) -> str:
        """Save weights and optimizer at the service; returns their tinker:// path."""
        return await asyncio.to_thread(self.remote.save_state, f"{folder.name}-{self.trainer.step}")

    def close(self) -> None:
        self.remote.close()


class TinkerRenderer(ChatRenderer):
    """Messages ↔ tokens of a model's own chat format."""

    def __init__(self, model: TinkerModel) -> None:
        tokenizer, sampling = model.remote.tokenizer, model.policy().sampling
        super().__init__(model.template, lambda ids: up_to_stop(ids, tokenizer, sampling))
