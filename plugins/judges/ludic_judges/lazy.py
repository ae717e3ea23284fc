"""`LazyJudge`: the judge of a command line. Its model is loaded, or its endpoint asked, when the first episode is judged."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ludic.inference import HFChatTemplate, OpenAIChatClient
from ludic.run.config.reward import JudgeBy as JudgeBy
from ludic.run.config.reward import RewardSettings
from ludic.types import ConfigError, Rollout, SamplingParams
from ludic_judges.group import GroupJudge, PairwiseJudge, SiblingJudge
from ludic_judges.llm import Criterion, JudgeBase, LLMJudge, RubricJudge, read_criteria
from ludic_judges.model import JudgeModel

SOLVES = "The reply solves the task: it is right, complete and follows the task's instructions."
DEFAULT_CRITERION = Criterion(name="solves", text=SOLVES, scale=(0, 10))
Load: TypeAlias = Callable[[str], tuple[Any, HFChatTemplate, str]]
"""A function from a model's place to its client, which has `close`, its chat template, and its name."""


class LazyJudge:
    """A scorer that knows its name, and checks its settings, before its model is there."""

    name = "judge"

    def __init__(self, settings: RewardSettings, *, load: Load) -> None:
        """`load` gets the model of a judge that is not behind a URL."""
        if (key_env := settings.judge_key_env) is not None and not os.environ.get(key_env):
            raise ConfigError(f"judge_key_env = {key_env!r}: that environment variable is not set.")
        self.by_group = settings.judge_by != "reply"
        self._settings, self._load = settings, load
        self._place, self._reference = settings.judge or "", settings.judge_reference
        path = settings.judge_criteria
        self._criteria = [DEFAULT_CRITERION] if path is None else read_criteria(path)
        self._model, self._key = settings.judge_model, os.environ.get(key_env or "")
        self._limits: dict[str, Any] = {
            "sampling": SamplingParams(temperature=0.0, max_tokens=settings.judge_tokens),
            "concurrency": settings.judge_concurrency,
            "cache": settings.judge_cache,
        }
        self._judge: JudgeBase | None = None
        self._making = threading.Lock()

    async def score(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, float]]:
        if self._judge is None:
            if self._settings.judge_is_served:
                self._model = self._model or await self._only_model()
            await asyncio.to_thread(self._make)
        assert self._judge is not None, "it is made"
        return await self._judge.score(rollouts)

    def metrics(self) -> dict[str, float]:
        return {} if self._judge is None else self._judge.metrics()

    def mean_weights(self) -> dict[str, float]:
        return self._judge.mean_weights() if isinstance(self._judge, SiblingJudge) else {}

    def _make(self) -> None:
        with self._making:  # the first episodes end at the same time
            if self._judge is not None:
                return
            asking = self._embedded() if self._model is None else self._at_endpoint(self._model)
            texts = [one.text for one in self._criteria]
            if self.by_group:
                kind = GroupJudge if self._settings.judge_by == "ranking" else PairwiseJudge
                text = texts[0] if len(texts) == 1 else "\n".join(f"- {text}" for text in texts)
                self._judge = kind(asking, text, name=self.name, reference=self._reference)
            elif len(self._criteria) == 1:
                scale = self._criteria[0].scale
                self._judge = LLMJudge(asking, texts[0], scale=scale, name=self.name, reference=self._reference)
            else:
                self._judge = RubricJudge(asking, self._criteria, name=self.name, reference=self._reference)

    async def _only_model(self) -> str:
        """The name of the one model at the endpoint."""
        client = OpenAIChatClient(self._place, api_key=self._key)
        try:
            names = await client.list_models()
        finally:
            await client.close()
        if len(names) != 1:
            raise ConfigError(
                f"judge = {client.base_url} serves {', '.join(names) or 'no model'}; choose with judge_model."
            )
        return names[0]

    def _at_endpoint(self, model: str) -> JudgeModel:
        return JudgeModel(OpenAIChatClient(self._place, api_key=self._key), model=model, **self._limits)

    def _embedded(self) -> JudgeModel:
        client, template, name = self._load(self._place)
        weakref.finalize(self, client.close)
        # A model that opens a think block thinks first; for any other the verdict is begun.
        prefill = not template.reply_prefix
        return JudgeModel(client, model=name, chat_template=template, prefill=prefill, **self._limits)
