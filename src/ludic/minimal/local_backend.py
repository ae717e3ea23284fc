"""`LocalModel`: the embedded engine samples and the library's trainer trains one set of weights in this process."""

from dataclasses import dataclass
from pathlib import Path

from ludic.batch_gen.external_rollouts import OneBatchSource
from ludic.distributed import SharedWeightsPublisher
from ludic.inference import HFChatTemplate, tool_parser_for
from ludic.inference.local import LocalEngine
from ludic.inference.templates.conversation import ClientPolicy, up_to_stop
from ludic.inference.templates.hf import give_plain_chat, with_plain_stop
from ludic.minimal.generation import ChatRenderer
from ludic.minimal.training import TrainingBatch, UpdateResult
from ludic.models.loading import SMOLLM2, LoadedModel, load_model
from ludic.training import CheckpointConfig, CheckpointManager, Trainer, TrainerConfig, make_dr_grpo
from ludic.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalModelConfig:
    model_name: str = SMOLLM2
    """A folder, a hub id, a GGUF file, smollm2-135m, or tiny (random weights, to try things out)."""
    learning_rate: float = 1e-5
    sampling: SamplingParams = SamplingParams(temperature=1.0, max_tokens=512)  # noqa: RUF009 - it is frozen
    max_seq_len: int = 2048
    """Tokens of one conversation; an episode that would grow longer ends."""
    micro_token_budget: int = 16_384
    """Tokens in one forward pass of training; the gradient does not depend on it."""
    seed: int = 0


class LocalModel:
    """Runs on a GPU if there is one. Close it when done."""

    def __init__(self, config: LocalModelConfig, loaded: LoadedModel | None = None) -> None:
        """`loaded` replaces the model that `config` names."""
        if loaded is None:
            loaded = load_model(config.model_name, seed=config.seed)
        self.config, self.tokenizer, self._given = config, loaded.tokenizer, OneBatchSource()
        is_base = give_plain_chat(loaded.tokenizer)  # a base model needs a stop string
        self.sampling = with_plain_stop(config.sampling) if is_base else config.sampling
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
        self._given.give(batch)
        metrics = await self.trainer.train_step()
        return UpdateResult(metrics["train/loss"], metrics)

    async def save(self, folder: Path) -> str:
        """In the library's checkpoint format, which `transformers` reads too."""
        files = CheckpointManager(CheckpointConfig(folder, max_to_keep=1))
        return str(files.save(self.trainer.step, model=self.trainer.model, tokenizer=self.tokenizer))

    def close(self) -> None:
        self.engine.close()
