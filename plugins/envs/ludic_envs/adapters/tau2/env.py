"""τ²-bench as an environment: a user simulator and an assistant write to each other; the assistant works on a database with tools.

Both are roles of the episode, so that either may be a script, a frozen model or a policy that is trained. Tools are called inside a
turn (`ToolAgent`) or as an action (`CallAgent`). The dialogue ends when the user says so, and is graded by what the assistant has
done: see world.py.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.tools.tool import ToolResult, tool_from_schema
from ludic.types import ConfigError, Info, Observation, StepOutcome
from ludic_envs.adapters.base import read_calls
from ludic_envs.adapters.tau2.world import PackageWorld, World
from ludic_envs.dialogue.env import ASSISTANT, USER, UserReward

GREETING = "Hi! How can I help you today?"
END_MARKS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""The user ends the dialogue with one of them; the benchmark's rules for the simulator explain them."""
_ASSISTANT_PROMPT = (
    "You are an agent of customer service. Help the user by the policy below. In each turn either call a tool or write to the "
    "user, not both. The user sees your messages only.\n\n<policy>\n{policy}\n</policy>"
)


class Tau2Env(LudicEnv[str, Observation, str]):
    """A dialogue of customer service; at the end both roles earn 1 if the database and the messages are as the task demands.

    `sample` is a task of τ²-bench and the name of its `domain`. `user_reward` is as in the env `dialogue`.
    """

    full_reward: float | None = 1.0

    def __init__(
        self,
        sample: Mapping[str, Any],
        *,
        max_turns: int = 30,
        user_reward: UserReward = "shared",
        make_world: Callable[[str, Mapping[str, Any]], World] = PackageWorld,
    ) -> None:
        """`max_turns`: messages of the assistant, counting calls that it hands over as an action."""
        if "domain" not in sample or "id" not in sample:
            raise ConfigError(
                f"The sample has no domain or no id; it has {sorted(sample)}. ludic_envs.adapters.tau2.data writes them."
            )
        if max_turns < 1:
            raise ConfigError(f"max_turns={max_turns}; the assistant needs at least one message.")
        if user_reward not in ("shared", "opposed", "none"):
            raise ConfigError(f"user_reward={user_reward!r}; there are shared, opposed and none.")
        self._task = {key: value for key, value in sample.items() if key != "domain"}
        self._domain = str(sample["domain"])
        self._make_world = make_world
        self.max_turns, self.user_reward = max_turns, user_reward
        self.full_reward = 1.0 if user_reward == "shared" else None
        self._world = make_world(self._domain, self._task)
        self._to_move: str | None = None
        self._start()

    def _start(self) -> None:
        self._num_turns = 0
        self._num_calls = {USER: 0, ASSISTANT: 0}
        self._has_told = False
        self._obs: dict[str, Observation] = {}

    @property
    def agent_ids(self) -> list[str]:
        return [USER, ASSISTANT]

    @property
    def active_agents(self) -> list[str]:
        return [] if self._to_move is None else [self._to_move]

    def system_prompt_for(self, agent_id: str) -> str | None:
        return self._world.scenario if agent_id == USER else _ASSISTANT_PROMPT.format(policy=self._world.policy)

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[Observation, Info]]:
        self._world = self._make_world(self._domain, self._task)
        self._start()
        self._world.say(ASSISTANT, GREETING)
        self._to_move, self._obs = USER, {USER: GREETING}
        return {USER: (GREETING, {"task_id": str(self._task["id"]), "domain": self._domain})}

    def current_obs(self) -> dict[str, Observation]:
        return dict(self._obs)

    # --- tools ---

    def episode_tools(self, agent_id: str) -> Sequence[Callable[..., Any]]:
        return [
            tool_from_schema(spec.name, spec.description, spec.parameters, partial(self._call, agent_id, spec.name))
            for spec in self._world.tools(agent_id)
        ]

    def _call(self, role: str, name: str, /, **arguments: Any) -> ToolResult:
        self._num_calls[role] += 1
        return ToolResult(*self._world.call(role, name, arguments))

    # --- the dialogue ---

    def step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        self._require_running()
        assert self._to_move is not None, "the episode is running"
        role = self._to_move
        outcomes = self._end(ended_by="silence") if role not in actions else self._act(role, actions[role])
        self._obs = {agent_id: outcome.obs for agent_id, outcome in outcomes.items()}
        return outcomes

    def _act(self, role: str, action: str) -> dict[str, StepOutcome]:
        self._num_turns += role == ASSISTANT
        if calls := read_calls(action):
            answers = "\n".join(self._call(role, name, **arguments).content for name, arguments in calls)
            return self._out_of_turns() or {role: StepOutcome(answers, 0.0, info=self._info())}
        self._world.say(role, action)
        self._has_told |= role == ASSISTANT
        if role == USER and any(mark in action for mark in END_MARKS):
            return self._end(ended_by="user")
        if over := self._out_of_turns():
            return over
        self._to_move = USER if role == ASSISTANT else ASSISTANT
        return {
            role: StepOutcome("", 0.0, info=self._info()),
            self._to_move: StepOutcome(action, 0.0, info=self._info()),
        }

    def _out_of_turns(self) -> dict[str, StepOutcome] | None:
        return self._end(ended_by="turns") if self._num_turns >= self.max_turns and self._to_move == ASSISTANT else None

    def _info(self) -> Info:
        return {
            "turn": self._num_turns,
            "num_calls": self._num_calls[ASSISTANT],
            "num_user_calls": self._num_calls[USER],
        }

    def _end(self, *, ended_by: str) -> dict[str, StepOutcome]:
        """A dialogue that the user has not ended earns nothing, as in the benchmark."""
        is_whole = ended_by == "user"
        self._to_move = None
        parts = self._world.grade() if is_whole else {}
        score = float(is_whole and all(part >= 1.0 for part in parts.values()))
        rewards = {ASSISTANT: score, USER: {"shared": score, "opposed": 1.0 - score, "none": 0.0}[self.user_reward]}
        info = {
            **self._info(),
            "correct": score >= 1.0,
            "ended_by": ended_by,
            "parts": parts,
            "task_id": str(self._task["id"]),
        }
        return {
            role: StepOutcome("The dialogue is over.", rewards[role], not is_whole, is_whole, info=dict(info))
            for role in self.agent_ids
        }

    # --- the reference solution: the planned calls in their order, what must be said, and the end ---

    def reference_action(self, agent_id: str) -> str | None:
        if self._to_move != agent_id:
            return None
        rest = self._world.plan[sum(self._num_calls.values()) :]
        own = next((number for number, call in enumerate(rest) if call.role != agent_id), len(rest))
        if own:
            return json.dumps([{"name": call.name, "arguments": dict(call.arguments)} for call in rest[:own]])
        if rest:
            return "Please go on."
        if agent_id == ASSISTANT:
            return f"All is done. {' '.join(self._world.to_say)}".strip()
        return END_MARKS[0] if self._has_told else "Please help me."
