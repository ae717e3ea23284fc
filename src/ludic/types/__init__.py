"""Types that cross package borders. Standard library and numpy only.

Every package may import it; it imports `util` only. Start with rollout.py and samples.py, then interfaces.py. A name loads its
own module only: `ludic.types.ConfigError` loads errors.py.
"""

from typing import TYPE_CHECKING

from ludic.util.lazy import lazy

if TYPE_CHECKING:
    from ludic.types.columns import ActorTokenLogps as ActorTokenLogps
    from ludic.types.errors import *  # noqa: F403
    from ludic.types.interfaces import *  # noqa: F403
    from ludic.types.messages import *  # noqa: F403
    from ludic.types.metrics import *  # noqa: F403
    from ludic.types.requests import *  # noqa: F403
    from ludic.types.rollout import *  # noqa: F403
    from ludic.types.rollout_files import *  # noqa: F403
    from ludic.types.samples import *  # noqa: F403
    from ludic.types.sampling import *  # noqa: F403
    from ludic.types.steps import *  # noqa: F403
    from ludic.types.tokens import *  # noqa: F403
    from ludic.util.urls import shown_url as shown_url

_NAMES_BY_MODULE = {
    "errors": "BrokenSample ConfigError ContextError EngineClosed EnvContractError EnvCrashed EnvWorkerError Failure "
    "LudicError MissingExtra MissingPackage NotFinite OutOfGPUMemory OutOfRoom ParserContractError PolicyGone "
    "PromptTooLong QueueFull RequestsExhausted ResetNeeded ScorerContractError SnapshotUnsupported TemplateError "
    "TokenBudgetSpent TokenMismatch UnknownName",
    "interfaces": "AccountsForItems AdapterPublisher BatchSource ChatClient ChecksSamples ChecksServers CreditAssigner "
    "Evaluator FollowsDrift FollowsVersions InPlacePublisher PolicyPublisher ReportsMeans ReportsMetrics "
    "SampleCheck SampleFilter Scorer StateFromStepFn Stateful StepSelector StreamingClient TakesSnapshots "
    "TeacherScorer TokenizeFn TrainingLogger VersionedClient",
    "messages": "Content content_of Image images_in ImageSpan JSON Message MessageSpan MessageView ToolCall",
    "metrics": "apply_reducers_to_records component_means default_reducers NormalizeBy percent_keys Reducer ReducerKind "
    "result_names result_rates",
    "requests": "CtxSpec derive_seed EnvSpec prompt_key ProtocolSpec RolloutRequest",
    "rollout": "by_session GroupKey Rollout",
    "rollout_files": "load_rollouts save_rollouts",
    "columns": "ActorTokenLogps",
    "samples": "has_actor_logps HasActorLogps RolloutStepKey SampleAttachments SampleOrigin "
    "samples_by_session SAWBatch SAWItem",
    "sampling": "BackendExtensions ChatResponse InferenceSpec require_trainable_reply ReturnSpec SamplingConfig "
    "SamplingParams TokenChunk TokenCompletionRequest ToolRequest untrainable_settings VLLMExtensions",
    "steps": "ActionTarget added AgentStep components_of EnvironmentStep Info is_parse_failure new_id Observation "
    "scores_of Snapshot Step StepOutcome StopReason Turn was_rejected_as_cut_off",
    "tokens": "CandidateSets ExpertArray float_array FloatArray LogprobArray rounding_of spread_of token_array TokenArray "
    "TokenIds TokenLog TokenTrace TurnNumbers VersionRun",
    "ludic.util.urls": "shown_url",
}
__all__ = [name for names in _NAMES_BY_MODULE.values() for name in names.split()]
__getattr__ = lazy(__name__, _NAMES_BY_MODULE)
