"""A minimal RL loop on the library's parts.

    DataLoader → Env → Generator → RewardModel → GRPOTrainer → Model.update()

Every stage is a Protocol; only `local_backend` and `tinker_backend` load torch and the Tinker SDK. More in docs/minimal.md.
"""

from ludic.inference.templates.conversation import ClientPolicy
from ludic.minimal.generation import (
    ChatRenderer,
    CompletionOutput,
    Dialogue,
    Generator,
    Policy,
    RenderedPrompt,
    Renderer,
    RolloutGenerator,
)
from ludic.minimal.rl import (
    Action,
    Env,
    EnvBuilder,
    Example,
    Reward,
    RewardModel,
    State,
    Step,
    ToolSpec,
    Trajectory,
    message,
)
from ludic.minimal.training import (
    DataLoader,
    GRPOConfig,
    GRPOTrainer,
    HuggingFaceDataLoader,
    MetricsLogger,
    Model,
    SavesWeights,
    TrainingBatch,
    UpdateResult,
    as_rollout,
    compute_advantages,
    run_logger,
)
from ludic.training.loggers import TensorBoardLogger
from ludic.types import Message, ToolCall

__all__ = [
    "Message", "ToolCall", "message", "State", "Action", "Env", "EnvBuilder", "Step", "Trajectory", "Reward", "Example",
    "Renderer", "Dialogue", "RenderedPrompt", "ToolSpec", "ChatRenderer",
    "Policy", "CompletionOutput", "ClientPolicy", "Generator", "RolloutGenerator",
    "RewardModel", "Model", "SavesWeights", "TrainingBatch", "UpdateResult", "as_rollout",
    "GRPOTrainer", "GRPOConfig", "compute_advantages",
    "DataLoader", "HuggingFaceDataLoader", "MetricsLogger", "TensorBoardLogger", "run_logger",
]  # fmt: skip
