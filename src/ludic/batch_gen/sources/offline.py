"""`OfflineBatchSource`: training items from rollouts on disk.

It indexes the files once (offset and group of each rollout) and then reads one chunk at a time, so that memory holds only a
chunk. A chunk consists of whole groups, so that credit can compare siblings.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias, TypedDict, Unpack

import numpy as np

from ludic.batch_gen.build_batch import HasCreditAssigner, credit_of
from ludic.batch_gen.stitching import stitch_rollouts
from ludic.batch_gen.store import index_lines
from ludic.compat import also_accepts, only_known
from ludic.inference import ChatTemplate, Conversation, HFChatTemplate
from ludic.seeds import FileSeeds
from ludic.types import (
    AgentStep,
    ConfigError,
    CreditAssigner,
    Message,
    Rollout,
    SampleAttachments,
    SampleFilter,
    SampleOrigin,
    SAWBatch,
    SAWItem,
    Step,
    StepSelector,
    TokenArray,
    derive_seed,
    is_parse_failure,
    was_rejected_as_cut_off,
)
from ludic.types.rollout_files import stored_rollout
from ludic.util.files import Line


def with_message_spans(rollout: Rollout, template: ChatTemplate) -> Rollout:
    """The rollout with `TokenTrace.message_spans` in every model call; ConfigError if the template writes other prompts."""
    calls = [step for step in rollout.steps if isinstance(step, AgentStep)]
    if all(call.trace.message_spans for call in calls):
        return rollout
    conversation, traces = Conversation(template), {}
    for position, call in enumerate(calls):
        prompt = conversation.next_prompt(list(call.prompt_messages), with_spans=True)
        if not np.array_equal(prompt.token_ids, call.trace.prompt_token_ids):
            raise ConfigError(
                f"Rollout {rollout.id} does not say which message its tokens came from, and the chat template writes the prompt "
                f"of step {call.index} differently: another model played it, or its agent was shown tools. Play with --train-on, "
                "which records it."
            )
        traces[id(call.trace)] = replace(call.trace, message_spans=prompt.message_spans)
        conversation.record(call.trace.completion_token_ids, _kept_text(calls, position))
    steps = [
        step if step.trace is None else replace(step, trace=traces.get(id(step.trace), step.trace))
        for step in rollout.steps
    ]
    return replace(rollout, steps=steps)


def _kept_text(calls: list[AgentStep], position: int) -> str:
    """The reply as the agent remembered it: in the next prompt, where there is one."""
    own, num_sent = calls[position], len(calls[position].prompt_messages)
    if position + 1 < len(calls) and len(calls[position + 1].prompt_messages) > num_sent:
        return str(calls[position + 1].prompt_messages[num_sent]["content"])
    return own.action


logger = logging.getLogger(__name__)

StepToItem: TypeAlias = Callable[[Rollout, Step, float], SAWItem]
"""(rollout, one of its steps, the step's weight) -> item."""


def _acts_on_env(step: Step) -> bool:
    """The default selector: env steps, and replies to the env that failed to parse."""
    return step.kind == "env" or is_parse_failure(step)


class _Spellings(TypedDict, total=False):
    algorithm: HasCreditAssigner
    """In place of `credit_assigner`: the algorithm's."""


@also_accepts(_Spellings)
class OfflineBatchSource:
    """Endless epochs over stored rollouts, shuffled per epoch.

    By default the items are stitched from the rollouts' own tokens, as in an online run. With `step_to_item`, each step that
    `step_selector` picks becomes an item (for instance rendered with another model's chat template).
    """

    def __init__(
        self,
        jsonl_paths: Sequence[str | Path] | str | Path,
        step_to_item: StepToItem | None = None,
        credit_assigner: CreditAssigner | None = None,
        batch_size: int = 32,
        shuffle: bool = True,
        sample_filter: SampleFilter | None = None,
        seed: int = 42,
        drop_last: bool = False,
        step_selector: StepSelector | None = None,
        *,
        chunk_rollouts: int = 64,
        group_size: int | None = None,
        spans_by: ChatTemplate | None = None,
        **also: Unpack[_Spellings],
    ) -> None:
        """`chunk_rollouts`: minimum number of rollouts that are credited, shuffled and held in memory at a time. `group_size`:
        leave out groups with another number of finished episodes, which rules that compare siblings refuse. `spans_by`: the
        template of the rollouts' model, which finds the message of each token where the rollouts do not say it."""
        if batch_size < 1 or chunk_rollouts < 1:
            raise ConfigError(f"batch_size={batch_size}, chunk_rollouts={chunk_rollouts}; both must be at least 1.")
        if step_selector is not None and step_to_item is None:
            raise ConfigError("step_selector picks steps for step_to_item; without that, whole rollouts become items.")
        only_known("OfflineBatchSource", also, _Spellings)
        self._credit = credit_of(credit_assigner, also.get("algorithm"))
        self._step_to_item = step_to_item
        self._step_selector = step_selector or _acts_on_env
        self._sample_filter = sample_filter
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._spans_by = spans_by
        self._chunk_rollouts = chunk_rollouts
        paths = [jsonl_paths] if isinstance(jsonl_paths, (str, Path)) else list(jsonl_paths)
        self._groups = _index(paths, group_size)
        self._num_items: int | None = None
        # Position of the next batch: epoch, group within its order, item within the chunk that starts there.
        self._epoch, self._group, self._item = 0, 0, 0
        self._kept_chunk: tuple[tuple[int, int], tuple[list[SAWItem], int]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    @property
    def num_rollouts(self) -> int:
        """Usable rollouts in the files, without failed ones."""
        return sum(map(len, self._groups))

    @property
    def target_rollouts(self) -> int:
        return self.num_rollouts

    def __len__(self) -> int:
        """Items of one epoch. The first call reads all files."""
        if self._num_items is None:
            order = self._order(0)
            self._num_items, position = 0, 0
            while position < len(order):
                items, position = self._read_chunk(order, 0, position)
                self._num_items += len(items)
        return self._num_items

    @property
    def num_batches_per_epoch(self) -> int:
        whole, rest = divmod(len(self), self._batch_size)
        return whole + (rest > 0 and not self._drop_last)

    async def next_batch(self) -> SAWBatch:
        for _ in range(2):  # the current epoch may be at its end
            batch = await self._next_in_epoch()
            if batch is not None:
                return batch
        raise ValueError(
            "A whole epoch over the rollouts gave no batch: no item passed the sample_filter, or drop_last dropped an "
            f"incomplete batch (batch_size={self._batch_size})."
        )

    get_next_batch = next_batch

    async def iter_epoch(self) -> AsyncGenerator[SAWBatch, None]:
        """The remaining batches of the current epoch."""
        while (batch := await self._next_in_epoch()) is not None:
            yield batch

    # --- one batch ---

    async def _next_in_epoch(self) -> SAWBatch | None:
        """The next batch of this epoch; at its end start the next epoch and return None."""
        epoch, order = self._epoch, self._order(self._epoch)
        items: list[SAWItem] = []
        while self._group < len(order) and len(items) < self._batch_size:
            chunk, after = await self._chunk(order)
            wanted = self._batch_size - len(items)
            items += chunk[self._item : self._item + wanted]
            if self._item + wanted < len(chunk):
                self._item += wanted
            else:
                self._group, self._item = after, 0
        if not items or (len(items) < self._batch_size and self._drop_last):
            self._epoch, self._group, self._item = epoch + 1, 0, 0
            return None
        return SAWBatch(items=items, meta=self._meta(items, epoch))

    async def _chunk(self, order: list[int]) -> tuple[list[SAWItem], int]:
        """The items of the chunk at the current group, and the first group of the next chunk."""
        place = (self._epoch, self._group)
        if self._kept_chunk is None or self._kept_chunk[0] != place:
            self._kept_chunk = (place, await asyncio.to_thread(self._read_chunk, order, *place))
        return self._kept_chunk[1]

    def _read_chunk(self, order: list[int], epoch: int, position: int) -> tuple[list[SAWItem], int]:
        start, lines = position, list[Line]()
        while position < len(order) and len(lines) < self._chunk_rollouts:
            lines += self._groups[order[position]]
            position += 1
        items = self._items([stored_rollout(line) for line in lines])
        if self._shuffle:
            random.Random(derive_seed(self._seed, FileSeeds.WITHIN_CHUNK, epoch, start)).shuffle(items)
        return items, position

    def _items(self, rollouts: list[Rollout]) -> list[SAWItem]:
        weights = self._credit.compute(rollouts)
        to_item = self._step_to_item
        if to_item is None:
            if self._spans_by is not None:
                rollouts = [with_message_spans(rollout, self._spans_by) for rollout in rollouts]
            items = stitch_rollouts(rollouts, weights)
        else:
            items = [
                to_item(rollout, step, weights[rollout.id, step.index])
                for rollout in rollouts
                for step in rollout.steps
                if self._step_selector(step)
            ]
        return items if self._sample_filter is None else [item for item in items if self._sample_filter(item)]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._groups)))
        if self._shuffle:
            random.Random(derive_seed(self._seed, FileSeeds.ORDER, epoch)).shuffle(order)
        return order

    def _meta(self, items: list[SAWItem], epoch: int) -> dict[str, Any]:
        num_actions = [item.num_action_tokens for item in items]
        averages = {
            "avg_completion_length": fmean(num_actions),
            "avg_prompt_length": fmean(len(i.input_ids) - n for i, n in zip(items, num_actions, strict=True)),
        }
        return {
            "source": "offline",
            "epoch": epoch,
            "num_samples": len(items),
            "target_rollouts": len({item.origin.rollout_id for item in items}),
            **averages,
            "rollout_metrics": averages,
        }

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "group": self._group,
            "item": self._item,
            "num_rollouts": self.num_rollouts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["num_rollouts"] != self.num_rollouts:
            raise ConfigError(
                f"The saved position is in {state['num_rollouts']} rollouts, the files now have {self.num_rollouts}. "
                "Resume with the files that the run was started with."
            )
        self._epoch, self._group, self._item = state["epoch"], state["group"], state["item"]


