"""Parts that the scripts of this folder share: the game, how a reply is read, and players that need no model."""

import random
from typing import Any, Literal

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs.tic_tac_toe import TicTacToeEnv
from ludic.inference import ChatTemplate, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import pattern_parser
from ludic.types import ChatClient, Info, Observation, Rollout, derive_seed

Player = Literal["minimax", "random"]
MAX_MOVES = 5
"""Moves of the agent in one game."""
last_cell = pattern_parser(r"\b[ABC][123]\b")
"""The last cell that a reply names is its move; a reply that names none costs what an illegal move does."""


class BothSeats(TicTacToeEnv):
    """The agent moves first in games with an even seed and second in the others."""

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self.agent_starts = seed is None or seed % 2 == 0
        return super().env_reset(seed=seed)


def protocol(client: ChatClient, template: ChatTemplate) -> SingleAgentProtocol:
    """One game of one player. An agent remembers one conversation, so every game needs a new one."""
    agent = Agent(
        client=client,
        model="player",
        ctx=FullDialog(),
        parser=last_cell,
        chat_template=template,
        incomplete_completion_penalty=-1.0,  # a reply that is cut off is as bad as an illegal move
    )
    return SingleAgentProtocol(agent, stop_on_parse_error=True)


async def play_scripted(
    env: TicTacToeEnv, player: Player, seed: int, template: ChatTemplate, tokenizer: Any = None
) -> Rollout:
    """A game of perfect or of random legal play, recorded in the tokens of `tokenizer` if one is given."""
    dice = random.Random(derive_seed(seed, 1))  # not the opponent's

    def move(_: object) -> str:
        best = env.reference_action(env.agent_id) if player == "minimax" else None
        return best or dice.choice(env.legal_actions(env.agent_id))

    client = ScriptedClient(move, tokenizer=tokenizer)
    (rollout,) = await protocol(client, template).run(env=env, max_steps=MAX_MOVES, env_seed=seed)
    return rollout
