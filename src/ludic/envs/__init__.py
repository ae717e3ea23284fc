"""Environments: `LudicEnv`, two bases to build on, the contract check, and the built-in tasks.

`interaction`, `batch_gen` and `run` import it; it imports `tools`. Start with single_agent_env.py, then check/. Tasks
are made by name (`ludic.registry.envs.make("tic_tac_toe")`) or imported from their modules. More of them, and
processes that hold them, are in the plug-in `ludic_envs`.
"""

from typing import TYPE_CHECKING

from ludic.envs.dataset_qa_env import DatasetQAEnv, ParserFn, PromptBuilder, Sample, VerifierFn
from ludic.envs.env import LudicEnv
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.plugins import lazy

if TYPE_CHECKING:
    from ludic.envs.check import EnvCheckFailed, EnvReport, check_env

__all__ = [
    "LudicEnv", "SingleAgentEnv", "DatasetQAEnv", "Sample", "ParserFn", "VerifierFn", "PromptBuilder",
    "check_env", "EnvCheckFailed", "EnvReport",
]  # fmt: skip

__getattr__ = lazy(__name__, {"check": "EnvCheckFailed EnvReport check_env"})
