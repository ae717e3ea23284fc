"""The flags of a vLLM server that a run starts. In FP8 the check of sampler against trainer says when rounding matters.

vLLM itself is not started here, and FP8 needs a GPU.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import ludic.run
from ludic.models.loading import make_tiny
from ludic.run.config.run_config import RunConfig
from ludic.run.settings import from_table
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import ActorTokenLogps, ConfigError
from ludic_vllm.client import VLLMChatClient
from ludic_vllm.command import VLLMInstall, default_flags
from ludic_vllm.generation import SleepAfterBatch, cache_flags, save_for_server
from tests.unit.training.bandit import hand_trainer, tiny_llama
from tests.unit.training.samples import random_items


def test_the_setting_becomes_a_flag_of_vllm(tmp_path):
    made = make_tiny(0)
    config = from_table(RunConfig, {"rollouts": {"server_quantization": "fp8"}}, "test")
    flags = save_for_server(made, tmp_path, quantization=config.rollouts.server_quantization)
    assert flags[-2:] == ["--quantization", "fp8"]
    assert "--quantization" not in save_for_server(made, tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "for a vLLM server that the run starts"),
        ({"engine": "vllm", "server": ["http://127.0.0.1:9"]}, "for a vLLM server that the run starts"),
        ({"engine": "vllm", "max_lag": 1}, "it generates meanwhile"),
        ({"engine": "vllm", "close_batch_at": 0.9}, "it generates meanwhile"),
    ],
)
def test_a_server_sleeps_only_where_it_is_the_runs_own_and_idle_while_the_trainer_computes(settings, said):
    with pytest.raises(ConfigError, match=said):
        ludic.run.build(env="key_door", model="tiny", server_sleep=True, **settings)


def test_a_resumed_run_may_leave_the_sleep_of_its_server_out():
    class Counted:
        def __init__(self, count: int) -> None:
            self.count = count

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    client = VLLMChatClient(connection_timeout_s=0)
    plain = Counted(0)
    plain.load_state_dict(SleepAfterBatch(Counted(7), client).state_dict())
    SleepAfterBatch(asleep := Counted(0), client).load_state_dict(plain.state_dict())
    assert plain.count == asleep.count == 7


def test_the_cache_is_what_the_servers_share_leaves_beside_its_weights():
    assert cache_flags(0.4, 100 << 30, 10 << 30) == ["--kv-cache-memory-bytes", str((40 - 10 - 3) << 30)]
    assert cache_flags(0.4, 24 << 30, 7 << 30) == [], "vLLM decides, and says what to do"


def test_log_probs_stay_those_of_the_distribution_that_was_sampled():
    """So the difference to the trainer is what rounding changed, and nothing else."""
    install = VLLMInstall.__new__(VLLMInstall)
    object.__setattr__(install, "version", "0.32.0")
    object.__setattr__(install, "is_cpu", False)
    flags = default_flags(install, ["--quantization", "fp8"])
    assert flags[flags.index("--logprobs-mode") + 1] == "processed_logprobs"


def rounded_to_fp8(model):
    model = copy.deepcopy(model)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            scale = module.weight.detach().abs().max() / 448
            module.weight.data = (module.weight.data / scale).to(torch.float8_e4m3fn).float() * scale
    return model


@pytest.mark.parametrize(("spread", "warns"), [(0.02, False), (0.3, True)])
async def test_the_guard_warns_where_rounding_to_fp8_moves_the_policy(spread, warns, caplog):
    model = tiny_llama(initializer_range=spread)
    items = random_items([12, 20, 9])
    sampler = TrainedPolicy(rounded_to_fp8(model))
    with torch.no_grad():
        logps_A = sampler.logps(sampler.batch(items))[0].numpy()
    ends = np.cumsum([item.num_action_tokens for item in items])[:-1]
    items = [
        replace(item, attachments=replace(item.attachments, actor_logps=ActorTokenLogps(own)))
        for item, own in zip(items, np.split(logps_A, ends), strict=True)
    ]
    stats = await hand_trainer(items, model=model).train()
    assert ("Sampler and trainer disagree" in caplog.text) == warns
    assert (stats["train/logp_difference_abs"] > 0.05) == warns and stats["train/logp_difference_abs"] > 0
