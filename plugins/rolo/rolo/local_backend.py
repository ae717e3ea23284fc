"""`LocalModel`: one set of weights in this process, sampled by Ludic's engine and trained by its trainer."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ludic.batch_gen.external_rollouts import OneBatchSource
from ludic.distributed import SharedWeightsPublisher
from ludic.inference import HFChatTemplate, tool_parser_for
from ludic.inference.local import LocalEngine
from ludic.inference.templates.conversation import up_to_stop
from ludic.inference.templates.hf import give_plain_chat, with_plain_stop
from ludic.models.loading import SMOLLM2, LoadedModel, load_model
from ludic.training import CheckpointConfig, CheckpointManager, Trainer, TrainerConfig, make_dr_grpo
from ludic.types import MissingExtra, SamplingParams
from rolo.library import ChatRenderer, ClientPolicy, ModelConfig, saw_batch
from rolo.model import TrainingBatch, UpdateResult


@dataclass(frozen=True, kw_only=True)
class LocalModelConfig(ModelConfig):
    model_name: str = SMOLLM2
    micro_token_budget: int = 16_384
    """Tokens in one forward pass of training; the gradient does not depend on it."""


class LocalModel:
    """Runs on a GPU if there is one. Close it when done."""

    def __init__(self, config: LocalModelConfig, loaded: LoadedModel | None = None) -> None:
        """`loaded` replaces the model that `config` names."""
        if loaded is None:
            loaded = with_adapter(load_model(config.model_name, seed=config.seed), config.lora_rank, config.seed)
        self.config, self.tokenizer, self._given = config, loaded.tokenizer, OneBatchSource()
        is_base = give_plain_chat(loaded.tokenizer)  # a base model needs a stop string
        sampling = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens)
        self.sampling = with_plain_stop(sampling) if is_base else sampling
        length = min(config.max_seq_len, loaded.model.config.get_text_config().max_position_embeddings)
        rate, budget = config.learning_rate, config.micro_token_budget
        cfg = TrainerConfig(lr=rate, max_seq_len=length, micro_token_budget=budget, seed=config.seed)
        self.engine = LocalEngine(loaded.model, loaded.tokenizer, max_model_len=length, seed=config.seed)
        self.trainer = Trainer(
            model=loaded.model,
            algo=make_dr_grpo(drop_zero_weight=True),  # for its loss: advantages are computed before
            batch_source=self._given,
            cfg=cfg,
            publisher=SharedWeightsPublisher(self.engine),
            tokenizer=loaded.tokenizer,
        )

    def policy(self) -> ClientPolicy:
        return ClientPolicy(self.engine, self.sampling)

    def renderer(self) -> ChatRenderer:
        template = HFChatTemplate(self.tokenizer, tool_parser=tool_parser_for(self.tokenizer))
        return ChatRenderer(template, lambda ids: up_to_stop(ids, self.tokenizer, self.sampling))

    async def update(self, batch: TrainingBatch) -> UpdateResult:
        self._given.give(saw_batch(batch, self.config.temperature))
        metrics = await self.trainer.train_step()
        return UpdateResult(metrics["train/loss"], metrics)

    async def save(self, folder: Path) -> str:
        """In Ludic's checkpoint format, which `transformers` reads as well."""
        files = CheckpointManager(CheckpointConfig(folder, max_to_keep=1))
        return str(files.save(self.trainer.step, model=self.trainer.model, tokenizer=self.tokenizer))

    def close(self) -> None:
        self.engine.close()


def with_adapter(loaded: LoadedModel, rank: int | None, seed: int) -> LoadedModel:
    """The model with a fresh LoRA of this rank, or as it is."""
    if not rank:
        return loaded
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtra("lora", f"lora_rank={rank}") from error
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # the adapter's first weights
        adapter = get_peft_model(loaded.model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    return LoadedModel(adapter, loaded.tokenizer, loaded.name)
