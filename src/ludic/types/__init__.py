"""Types: what crosses a package border. Standard library and numpy only.

Everything may import it; it imports nothing. Start with rollout.py and samples.py, then interfaces.py.
"""

from ludic.types.arrays import LogprobArray, TokenArray, TokenIds, logprob_array, rounding_of, spread_of, token_array
from ludic.types.errors import (
    ConfigError,
    ContextError,
    EnvContractError,
    LudicError,
    MissingExtra,
    NotFinite,
    OutOfRoom,
    ParserContractError,
    PolicyGone,
    PromptTooLong,
    RequestsExhausted,
    ResetNeeded,
    SnapshotUnsupported,
    TemplateError,
    TokenBudgetSpent,
    TokenMismatch,
    UnknownName,
)
from ludic.types.interfaces import (
    AccountsForItems,
    AdapterPublisher,
    BatchSource,
    ChatClient,
    ChecksSamples,
    ChecksServers,
    CreditAssigner,
    Evaluator,
    FollowsDrift,
    FollowsVersions,
    InPlacePublisher,
    PolicyPublisher,
    SampleCheck,
    SampleFilter,
    StateFromStepFn,
    Stateful,
    StepSelector,
    TakesSnapshots,
    TeacherScorer,
    TokenizeFn,
    TrainingLogger,
    VersionedClient,
)
from ludic.types.messages import JSON, Message, MessageView, ToolCall
from ludic.types.metrics import (
    NormalizeBy,
    Reducer,
    ReducerKind,
    apply_reducers_to_records,
    default_reducers,
    percent_keys,
    result_names,
    result_rates,
)
from ludic.types.requests import CtxSpec, EnvSpec, ProtocolSpec, RolloutRequest, derive_seed, prompt_key
from ludic.types.rollout import (
    Failure,
    Rollout,
    is_parse_failure,
    load_rollouts,
    save_rollouts,
    was_rejected_as_cut_off,
)
from ludic.types.samples import (
    ActorTokenLogps,
    HasActorLogps,
    RolloutStepKey,
    SampleAttachments,
    SAWBatch,
    SAWItem,
    has_actor_logps,
    objective_of,
    with_objective,
)
from ludic.types.sampling import (
    BackendExtensions,
    ChatResponse,
    InferenceSpec,
    ReturnSpec,
    SamplingConfig,
    SamplingParams,
    TokenCompletionRequest,
    ToolRequest,
    VLLMExtensions,
    require_trainable_reply,
    untrainable_settings,
)
from ludic.types.steps import (
    ActionTarget,
    AgentStep,
    EnvironmentStep,
    Info,
    Observation,
    Snapshot,
    Step,
    StepOutcome,
    StopReason,
    new_id,
)
from ludic.types.tokens import CandidateSets, TokenLog, TokenTrace, VersionRun
from ludic.types.urls import shown_url

__all__ = [
    "JSON", "Message", "MessageView", "ToolCall", "Stateful", "FollowsVersions", "InPlacePublisher", "ChecksServers",
    "ChecksSamples", "FollowsDrift", "AccountsForItems", "AdapterPublisher", "TakesSnapshots", "RequestsExhausted",
    "TokenArray", "TokenIds", "LogprobArray", "TokenLog", "TokenTrace", "CandidateSets", "VersionRun", "token_array",
    "rounding_of", "spread_of",
    "logprob_array", "ChatResponse", "SamplingParams", "SamplingConfig", "ReturnSpec", "ToolRequest", "TokenCompletionRequest",
    "InferenceSpec", "BackendExtensions", "VLLMExtensions", "untrainable_settings", "require_trainable_reply",
    "Observation", "Info", "StepOutcome", "Snapshot", "StopReason", "ActionTarget", "new_id",
    "AgentStep", "EnvironmentStep", "Step", "Rollout", "Failure", "is_parse_failure", "was_rejected_as_cut_off", "save_rollouts",
    "load_rollouts",
    "EnvSpec", "ProtocolSpec", "CtxSpec", "RolloutRequest", "prompt_key",
    "SAWItem", "SAWBatch", "SampleAttachments", "ActorTokenLogps", "HasActorLogps", "has_actor_logps",
    "RolloutStepKey",
    "ChatClient", "VersionedClient", "BatchSource", "CreditAssigner", "PolicyPublisher", "Evaluator", "TrainingLogger",
    "TeacherScorer", "SampleFilter", "SampleCheck", "TokenizeFn", "StateFromStepFn", "StepSelector",
    "Reducer", "ReducerKind", "NormalizeBy", "default_reducers", "apply_reducers_to_records", "percent_keys",
    "result_names", "result_rates",
    "derive_seed", "objective_of", "with_objective", "shown_url",
    "LudicError", "ConfigError", "UnknownName", "MissingExtra", "EnvContractError", "ResetNeeded",
    "SnapshotUnsupported", "TemplateError", "ContextError", "ParserContractError", "PolicyGone", "TokenMismatch", "OutOfRoom",
    "NotFinite",
    "PromptTooLong", "TokenBudgetSpent",
]  # fmt: skip
