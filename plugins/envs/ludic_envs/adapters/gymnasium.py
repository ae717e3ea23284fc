"""Gymnasium environments with discrete or text actions, as text envs.

A renderer turns an observation into text: the env's `ansi` picture if it has one, else its numbers, or a given function. The seed
goes to the env's `reset`; termination and truncation are passed through.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from ludic.types import ConfigError, Info, MissingExtra, Observation, StepOutcome
from ludic_envs.adapters.base import Choices, ReplayedEnv, as_json, as_text, uncoloured

View: TypeAlias = Literal["auto", "ansi", "observation"]
Render: TypeAlias = Callable[[Any], str]

AGENT = "agent_0"
ACTION_NAMES: Mapping[str, Sequence[str]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "none", "right"),
    "Acrobot": ("left", "none", "right"),
}
"""Names of the actions of Gymnasium's own envs."""


class GymnasiumEnv(ReplayedEnv):
    """Any Gymnasium environment with discrete or text actions; observations as text."""

    kind = "gymnasium"

    def __init__(
        self,
        env_id: str,
        *,
        env_args: Mapping[str, Any] | None = None,
        action_names: Sequence[str] | None = None,
        render: Render | View = "auto",
        invalid_reward: float = 0.0,
        system_prompt: str | None = None,
    ) -> None:
        """`env_args` go to `gymnasium.make`. `action_names` name a discrete space's actions in order; without them they
        are called as in ACTION_NAMES, else by number. `render` is a function from the observation to text, or "ansi",
        "observation", or "auto": ansi where the env draws it. An invalid reply does not change the env, costs `invalid_reward`
        and is answered with the legal actions.
        """
        if not callable(render) and render not in get_args(View):
            raise ConfigError(f"render={render!r}; give a function, or one of {', '.join(get_args(View))}.")
        self.env_id = env_id
        self.env_args = dict(env_args or {})
        self.invalid_reward = invalid_reward
        self._render = render
        self._roles = [AGENT]
        self._over = True
        self._seen: Any = None
        self._draws = render == "ansi"
        self._live = self._make()
        if render == "auto" and "ansi" in self._live.metadata.get("render_modes", ()):
            self._live.close()
            self._draws = True
            self._live = self._make()
        self._actions = self._choices(action_names)
        self._system_prompt = system_prompt or self._explain()

    def _make(self) -> Any:
        try:
            import gymnasium
        except ImportError as error:
            raise MissingExtra("gymnasium", f"The Gymnasium env {self.env_id!r}") from error
        settings: dict[str, Any] = {**self.env_args, **({"render_mode": "ansi"} if self._draws else {})}
        try:
            return gymnasium.make(self.env_id, disable_env_checker=True, **settings)
        except (gymnasium.error.Error, TypeError, ValueError, ImportError) as error:
            raise ConfigError(f"Gymnasium cannot make {self.env_id!r} with {self.env_args}: {error}") from error

    def _choices(self, names: Sequence[str] | None) -> Choices | None:
        """None when actions are text."""
        from gymnasium import spaces

        space = self._live.action_space
        if isinstance(space, spaces.Text):
            return None
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"The actions of {self.env_id!r} are {space}; an agent that writes needs a Discrete or a Text space. "
                "Wrap the env in one that offers such actions and register that."
            )
        known = ACTION_NAMES.get(self.env_id.rpartition("/")[2].partition("-v")[0])
        return Choices(repr(self.env_id), int(space.n), names or known, start=int(space.start))

    def _explain(self) -> str:
        how = f"Reply with one of: {', '.join(self._actions.names())}." if self._actions else "Reply with your action."
        colours = " A mark like [S:red] is an S in red." if self._draws else ""
        return f"You act in the environment {self.env_id}, one action per reply.{colours} {how}"

    def _to_act(self) -> list[str]:
        return [] if self._over else [AGENT]

    def _begin(self, seed: int) -> dict[str, tuple[Observation, Info]]:
        self._live = self._make() if self._live is None else self._live
        self._seen, info = self._live.reset(seed=seed)
        self._over = False
        return {AGENT: (self._view(), {"env": as_json(info)})}

    def _advance(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        said = actions.get(AGENT, "")
        action = self._read(said)
        if action is None:
            legal = f" Legal actions: {', '.join(self._actions.names())}." if self._actions else ""
            answer = f"{said.strip()!r:.60} is not an action here.{legal}\n{self._view()}"
            return {AGENT: StepOutcome(answer, self.invalid_reward, info={"illegal_move": True})}
        self._seen, reward, terminated, truncated, info = self._live.step(action)
        self._over = bool(terminated or truncated)
        facts: Info = {"illegal_move": False, "env": as_json(info)}
        return {AGENT: StepOutcome(self._view(), float(reward), bool(truncated), bool(terminated), facts)}

    def _read(self, said: str) -> Any:
        if self._actions is not None:
            return self._actions.read(said)
        return said if self._live.action_space.contains(said) else None

    def _view(self) -> Observation:
        if callable(self._render):
            return self._render(self._seen)
        return uncoloured(self._live.render()) if self._draws else as_text(self._seen)

    def legal_actions(self, agent_id: str) -> list[str] | None:
        return None if self._actions is None else [] if self._over else self._actions.names()