def _index(paths: Sequence[str | Path], group_size: int | None) -> list[list[Line]]:
    """The lines of the rollouts, grouped."""
    groups: dict[str, list[Line]] = {}
    episodes: dict[str, set[str]] = {}
    num_failed = 0
    main: tuple[Any, str | None] = None, None
    """The agent's part in its episode and the group of the last rollout that was no thread; threads follow it in a file."""
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"There is no file {path} to read rollouts from.")
        for line, head in index_lines(path):
            own = f"rollout {head.id}" if head.group_id is None else f"group {head.group_id}"
            rollout = Rollout(id=head.id, meta=head.meta)
            part = rollout.episode_run, rollout.policy, rollout.agent_id
            is_failed = head.failure is not None
            if not rollout.is_sub_task:
                main = part, None if is_failed else own
            elif rollout.is_thread and part == main[0] and not is_failed:
                is_failed, own = main[1] is None, main[1] or own
            if is_failed:
                num_failed += 1
                continue
            groups.setdefault(own, []).append(line)
            episodes.setdefault(own, set()).add(rollout.episode_run or rollout.id)
    whole = {own: lines for own, lines in groups.items() if group_size in (None, len(episodes[own]))}
    if groups and not whole:
        sizes = sorted({len(own) for own in episodes.values()})
        raise ConfigError(
            f"No group of the rollouts has group_size = {group_size} finished episodes; there are {sizes}."
        )
    if len(whole) < len(groups):
        logger.warning("%d of %d groups are left out: they have not %d finished episodes.",
                       len(groups) - len(whole), len(groups), group_size)  # fmt: skip
    if not groups:
        raise ConfigError(
            f"There are no usable rollouts in {', '.join(map(str, paths)) or 'no files at all'} "
            f"({num_failed} failed ones were skipped)."
        )
    return list(whole.values())


