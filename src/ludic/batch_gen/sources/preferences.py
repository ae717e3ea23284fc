"""`PreferenceBatchSource`: comparisons for DPO, IPO and KTO, or answers for SFT, from a file.

A pair is {"prompt": …, "chosen": …, "rejected": …}, a labelled sample {"prompt": …, "completion": …, "label": true}, an answer
{"question": …, "answer": …} or {"prompt": …, "completion": …}. A prompt is a text or, as "prompt" or "messages", a list of chat
messages; a completion is a text or the assistant's message.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

import numpy as np

from ludic.batch_gen.requests.samples import read_samples
from ludic.batch_gen.sources.offline import rendered_reply
from ludic.inference import ChatTemplate
from ludic.types import ConfigError, Message, SampleOrigin, SAWBatch, SAWItem, derive_seed

Kind: TypeAlias = Literal["pairs", "labels", "answers"]
_PAIR, _LABELLED = {"chosen", "rejected"}, {"completion", "label"}


class PreferenceBatchSource:
    """Endless epochs over stored preferences, shuffled per epoch and rendered with the model's chat template.

    Of a pair it makes two samples with the weights 1 and −1, of an answer one with the weight 1. Labelled samples are taken
    `kl_samples` at a time, as one comparison: each with the weight 1 or −1, and next to it the completion of the next one behind
    the same prompt, with the weight 0 (KTO).
    """

    def __init__(
        self,
        preferences: str | Path | Sequence[Mapping[str, Any]],
        chat_template: ChatTemplate,
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 42,
        kl_samples: int = 4,
        flag: str = "--data",
        system_prompt: str | None = None,
    ) -> None:
        """`preferences`: a file (JSONL, JSON, Parquet or hub:NAME:SPLIT), or its rows. `batch_size`: pairs, labelled samples or
        answers. `flag`: what messages call the file. `system_prompt`: stands before every prompt that has none."""
        rows = read_samples(preferences, flag) if isinstance(preferences, (str, Path)) else list(preferences)
        where = f"of {preferences}" if isinstance(preferences, (str, Path)) else ""
        self._rows = [
            _checked(row, f"{_name_of(row)} {number} {where}".strip()) for number, row in enumerate(rows, start=1)
        ]
        if system_prompt is not None:
            first: Message = {"role": "system", "content": system_prompt}
            self._rows = [(p if p[0]["role"] == "system" else [first, *p], found) for p, found in self._rows]
        kinds: set[Kind] = {
            "pairs" if row.keys() >= _PAIR else "labels" if row.keys() >= _LABELLED else "answers" for row in rows
        }
        if len(kinds) != 1:
            raise ConfigError(
                f"Preferences {where} are {' and '.join(sorted(kinds)) or 'missing'}; give rows of one kind."
            )
        self.kind: Kind = kinds.pop()
        self._unit = kl_samples if self.kind == "labels" else 1
        if self.kind == "labels" and (kl_samples < 2 or batch_size % kl_samples or len(rows) < kl_samples):
            raise ConfigError(
                f"kl_samples={kl_samples}, batch_size={batch_size}, {len(rows)} rows: a comparison needs 2 labelled samples or "
                "more, a batch whole comparisons, and the file at least one."
            )
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}; it must be at least 1.")
        self._template, self._batch_size, self._shuffle, self._seed = chat_template, batch_size, shuffle, seed
        self._epoch, self._position = 0, 0

    def __len__(self) -> int:
        """Preferences of one epoch: labelled samples that do not fill a comparison are left out, others each time."""
        return len(self._rows) // self._unit * self._unit

    @property
    def num_batches_per_epoch(self) -> int:
        return -(-len(self) // self._batch_size)

    async def next_batch(self) -> SAWBatch:
        epoch, start = self._epoch, self._position
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(derive_seed(self._seed, epoch)).shuffle(order)
        end = min(start + self._batch_size, len(self))
        items = await asyncio.to_thread(self._items, order[start:end], f"epoch {epoch}")
        self._epoch, self._position = (epoch, end) if end < len(self) else (epoch + 1, 0)
        lengths = [item.num_action_tokens for item in items]
        meta = {
            "source": "preferences",
            "epoch": epoch,
            "num_samples": len(items),
            "avg_completion_length": fmean(lengths),
        }
        return SAWBatch(items=items, meta=meta)

    def _items(self, numbers: Sequence[int], when: str) -> list[SAWItem]:
        items: list[SAWItem] = []
        for first in range(0, len(numbers), self._unit):
            unit = numbers[first : first + self._unit]
            name = f"{when}, preference {unit[0]}"
            for number, following in zip(unit, [*unit[1:], unit[0]], strict=True):
                messages, completions = self._rows[number]
                if self.kind == "labels":
                    completions = [*completions, (self._rows[following][1][0][0], 0.0)]
                items += [self._item(messages, text, weight, name, number) for text, weight in completions]
        return items

    def _item(self, messages: list[Message], text: str, weight: float, comparison: str, number: int) -> SAWItem:
        ids, num_prompt = rendered_reply(self._template, messages, text, f"preference {number + 1}")
        mask = np.arange(len(ids)) >= num_prompt
        return SAWItem(ids, None, mask, weight, origin=SampleOrigin(comparison=comparison, num_turns=1))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "num_rows": len(self._rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["num_rows"] != len(self._rows):
            raise ConfigError(
                f"The saved position is in {state['num_rows']} preferences, there are {len(self._rows)} now. Resume with the file "
                "that the run was started with."
            )
        self._epoch, self._position = state["epoch"], state["position"]


_NEEDS = "A row needs question and answer, prompt and completion, a prompt with completion and label, or with chosen and rejected."


def _name_of(row: Mapping[str, Any]) -> str:
    return "Preference" if row.keys() & {"chosen", "rejected", "label"} else "Row"


def _checked(row: Mapping[str, Any], what: str) -> tuple[list[Message], list[tuple[str, float]]]:
    """The prompt's messages, and each completion with its weight."""
    prompt = row.get("messages", row.get("prompt", row.get("question")))
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f"{what} has no prompt under question, prompt or messages, as a text or a list of chat messages. {_NEEDS}"
        )
    for message in prompt:
        facts = (message.get("role"), message.get("content", 0)) if isinstance(message, dict) else (None, 0)
        if not isinstance(facts[0], str) or not isinstance(facts[1], str | list | None):
            raise ConfigError(
                f"{what}: the prompt has the message {message!r:.60}; it needs a role and a text (content)."
            )
    if row.keys() >= _PAIR:
        chosen, rejected = _text(row["chosen"], what, "chosen"), _text(row["rejected"], what, "rejected")
        if chosen == rejected:
            raise ConfigError(f"{what} prefers a completion to itself: {chosen!r:.60}.")
        return prompt, [(chosen, 1.0), (rejected, -1.0)]
    if row.keys() >= _LABELLED:
        return prompt, [(_text(row["completion"], what, "completion"), 1.0 if row["label"] else -1.0)]
    for key in ("answer", "completion"):
        if key in row:
            return prompt, [(_text(row[key], what, key), 1.0)]
    raise ConfigError(f"{what} has only {', '.join(row)}. {_NEEDS}")


def _text(value: Any, what: str, key: str) -> str:
    message = value[0] if isinstance(value, list) and len(value) == 1 else value
    text = message.get("content") if isinstance(message, dict) and message.get("role") == "assistant" else message
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{what}: {key} is {value!r:.60}; it should be a text, or one message of the assistant.")
    return text
