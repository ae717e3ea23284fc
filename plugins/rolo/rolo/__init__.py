"""A minimal RL framework for LLMs.

    DataLoader → Env → Generator → RewardModel → GRPOTrainer → Model.update()

Everything pluggable is a Protocol: no base classes, no registration. Messages (message.py), RL (rl.py) and tokens (rendering.py)
are three layers with types of their own. Only `local_backend` and `tinker_backend` load torch and the Tinker SDK.
"""

from rolo.data import DataLoader, HuggingFaceDataLoader
from rolo.generation import Generator, Policy, RolloutGenerator
from rolo.logging import MetricsLogger, TensorBoardLogger, run_logger
from rolo.message import Message, ToolCall
from rolo.model import Model, SavesWeights, TrainingBatch, UpdateResult
from rolo.rendering import CompletionOutput, RenderedPrompt, Renderer, ToolSpec
from rolo.rewards import RewardModel
from rolo.rl import Action, Env, EnvBuilder, Example, Reward, State, Step, Trajectory
from rolo.training import GRPOConfig, GRPOTrainer, compute_advantages

__all__ = [
    "Message", "ToolCall", "State", "Action", "Env", "EnvBuilder", "Step", "Trajectory", "Reward", "Example",
    "Renderer", "RenderedPrompt", "CompletionOutput", "ToolSpec", "Policy", "Generator", "RolloutGenerator",
    "RewardModel", "Model", "SavesWeights", "TrainingBatch", "UpdateResult", "GRPOTrainer", "GRPOConfig", "compute_advantages",
    "DataLoader", "HuggingFaceDataLoader", "MetricsLogger", "TensorBoardLogger", "run_logger",
]  # fmt: skip
