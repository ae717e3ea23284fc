"""A minimal RL loop on the library's parts.

    DataLoader → Env → Generator → RewardModel → GRPOTrainer → Model.update()

Every stage is a Protocol; only `local_backend` and `tinker_backend` load torch and the Tinker SDK. More in docs/minimal.md.
"""

from ludic.inference.templates.conversation import ClientPolicy
from ludic.minimal.data import DataLoader, HuggingFaceDataLoader
from ludic.minimal.generation import CompletionOutput, Generator, Policy, RolloutGenerator
from ludic.minimal.logging import MetricsLogger, TensorBoardLogger, run_logger
from ludic.minimal.message import Message, ToolCall, message
from ludic.minimal.model import Model, SavesWeights, TrainingBatch, UpdateResult, as_rollout
from ludic.minimal.rendering import ChatRenderer, Dialogue, RenderedPrompt, Renderer, ToolSpec
from ludic.minimal.rewards import RewardModel
from ludic.minimal.rl import Action, Env, EnvBuilder, Example, Reward, State, Step, Trajectory
from ludic.minimal.training import GRPOConfig, GRPOTrainer, compute_advantages

__all__ = [
    "Message", "ToolCall", "message", "State", "Action", "Env", "EnvBuilder", "Step", "Trajectory", "Reward", "Example",
    "Renderer", "Dialogue", "RenderedPrompt", "ToolSpec", "ChatRenderer",
    "Policy", "CompletionOutput", "ClientPolicy", "Generator", "RolloutGenerator",
    "RewardModel", "Model", "SavesWeights", "TrainingBatch", "UpdateResult", "as_rollout",
    "GRPOTrainer", "GRPOConfig", "compute_advantages",
    "DataLoader", "HuggingFaceDataLoader", "MetricsLogger", "TensorBoardLogger", "run_logger",
]  # fmt: skip
