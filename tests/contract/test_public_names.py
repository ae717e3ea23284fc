"""The public API: names and parameters that people bring code for. Removing one is a decision, not an accident."""

import importlib
import inspect

import pytest

NAMES = {
    "ludic.types": "JSON Message TokenTrace ChatResponse Observation Info StepOutcome Snapshot AgentStep EnvironmentStep "
    "Step Rollout StopReason SAWItem SAWBatch SampleAttachments ActorTokenLogps HasActorLogps has_actor_logps "
    "RolloutStepKey EnvSpec ProtocolSpec CtxSpec RolloutRequest SamplingParams SamplingConfig ReturnSpec ToolRequest "
    "TokenCompletionRequest InferenceSpec BackendExtensions VLLMExtensions ChatClient VersionedClient BatchSource "
    "CreditAssigner PolicyPublisher Evaluator TrainingLogger SampleFilter TokenizeFn StateFromStepFn StepSelector",
    "ludic.envs": "LudicEnv SingleAgentEnv DatasetQAEnv Sample ParserFn VerifierFn PromptBuilder check_env",
    "ludic.envs.tic_tac_toe": "TicTacToeEnv TicTacToeDuel",
    "ludic.envs.gsm8k": "GSM8KEnv",
    "ludic.envs.math": "MATHEnv",
    "ludic.context": "ContextStrategy FullDialog TruncatedThinkingContext SlidingWindow",
    "ludic.parsers": "ParseResult Parser compose_parsers xml_parser xml_tag_parser think_prefix_parser "
    "cot_prefix_parser boxed_parser extract_last_boxed_content",
    "ludic.tools": "Tool ToolResult as_tool tool_schema calculator",
    "ludic.agents": "Agent ToolAgent ReActAgent AgentActStep AgentActResult ToolScope",
    "ludic.inference": "ChatClient ChatTemplate HFChatTemplate HermesToolParser ToolParser ToolParseResult "
    "TemplateResult SamplingParams ReturnSpec ToolRequest TokenCompletionRequest InferenceSpec VLLMExtensions",
    "ludic.interaction": "InteractionProtocol SingleAgentProtocol SingleAgentSyncProtocol MultiAgentProtocol "
    "DelegatingProtocol TraceCollector ExternalToolHandler merge_step_info split_parser_reward RESERVED_INFO_KEYS",
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
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_there(module: str):
    loaded = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if not hasattr(loaded, name)]
    assert not missing


@pytest.mark.parametrize("target", PARAMETERS)
def test_public_parameters_are_there(target: str):
    module, _, path = target.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    missing = set(PARAMETERS[target].split()) - set(inspect.signature(found).parameters)
    assert not missing


def test_the_import_lines_of_the_documents_work():
    from ludic.agents import Agent, ReActAgent, ToolAgent
    from ludic.context import FullDialog, TruncatedThinkingContext
    from ludic.envs import DatasetQAEnv, LudicEnv, SingleAgentEnv
    from ludic.inference import HermesToolParser, HFChatTemplate
    from ludic.interaction import SingleAgentSyncProtocol
    from ludic.parsers import compose_parsers, think_prefix_parser, xml_tag_parser

    names = (Agent, ReActAgent, ToolAgent, FullDialog, TruncatedThinkingContext, DatasetQAEnv, LudicEnv, SingleAgentEnv,
             HermesToolParser, HFChatTemplate, SingleAgentSyncProtocol, compose_parsers, think_prefix_parser,
             xml_tag_parser)  # fmt: skip
    assert all(callable(name) for name in names)


@pytest.mark.parametrize("module", NAMES)
def test_all_lists_only_names_that_exist(module: str):
    loaded = importlib.import_module(module)
    assert [name for name in getattr(loaded, "__all__", ()) if not hasattr(loaded, name)] == []
