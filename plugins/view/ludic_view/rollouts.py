"""One rollout as the API shows it: its turns, and the tokens of each with what the trainer knows of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ludic.types import Rollout, Step
from ludic.types.rollout import DAMAGE, plain_fields
from ludic_view.index import RunIndex
from ludic_view.queries import JSONObject, NotFound, Query, flag_in, mean
from ludic_view.tokens import TokenTexts, call_tokens, record_of, texts_of, trainer_columns


def read_rollout(index: RunIndex, id: str) -> Rollout:
    found = index.find(id)
    if found is None:
        raise NotFound(f"Run {index.id} has no rollout {id!r:.80}.")
    try:
        return Rollout.from_json(found[1].read())
    except (OSError, *DAMAGE) as error:
        raise NotFound(f"Rollout {id!r:.80} of run {index.id} cannot be read: {error}") from error


def show_rollout(index: RunIndex, id: str, query: Query) -> JSONObject:
    rollout = read_rollout(index, id)
    found = index.find(id)
    assert found is not None, "it has been read"
    card, texts = found[0], texts_of(index)
    record = record_of(index, id, card.step)
    columns = trainer_columns(rollout, record)
    view = _RolloutView(rollout, columns, texts, with_context=flag_in(query, "context"))
    first = next((step for step in rollout.sampling_steps), None)
    prompt = [] if first is None or first.trace is None else first.trace.prompt_token_ids.tolist()
    return {
        **card.shown(),
        "num_turns": card.turns,
        "num_tokens": card.tokens,
        "meta": rollout.meta,
        "failure_details": None if rollout.failure is None else plain_fields(rollout.failure),
        "has_trainer": record is not None,
        "turns": [view.turn(turn.number, turn.steps) for turn in rollout.turns()],
        "prompt": {"text": texts.of(prompt), "id": prompt},
    }


class _RolloutView:
    """Makes the turns of a rollout."""

    def __init__(
        self,
        rollout: Rollout,
        columns: Mapping[str, tuple[int, dict[str, np.ndarray]]],
        texts: TokenTexts,
        *,
        with_context: bool,
    ) -> None:
        self._columns, self._texts, self._with_context = columns, texts, with_context
        self._messages: list[Any] = []
        self._known: list[int] = []
        """Tokens of the call before."""

    def turn(self, number: int, steps: Sequence[Step]) -> JSONObject:
        shown = [self._step(step) for step in steps]
        weights = [self._columns[step.id][1].get("weight") for step in steps if step.id in self._columns]
        given = [float(weight.mean()) for weight in weights if weight is not None and len(weight)]
        credit = mean(given)
        return {"number": number, "reward": sum(step.reward for step in steps), "credit": credit, "steps": shown}

    def _step(self, step: Step) -> JSONObject:
        common = {
            "index": step.index,
            "action": step.action,
            "reward": step.reward,
            "reward_components": step.reward_components,
            "info": step.info,
            "terminated": step.terminated,
            "truncated": step.truncated,
            "ts_ns": step.ts_ns,
        }
        if step.kind == "env":
            shown = {"kind": "env", **common, "obs": step.next_obs, "parsed_action": step.parsed_action}
            return shown | (self._tokens(step) if step.id in self._columns else {})
        messages = list(step.prompt_messages)
        is_longer = messages[: len(self._messages)] == self._messages
        new = messages[len(self._messages) :] if is_longer else messages
        self._messages = messages
        return {
            "kind": "call",
            **common,
            "target": step.action_target,
            "messages_new": new,
            "rewrites_history": not is_longer,
            "tool_calls": None if step.tool_calls is None else [_plain(call) for call in step.tool_calls],
            "tool_results": None if step.tool_results is None else list(step.tool_results),
            **self._tokens(step),
        }

    def _tokens(self, step: Step) -> JSONObject:
        trace = step.trace
        if trace is None:
            return {}
        segment, columns = self._columns.get(step.id, (None, {}))
        prompt = trace.prompt_token_ids.tolist()
        shown = {
            "finish_reason": trace.finish_reason,
            "version_runs": [list(run) for run in trace.version_runs],
            "temperature": trace.temperature,
            "segment": segment,
            "prompt_tokens": len(prompt),
            "tokens": call_tokens(step, columns, self._texts),
        }
        if self._with_context:
            new = prompt[len(self._known) :] if prompt[: len(self._known)] == self._known else prompt
            shown["context"] = {"id": new, "text": self._texts.of(new)}
            self._known = [*prompt, *trace.completion_token_ids.tolist()]
        return shown


def _plain(value: Any) -> Any:
    return value if isinstance(value, Mapping) else msgspec.to_builtins(value)