# --- items of rendered messages, for rollouts without stored tokens ---


def make_chat_template_step_to_item(
    tokenizer: Any = None, *, chat_template: ChatTemplate | None = None, with_spans: bool = False
) -> StepToItem:
    """Return a function that renders a step's prompt and reply with a chat template.

    The prompt is the messages of the model call, the completion its raw text; `info["chat_prompt_messages"]` and
    `info["chat_completion"]` of the step override them. Give either a tokenizer or a chat template. `with_spans` notes which
    message each token came from, for algorithms with `train_on`.
    """
    if (tokenizer is None) == (chat_template is None):
        raise ConfigError("make_chat_template_step_to_item needs either a tokenizer or a chat_template.")
    template = chat_template if chat_template is not None else HFChatTemplate(tokenizer)

    def step_to_item(rollout: Rollout, step: Step, weight: float) -> SAWItem:
        what = f"step {step.index} of rollout {rollout.id}"
        messages, completion = _conversation(rollout, step)
        full, num_prompt = rendered_reply(template, messages, completion, what)
        attached = SampleAttachments()
        if with_spans:
            shown = [*messages, {"role": "assistant", "content": completion}]
            attached = SampleAttachments(message_spans=tuple(template.spans(shown, add_generation_prompt=False)))
        mask = np.zeros(len(full), dtype=np.bool_)
        mask[num_prompt:] = True
        meta = {"request_meta": rollout.request_meta}
        return SAWItem(full, None, mask, weight, meta, attached, _origin(rollout, step))

    return step_to_item


