"""The public API: names and parameters that people bring code for. Removing one is a decision, not an accident."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Mapping

import pytest

NAMES = {
    "ludic.types": "JSON Message TokenTrace ChatResponse Observation Info StepOutcome Snapshot AgentStep EnvironmentStep "
    "Step Turn Rollout GroupKey StopReason SAWItem SAWBatch SampleOrigin SampleAttachments ActorTokenLogps HasActorLogps "
    "has_actor_logps RolloutStepKey EnvSpec ProtocolSpec CtxSpec RolloutRequest SamplingParams SamplingConfig ReturnSpec ToolRequest "
    "TokenCompletionRequest InferenceSpec BackendExtensions VLLMExtensions ChatClient VersionedClient BatchSource "
    "CreditAssigner PolicyPublisher Evaluator TrainingLogger SampleFilter TokenizeFn StateFromStepFn StepSelector Scorer",
    "ludic.envs": "LudicEnv SingleAgentEnv DatasetQAEnv Sample ParserFn VerifierFn PromptBuilder check_env",
    "ludic.envs.tic_tac_toe": "TicTacToeEnv TicTacToeDuel",
    "ludic.envs.gsm8k": "GSM8KEnv",
    "ludic.envs.math": "MATHEnv",
    "ludic.envs.code_exec": "TestCase TestResult BatchTestResult CodeRunner StdinStdoutRunner ExactMatchVerifier "
    "WhitespaceNormalizedVerifier FloatTolerantVerifier CodeExecConfig CodeExecEnv APPSTestAdapter",
    "ludic.sandbox": "CompileStatus RunStatus CompileResult ExecutionResult CommandResult SandboxLimits Sandbox CommandSandbox "
    "SandboxPool BaseSandboxPool LRUCache Bind SandboxError SandboxPoolExhaustedError create_sandbox_pool shared_pool "
    "detect_available_backend",
    "ludic.context": "ContextStrategy FullDialog TruncatedThinkingContext SlidingWindow SummarisedDialog",
    "ludic.parsers": "ParseResult Parser compose_parsers xml_parser xml_tag_parser think_prefix_parser "
    "cot_prefix_parser boxed_parser extract_last_boxed_content",
    "ludic.tools": "Tool ToolResult as_tool tool_schema calculator",
    "ludic.agents": "Agent ToolAgent ReActAgent ReToolAgent FoldingAgent FoldingReActAgent AgentActStep AgentActResult ToolScope",
    "ludic.inference": "ChatClient ChatTemplate HFChatTemplate HermesToolParser ToolParser ToolParseResult "
    "TemplateResult SamplingParams ReturnSpec ToolRequest TokenCompletionRequest InferenceSpec VLLMExtensions",
    "ludic.gateway": "train evaluate Gateway GatewayProtocol AgentFunction AgentCommand Policy Session SessionLimits "
    "session_rollouts",
    "ludic.interaction": "InteractionProtocol SingleAgentProtocol SingleAgentSyncProtocol MultiAgentProtocol "
    "DelegatingProtocol TraceCollector ExternalToolHandler merge_step_info split_parser_reward RESERVED_INFO_KEYS",
    "ludic.rewards": "Rewards FunctionScorer as_scorer remove_scores",
    "ludic.judges": "LLMJudge RubricJudge Criterion read_criteria GroupJudge PairwiseJudge PositionBias JudgeModel JudgeAgent "
    "JudgeCost VerdictCache Case case_of JudgeError UnreadableVerdict read_verdict Agreement agreement pair_accuracy",
    "ludic.batch_gen": "RolloutEngine RolloutBatchSource AsyncRolloutBatchSource OfflineBatchSource RequestStrategy "
    "IdentityStrategy GRPORequestStrategy RequestsExhausted make_requests_fn_from_queue make_dataset_queue_requests_fn "
    "make_dataset_sequence_requests_fn make_chat_template_step_to_item DynamicSampling Curriculum TooManyFailures "
    "stitch_rollout PrioritisedCurriculum",
    "ludic.training": "RolloutEngine RolloutBatchSource AsyncRolloutBatchSource OfflineBatchSource IdentityStrategy "
    "GRPORequestStrategy RequestsExhausted make_requests_fn_from_queue make_dataset_queue_requests_fn "
    "make_dataset_sequence_requests_fn make_chat_template_step_to_item EnvSpec ProtocolSpec RolloutRequest SAWItem SAWBatch "
    "Trainer TrainerConfig CheckpointConfig CheckpointManager RLAlgorithm make_reinforce make_reinforce_baseline make_grpo "
    "make_dr_grpo make_gspo make_cispo make_sapo make_gmpo make_scalerl make_sft make_dapo make_rloo make_reinforce_pp "
    "make_ppo make_spo BetaValueTracker compose_preprocess validate_actor_logps drop_zero_weight_samples "
    "filter_zero_variance_groups Reducer "
    "PrintLogger RichLiveLogger TeeLogger WandbLogger JSONLLogger TensorBoardLogger TrackioLogger",
    "ludic.training.credit_assignment": "MonteCarloReturn GroupNormalizedReturn HybridNormalizedReturn EpisodicReturn "
    "PerStepReward ConstantCredit TurnGroupReturn LeaveOneOutReturn TrackedValueReturn GAE gae",
    "ludic.training.losses": "Loss Needs ReinforceLoss ReinforceBaselineLoss ClippedSurrogateLoss TokenClippedSurrogateLoss "
    "CISPOLoss SAPOLoss GMPOLoss MaskedCausalLMCrossEntropyLoss KLLoss TokenKLLoss EntropyBonus LossTerm CompositeLoss "
    "selective_log_softmax ActionTokens BatchFacts Reduction ValueLoss BatchNormalized CorrectedLoss TokenTruncation "
    "SequenceTruncation TokenRejection SequenceRejection TokenMask SequenceMask",
    "ludic.training.filters": "keep_all drop_truncated drop_incomplete_completions drop_parse_errors keep_env_steps "
    "keep_agent_steps combine any_of apply_filter default_step_selector",
    "ludic.training.learner.packing": "split_items_by_token_budget collate_saw_items collate_micro_batches MicroBatch",
    "ludic.distributed": "SharedWeightsPublisher InProcessPublisher BroadcastPolicyPublisher Rank0OnlyPublisher "
    "VllmControlPlane ControlPlane TensorCommunicator WeightMetadata WeightPushError create_vllm_publisher "
    "VllmAdapterPublisher FolderPublisher FolderFollower ClientPublisher",
    "ludic.batch_gen.pipeline": "PipelineBatchSource PipelineStats run_pipeline_actor ExperienceQueue",
    "ludic.eval": "EngineEvaluator SnapshotEvaluator evaluate run_eval run_eval_sync EvalReport Grading make_report "
    "paired_difference Outcome outcome_of outcomes_of step_records Estimate mean_estimate share_estimate pass_at_k "
    "majority_at_k",
    # The paths that the seeds name; what is there lives elsewhere.
    "ludic.inference.client": "ChatClient VersionedClient ChatResponse TokenCompletionRequest",
    "ludic.inference.sampling": "SamplingConfig SamplingParams ReturnSpec InferenceSpec",
    "ludic.training.algorithm": "RLAlgorithm make_reinforce make_reinforce_baseline make_grpo make_dr_grpo make_gspo make_cispo "
    "make_sapo make_gmpo make_scalerl make_sft PreprocessFn compose_preprocess validate_actor_logps drop_zero_weight_samples "
    "filter_zero_variance_groups",
    "ludic.training.loss": "Loss ReinforceLoss ReinforceBaselineLoss ClippedSurrogateLoss TokenClippedSurrogateLoss CISPOLoss "
    "SAPOLoss GMPOLoss MaskedCausalLMCrossEntropyLoss KLLoss TokenKLLoss EntropyBonus LossTerm CompositeLoss selective_log_softmax",
    "ludic.training.batching": "RolloutEngine RolloutBatchSource OfflineBatchSource PipelineBatchSource run_pipeline_actor "
    "GRPORequestStrategy IdentityStrategy RequestsExhausted make_requests_fn_from_queue make_dataset_queue_requests_fn "
    "make_dataset_sequence_requests_fn make_chat_template_step_to_item",
    "ludic.training.batching.rollout_engine": "RolloutEngine",
    "ludic.training.trainer": "Trainer",
    "ludic.training.config": "TrainerConfig",
    "ludic.training.checkpoint.manager": "CheckpointConfig CheckpointManager",
    "ludic.distributed.publish.interfaces": "PolicyPublisher ControlPlane TensorCommunicator",
    "ludic.distributed.publisher": "BroadcastPolicyPublisher Rank0OnlyPublisher PolicyPublisher",
    "ludic.envs.env": "LudicEnv",
    "ludic.envs.single_agent_env": "SingleAgentEnv",
    "ludic.envs.dataset_qa_env": "DatasetQAEnv",
    "ludic.agents.base_agent": "Agent",
    "ludic.agents.tool_agent": "ToolAgent",
    "ludic.agents.react_agent": "ReActAgent",
    "ludic.context.base": "ContextStrategy FullDialog",
    "ludic.context.windows": "TruncatedThinkingContext",
    "ludic.interaction.base": "InteractionProtocol",
    "ludic.interaction.single_agent": "SingleAgentProtocol SingleAgentSyncProtocol",
    "ludic.interaction.multi_agent": "MultiAgentProtocol",
    "ludic.inference.vllm.client": "VLLMChatClient",
    "ludic.inference.vllm_server": "start_vllm_server",
    "ludic.registry": "register make list spec envs agents contexts protocols parsers tools algorithms",
}

PARAMETERS = {
    "ludic.agents:Agent": "client model ctx parser chat_template reject_incomplete_completions "
    "incomplete_completion_penalty incomplete_completion_feedback",
    "ludic.agents:Agent.act": "inference sampling_seed timeout_s",
    "ludic.agents:ToolAgent": "tools external_tools tool_parse_error_penalty tool_parse_error_feedback",
    "ludic.agents:ReActAgent": "tools external_tools max_react_steps final_answer_prompt",
    "ludic.envs:DatasetQAEnv": "sample prompt_key answer_key system_prompt prompt_builder target_parser verifier "
    "correct_reward incorrect_reward",
    "ludic.envs.tic_tac_toe:TicTacToeEnv": "agent_starts show_opponent_move opponent epsilon",
    "ludic.parsers:xml_parser": "tag exact kind success_reward error_reward",
    "ludic.context:TruncatedThinkingContext": "system_prompt placeholder",
    "ludic.interaction:SingleAgentProtocol": "agent stop_on_parse_error external_tool_handler",
    "ludic.interaction:SingleAgentProtocol.run": "env max_steps env_seed sampling_seed inference timeout_s",
    "ludic.interaction:MultiAgentProtocol": "agents",
    "ludic.types:SamplingParams": "temperature max_tokens top_p frequency_penalty presence_penalty stop",
    "ludic.types:RolloutRequest": "env protocol env_seed sampling_seed inference num_episodes meta",
    "ludic.types:SAWItem": "input_ids attention_mask action_mask weight meta attachments",
    "ludic.types:TokenTrace": "prompt_token_ids completion_token_ids completion_logprobs finish_reason",
    "ludic.inference:HFChatTemplate": "tokenizer tool_parser",
    "ludic.inference:HFChatTemplate.apply": "messages tools add_generation_prompt",
    "ludic.batch_gen:RolloutEngine": "env_registry protocol_registry jsonl_path",
    "ludic.batch_gen:RolloutEngine.generate_rollouts": "requests max_steps timeout_s concurrency",
    "ludic.batch_gen:RolloutEngine.generate_batch": "requests max_steps credit_assigner algorithm timeout_s concurrency "
    "sample_filter",
    "ludic.batch_gen:RolloutBatchSource": "engine orchestrator request_fn requests_fn algorithm credit_assigner max_steps "
    "timeout_s concurrency sample_filter",
    "ludic.batch_gen:OfflineBatchSource": "jsonl_paths step_to_item credit_assigner batch_size shuffle sample_filter seed "
    "drop_last step_selector",
    "ludic.batch_gen:GRPORequestStrategy": "group_size",
    "ludic.batch_gen:make_requests_fn_from_queue": "q batch_size build_request strategy on_empty",
    "ludic.batch_gen:make_dataset_queue_requests_fn": "samples_q batch_size env_kind protocol_kind inference env_kwargs_fn "
    "protocol_kwargs request_meta_fn env_seed_fn sampling_seed_fn group_size on_empty",
    "ludic.batch_gen:make_dataset_sequence_requests_fn": "samples batch_size env_kind protocol_kind inference env_kwargs_fn "
    "protocol_kwargs request_meta_fn env_seed_fn sampling_seed_fn group_size shuffle rng_seed",
    "ludic.eval:EngineEvaluator": "engine requests_fn reducers max_steps timeout_s concurrency grading",
    "ludic.eval:EngineEvaluator.eval": "requests reducers max_steps timeout_s concurrency",
    "ludic.eval:run_eval": "engine requests reducers max_steps timeout_s concurrency",
    "ludic.training:Trainer": "model algo batch_source cfg publisher param_filter enable_gradient_checkpointing checkpointer "
    "checkpoint_config resume_from train_logger reducers evaluator",
    "ludic.training:Trainer.train": "num_steps",
    "ludic.training:TrainerConfig": "pad_token_id model_device lr learning_rate weight_decay betas eps max_grad_norm "
    "max_seq_len micro_token_budget sync_every_steps mixed_precision_dtype max_lag log_every eval_at_start "
    "eval_every_n_steps eval_concurrency eval_max_steps eval_timeout_s",
    "ludic.training:CheckpointConfig": "output_dir every_n_steps max_to_keep save_optimizer",
    "ludic.training:CheckpointManager.load": "model optimizer step path",
    "ludic.training:RLAlgorithm": "name credit_assigner loss preprocess",
    "ludic.training:RLAlgorithm.compute_loss": "model batch",
    "ludic.training:make_reinforce": "gamma drop_zero_weight drop_zero_weight_eps name",
    "ludic.training:make_reinforce_baseline": "gamma normalize_adv drop_zero_weight drop_zero_weight_eps name",
    "ludic.training:make_grpo": "group_size group_normalize_adv positive_only clip_eps_low clip_eps_high length_normalize "
    "ratio_clip drop_zero_weight drop_zero_weight_eps name",
    "ludic.training:make_dr_grpo": "group_size positive_only clip_eps_low clip_eps_high ratio_clip drop_zero_weight "
    "drop_zero_weight_eps name",
    "ludic.training:make_gspo": "group_size group_normalize_adv positive_only clip_eps_low clip_eps_high length_normalize "
    "ratio_clip drop_zero_weight drop_zero_weight_eps name",
    "ludic.training:make_cispo": "group_size group_normalize_adv positive_only clip_eps_low clip_eps_high length_normalize "
    "kl_coeff drop_zero_weight drop_zero_weight_eps name",
    "ludic.training:make_sapo": "group_size group_normalize_adv positive_only tau_pos tau_neg length_normalize "
    "drop_zero_weight drop_zero_weight_eps name",
    "ludic.training:make_gmpo": "group_size group_normalize_adv positive_only clip_eps_low clip_eps_high length_normalize "
    "ratio_clip drop_zero_weight drop_zero_weight_eps name",
    "ludic.training:make_scalerl": "group_size positive_only clip_eps_low clip_eps_high length_normalize kl_coeff filter_zvp "
    "zvp_filter_eps drop_zero_weight drop_zero_weight_eps name",
    "ludic.training:make_sft": "length_normalize name",
    "ludic.training:drop_zero_weight_samples": "batch eps",
    "ludic.training:filter_zero_variance_groups": "batch eps",
    "ludic.training.credit_assignment:MonteCarloReturn": "gamma",
    "ludic.training.credit_assignment:GroupNormalizedReturn": "group_size normalize_adv positive_only",
    "ludic.training.credit_assignment:HybridNormalizedReturn": "group_size eps positive_only",
    "ludic.training.credit_assignment:ConstantCredit": "value",
    "ludic.training.losses:ReinforceLoss": "length_normalize",
    "ludic.training.losses:ReinforceBaselineLoss": "normalize length_normalize",
    "ludic.training.losses:ClippedSurrogateLoss": "clip_eps_low clip_eps_high length_normalize ratio_clip",
    "ludic.training.losses:TokenClippedSurrogateLoss": "clip_eps_low clip_eps_high length_normalize ratio_clip",
    "ludic.training.losses:CISPOLoss": "clip_eps_low clip_eps_high length_normalize",
    "ludic.training.losses:SAPOLoss": "tau_pos tau_neg length_normalize",
    "ludic.training.losses:GMPOLoss": "clip_eps_low clip_eps_high length_normalize ratio_clip",
    "ludic.training.losses:MaskedCausalLMCrossEntropyLoss": "length_normalize",
    "ludic.training.losses:KLLoss": "coeff length_normalize",
    "ludic.training.losses:TokenKLLoss": "coeff length_normalize",
    "ludic.training.losses:EntropyBonus": "coeff",
    "ludic.training.losses:LossTerm": "name loss weight",
    "ludic.training.losses:CompositeLoss": "terms",
    "ludic.training.losses:Loss.compute": "logits batch",
    "ludic.training.learner.packing:split_items_by_token_budget": "items micro_token_budget max_seq_len",
    "ludic.training.learner.packing:collate_saw_items": "items pad_token_id device",
    "ludic.training.loggers:PrintLogger": "prefix keys precision max_items_per_line",
    "ludic.training.loggers:RichLiveLogger": "keys spark_key history spark_window",
    "ludic.training.loggers:WandbLogger": "init_kwargs project name group tags notes config dir mode",
}

DEFAULTS = {
    "ludic.training:make_grpo": {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "group_normalize_adv": True},
    "ludic.training:make_gspo": {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4, "length_normalize": True},
    "ludic.training:make_cispo": {"clip_eps_low": 1e6, "clip_eps_high": 0.2, "length_normalize": True, "kl_coeff": 0.0},
    "ludic.training:make_sapo": {"tau_pos": 1.0, "tau_neg": 1.05, "length_normalize": False},
    "ludic.training:make_gmpo": {"clip_eps_low": 0.4, "clip_eps_high": 0.4, "length_normalize": True},
    "ludic.training:make_scalerl": {"clip_eps_low": 0.20, "clip_eps_high": 0.28, "filter_zvp": True},
    "ludic.training:make_sft": {"length_normalize": False},
    "ludic.training:TrainerConfig": {"lr": 1e-5, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8,
                                     "max_grad_norm": 1.0, "max_seq_len": 1024, "micro_token_budget": 8192,
                                     "max_lag": None, "log_every": 1, "eval_at_start": False},
    "ludic.training:CheckpointConfig": {"every_n_steps": 0, "max_to_keep": 2, "save_optimizer": True},
    "ludic.eval:EngineEvaluator": {"reducers": None, "max_steps": 1, "timeout_s": None, "concurrency": 32},
    "ludic.eval:run_eval": {"max_steps": 1, "timeout_s": None, "concurrency": 8},
    "ludic.batch_gen:OfflineBatchSource": {"batch_size": 32, "shuffle": True, "seed": 42, "drop_last": False},
}  # fmt: skip
"""What people rely on without writing it."""


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_there(module: str):
    loaded = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if not hasattr(loaded, name)]
    assert not missing


def test_a_name_at_the_path_of_the_seeds_is_the_one_that_is_used():
    from ludic.batch_gen import RolloutEngine
    from ludic.training import CISPOLoss, make_grpo
    from ludic.training.algorithm import make_grpo as seeds_grpo
    from ludic.training.batching import RolloutEngine as seeds_engine
    from ludic.training.batching.rollout_engine import RolloutEngine as engine_of_module
    from ludic.training.loss import CISPOLoss as seeds_loss

    assert (seeds_grpo, seeds_loss, seeds_engine, engine_of_module) == (
        make_grpo,
        CISPOLoss,
        RolloutEngine,
        RolloutEngine,
    )
    with pytest.raises(ImportError, match="NotThere"):
        from ludic.training.batching import NotThere  # noqa: F401


@pytest.mark.parametrize("target", PARAMETERS)
def test_public_parameters_are_there(target: str):
    missing = set(PARAMETERS[target].split()) - set(parameters(target))
    assert not missing


@pytest.mark.parametrize("target", DEFAULTS)
def test_public_defaults_are_what_they_were(target: str):
    found = parameters(target)
    assert {name: found[name].default for name in DEFAULTS[target]} == DEFAULTS[target]


def parameters(target: str) -> Mapping[str, inspect.Parameter]:
    module, _, path = target.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return inspect.signature(found).parameters


def test_the_import_lines_of_the_documents_work():
    from ludic.agents import Agent, ReActAgent, ToolAgent
    from ludic.context import FullDialog, TruncatedThinkingContext
    from ludic.envs import DatasetQAEnv, LudicEnv, SingleAgentEnv
    from ludic.inference import HermesToolParser, HFChatTemplate
    from ludic.interaction import SingleAgentSyncProtocol
    from ludic.parsers import compose_parsers, think_prefix_parser, xml_tag_parser
    from ludic.training import GRPORequestStrategy, RolloutBatchSource, RolloutEngine, Trainer, TrainerConfig, make_grpo

    names = (Agent, ReActAgent, ToolAgent, FullDialog, TruncatedThinkingContext, DatasetQAEnv, LudicEnv, SingleAgentEnv,
             HermesToolParser, HFChatTemplate, SingleAgentSyncProtocol, compose_parsers, think_prefix_parser,
             xml_tag_parser, GRPORequestStrategy, RolloutBatchSource, RolloutEngine, Trainer, TrainerConfig,
             make_grpo)  # fmt: skip
    assert all(callable(name) for name in names)


@pytest.mark.parametrize("module", NAMES)
def test_all_lists_only_names_that_exist(module: str):
    loaded = importlib.import_module(module)
    assert [name for name in getattr(loaded, "__all__", ()) if not hasattr(loaded, name)] == []


def test_a_face_lists_names_that_it_has_not_imported():
    code = "import ludic.envs, ludic.agents; print({'check_env', 'LudicEnv'} <= set(dir(ludic.envs)), 'FoldingAgent' in dir(ludic.agents))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
