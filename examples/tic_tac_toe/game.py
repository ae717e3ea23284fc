"""What the scripts of this folder share: the game and its settings, how a reply is read, who is asked for it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ludic.agents import Agent
from ludic.batch_gen import RolloutEngine
from ludic.context import ContextStrategy, FullDialog, TruncatedThinkingContext
from ludic.inference import ChatTemplate, HFChatTemplate
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import pattern_parser
from ludic.types import ChatClient, EnvSpec, InferenceSpec, ProtocolSpec, RolloutRequest


@dataclass(frozen=True, kw_only=True)
class Game:
    """Settings that every script has."""

    agent_starts_as: Literal["x", "o", "mixed"] = "mixed"
    """x moves first; mixed plays every other game as o."""
    opponent: Literal["random", "minimax"] = "random"
    """Who the agent plays against."""
    view: Literal["text", "compact"] = "text"
    """How the board is shown; compact is for models with a small vocabulary."""
    ctx: Literal["full", "truncated"] = "full"
    """What the agent is shown of its own past: all of it, or without what it thought."""
    max_steps_per_episode: int = 5
    """Moves per game; nobody has more than five."""

    def env_kwargs(self, seed: int) -> dict[str, Any]:
        starts = seed % 2 == 0 if self.agent_starts_as == "mixed" else self.agent_starts_as == "x"
        return {"agent_starts": starts, "opponent": self.opponent, "view": self.view}

    def requests(self, seeds: Iterable[int], inference: InferenceSpec) -> list[RolloutRequest]:
        """One game per seed, the same whenever it is asked for."""
        return [
            RolloutRequest(
                env=EnvSpec("tic_tac_toe", self.env_kwargs(seed)),
                protocol=ProtocolSpec("player"),
                env_seed=seed,
                sampling_seed=seed,
                inference=inference,
            )
            for seed in seeds
        ]

    def protocol(self, client: ChatClient, chat_template: ChatTemplate) -> SingleAgentProtocol:
        """One game of one player; an agent remembers one conversation, so every game needs its own."""
        ctx: ContextStrategy = FullDialog() if self.ctx == "full" else TruncatedThinkingContext()
        agent = Agent(
            client=client,
            model="player",
            ctx=ctx,
            parser=last_cell,
            chat_template=chat_template,
            incomplete_completion_penalty=-1.0,  # rambling until it is cut off is no better than an illegal move
        )
        return SingleAgentProtocol(agent, stop_on_parse_error=True)

    def rollout_engine(self, client: ChatClient, tokenizer: Any, **settings: Any) -> RolloutEngine:
        """Plays these games with a model."""
        template = HFChatTemplate(tokenizer)
        return RolloutEngine(protocol_registry={"player": lambda: self.protocol(client, template)}, **settings)


last_cell = pattern_parser(r"\b[ABC][123]\b")
"""The last cell that a reply names is its move; a reply that names none costs what an illegal move does."""
