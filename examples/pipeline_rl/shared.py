"""What the actor and the trainer of this folder agree on: the game, the algorithm, and where they meet."""

import sys
from dataclasses import dataclass
from pathlib import Path

from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.control_token import read_control_token
from ludic.training import RLAlgorithm, make_cispo
from ludic.types import InferenceSpec, ReturnSpec, SamplingParams

TIC_TAC_TOE = Path(__file__).parents[1] / "tic_tac_toe"
sys.path.append(str(TIC_TAC_TOE))  # a script finds its neighbours; the game lives next door

from game import Game  # noqa: E402 - only now can it be found

GAME = Game(agent_starts_as="x", view="compact")
GROUP_SIZE = 8
"""Games against the same dice, compared with each other."""
MAX_LAG = 2
"""A group is trained on at most so many updates after its first token was sampled."""
MAX_LENGTH = 128
"""Tokens of a whole game."""
TRAINING = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=3), return_=ReturnSpec.for_rl())


def make_algorithm() -> RLAlgorithm:
    """CISPO: what an actor sends is a few updates old, and CISPO is made for that.

    Every token counts with the ratio of the trained policy to the one that sampled it, cut off at 1.2: truncated importance
    sampling. The ratio is right for each token of a sample that several versions had a hand in, since each comes with the
    log-probability under its own. GRPO's clip would take the gradient away from just those tokens that the last updates have
    moved, which are the ones that matter. And its credit needs the group only, which is all that an actor sees; rules that look
    at a whole batch (ScaleRL's) have no place here.
    """
    return make_cispo(group_size=GROUP_SIZE)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Settings that both programs have; give them the same."""

    model: str = str(TIC_TAC_TOE / "tiny" / "config.json")
    """A folder, a hub id, or a config for random weights. One that knows the moves: runs/first_run/warm_up, of `make train`."""
    redis: str = "redis://localhost:6379/0"
    """redis://, rediss:// or unix://, with a password where it needs one."""
    queue: str = "pipeline_rl"
    """Name of the queue; each run has its own."""
    weights: Path = Path("runs/pipeline_rl/weights")
    """The folder through which new weights reach the actors. Not used with --server."""
    server: tuple[str, ...] = ()
    """vLLM servers (http://host:port) that play, instead of an engine inside each actor."""
    control_token: Path | None = None
    """With --server: the file with their control token; by default $LUDIC_CONTROL_TOKEN."""

    def servers(self) -> VLLMChatClient:
        token = None if self.control_token is None else read_control_token(self.control_token)
        return VLLMChatClient(servers=self.server, control_token=token)
