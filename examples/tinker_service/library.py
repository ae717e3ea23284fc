"""GRPO with the weights at Tinker, or at `ludic serve --tinker` ($TINKER_BASE_URL): the reward is the share of vowels."""

# ruff: noqa: T201 - a script prints

from ludic.agents import Agent
from ludic.batch_gen import RolloutBatchSource, RolloutEngine, make_dataset_sequence_requests_fn
from ludic.context import FullDialog
from ludic.distributed import TinkerPolicy
from ludic.envs import SingleAgentEnv
from ludic.inference import TinkerConfig
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.training import CheckpointConfig, PrintLogger, TinkerTrainer, TrainerConfig, make_grpo
from ludic.types import InferenceSpec, ReturnSpec, SamplingParams, StepOutcome
from ludic_tinker.template import tinker_template

MODEL = "Qwen/Qwen3-4B-Instruct-2507"


class Vowels(SingleAgentEnv):
    """Earns the share of vowels in the reply."""

    def __init__(self, topic):
        super().__init__()
        self.topic = topic

    def env_reset(self, *, seed=None):
        return f"Write about {self.topic}.", {}

    def env_step(self, action):
        return StepOutcome("", reward=sum(c in "aeiou" for c in action) / len(action), terminated=True)


policy = TinkerPolicy(TinkerConfig(base_model=MODEL, lora_rank=32))  # a session, a training run, its first weights
template = tinker_template(MODEL, policy.tokenizer)
algo = make_grpo(group_size=8)


def new_protocol():
    agent = Agent(
        client=policy.client,
        model=MODEL,
        ctx=FullDialog(),
        parser=lambda text: ParseResult(action=text or "?", reward=0.0, obs=None),
        chat_template=template,
        reject_incomplete_completions=False,
    )
    return SingleAgentProtocol(agent)


source = RolloutBatchSource(
    engine=RolloutEngine(env_registry={"vowels": Vowels}, protocol_registry={"single": new_protocol}),
    requests_fn=make_dataset_sequence_requests_fn(
        ["rain", "chess", "Paris"],
        batch_size=2,
        group_size=8,
        env_kind="vowels",
        env_kwargs_fn=lambda topic: {"topic": topic},
        protocol_kind="single",
        inference=InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=8), return_=ReturnSpec.for_rl()),
    ),
    algorithm=algo,
    max_steps=1,
    concurrency=64,
)
trainer = TinkerTrainer(
    model=policy,
    algo=algo,
    batch_source=source,
    cfg=TrainerConfig(lr=8e-5, weight_decay=0.0),
    checkpoint_config=CheckpointConfig("runs/vowels/checkpoints", every_n_steps=2),
    train_logger=PrintLogger(keys=["avg_total_reward", "loss", "lag_max"]),
)
trainer.train_sync(num_steps=3)
print(policy.save_for_sampling("vowels"))  # a tinker:// path for TinkerChatClient.connect(config, model_path=…)
policy.close()