def rendered_reply(
    template: ChatTemplate, messages: Sequence[Message], completion: str, what: str
) -> tuple[TokenArray, int]:
    """The tokens of a prompt and its reply, and how many are the prompt's; `what` it is, for errors."""
    prompt = template.apply(messages, add_generation_prompt=True).prompt_token_ids
    reply = {"role": "assistant", "content": completion}
    full = template.apply([*messages, reply], add_generation_prompt=False).prompt_token_ids
    if not np.array_equal(full[: len(prompt)], prompt):
        raise ValueError(
            f"The chat template renders {what} with its reply differently from its prompt alone, so the reply's tokens cannot be "
            "located. Use a template that only appends."
        )
    if len(full) == len(prompt):
        raise ValueError(f"{what[0].upper()}{what[1:]} has an empty completion.")
    return full, len(prompt)


def _conversation(rollout: Rollout, step: Step) -> tuple[list[Message], str]:
    source: AgentStep | None
    if isinstance(step, AgentStep):
        source = step
    else:
        source = next((call for call in rollout.agent_steps if call.id == step.source_agent_step_id), None)
    messages = step.info.get("chat_prompt_messages")
    if messages is None and source is not None:
        messages = source.prompt_messages
    if not messages:
        raise ValueError(
            f"Step {step.index} of rollout {rollout.id} has no prompt messages: neither info['chat_prompt_messages'] nor a "
            "model call that led to it. Choose other steps with step_selector."
        )
    completion = step.info.get("chat_completion")
    if isinstance(completion, dict):
        completion = completion["content"]
    return list(messages), step.action if completion is None else str(completion)


def _origin(rollout: Rollout, step: Step) -> SampleOrigin:
    return SampleOrigin.of_rollout(
        rollout,
        segment=step.index,
        step_index=step.index,
        step_kind=step.kind,
        num_turns=1,
        reward=step.reward,
        truncated=step.truncated,
        terminated=step.terminated,
        finish_reason=step.info.get("finish_reason"),
        num_parse_errors=int(is_parse_failure(step)),
        num_cut_off=int(was_rejected_as_cut_off(step)),
    )
