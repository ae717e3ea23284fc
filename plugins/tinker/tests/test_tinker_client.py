"""TinkerChatClient on a fake of the service with a real model: tokens, log-probs, versions, ends, and every refusal."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tinker", reason="the extra 'tinker' is not installed")

from ludic.http.client import EndpointError, ResponseTimeout
from ludic.inference import ByteTemplate, TinkerChatClient
from ludic.types import (
    ConfigError,
    MissingExtra,
    PromptTooLong,
    ReturnSpec,
    SamplingParams,
    TokenCompletionRequest,
    VersionedClient,
    VersionRun,
    VLLMExtensions,
)
from ludic_tinker.client import TinkerConfig, sdk
from tests.tinker_fake import FakeTinker
from tests.tinker_fake.fixtures import config_for, fake, new_policy, policy_at, service
from tests.unit.training.bandit import ByteTokenizer, tiny_llama

pytestmark = pytest.mark.slow

__all__ = ["fake", "service"]  # fixtures

PROMPT = np.array([257, 120, 260, 258], dtype=np.int32)


def request(seed: int | None = 3, prompt: Any = PROMPT, **sampling: Any) -> TokenCompletionRequest:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 6, **sampling})
    is_plain = params.temperature == 1 and params.top_p == 1 and not params.top_k
    returned = ReturnSpec.for_rl() if is_plain else ReturnSpec.for_eval()
    return TokenCompletionRequest(model="tiny", prompt_token_ids=prompt, sampling=params, return_=returned, seed=seed)


@pytest.fixture(scope="module")
def connected(service: FakeTinker) -> Iterator[TinkerChatClient]:
    made = TinkerChatClient.connect(config_for(service), tokenizer=ByteTokenizer())
    yield made
    made.close()


@pytest.fixture
def client(fake: FakeTinker, connected: TinkerChatClient) -> TinkerChatClient:
    connected.tokenizer = ByteTokenizer()
    return connected


async def ask(client: TinkerChatClient, asked: TokenCompletionRequest) -> Any:
    return (await client.complete_tokens(asked))[0]


# --- completions ---


async def test_the_tokens_are_those_of_the_model_and_so_are_their_logprobs(client: TinkerChatClient):
    assert isinstance(client, VersionedClient)
    answer = await ask(client, request(ignore_eos=True))
    assert len(answer.completion_token_ids) == 6
    assert np.array_equal(answer.prompt_token_ids, PROMPT)
    ids = torch.tensor([[*PROMPT.tolist(), *answer.completion_token_ids.tolist()]])
    with torch.no_grad():
        logps = torch.log_softmax(tiny_llama()(ids).logits[0], dim=-1)
    own = logps[torch.arange(3, 9), ids[0, 4:]].numpy()
    assert np.allclose(answer.completion_logprobs, own, atol=1e-5)
    assert answer.finish_reason == "length"
    assert answer.version_runs == (VersionRun(0, 6),)
    assert answer.text == ByteTokenizer().decode(answer.completion_token_ids.tolist())


async def test_the_prompt_is_sent_as_it_is_with_the_sampling_that_was_asked_for(
    fake: FakeTinker, client: TinkerChatClient
):
    await ask(client, request(seed=2**64 - 1, temperature=0.5, top_p=0.9, top_k=7, max_tokens=2))
    (sent,) = fake.asked("asample")
    assert [token for chunk in sent["prompt"]["chunks"] for token in chunk["tokens"]] == PROMPT.tolist()
    params = sent["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["max_tokens"]) == (0.5, 0.9, 7, 2)
    assert params["seed"] == 2**63 - 1
    assert "stop" not in params


async def test_logprobs_are_omitted_unless_requested(client: TinkerChatClient):
    asked = request()
    asked.return_ = ReturnSpec.for_eval()
    assert (await ask(client, asked)).completion_logprobs is None


# --- ends ---


async def test_a_stop_token_ends_the_completion_and_belongs_to_it(client: TinkerChatClient, fake: FakeTinker):
    free = await ask(client, request(ignore_eos=True, max_tokens=12))
    third = int(free.completion_token_ids[2])
    answer = await ask(client, request(max_tokens=12, stop_token_ids=(third,)))
    assert answer.completion_token_ids.tolist() == free.completion_token_ids[:3].tolist()
    assert (answer.finish_reason, len(answer.completion_logprobs)) == ("stop", 3)
    # What is given takes the place of the model's own end, which is therefore given too.
    assert fake.asked("asample")[-1]["sampling_params"]["stop"] == sorted({third, ByteTemplate.END})


async def test_what_the_service_samples_behind_an_end_is_dropped(client: TinkerChatClient):
    free = await ask(client, request(ignore_eos=True, max_tokens=12))
    client.tokenizer = type("Tokenizer", (ByteTokenizer,), {"eos_token_id": int(free.completion_token_ids[4])})()
    answer = await ask(client, request(max_tokens=12))  # the service knows of another end
    assert answer.completion_token_ids.tolist() == free.completion_token_ids[:5].tolist()
    assert answer.finish_reason == "stop"
    assert answer.version_runs == (VersionRun(0, 5),)


async def test_a_stop_string_stays_in_the_tokens_and_is_cut_from_the_text(client: TinkerChatClient, fake: FakeTinker):
    free = await ask(client, request(ignore_eos=True, max_tokens=30))
    byte = next(int(t) for t in free.completion_token_ids[2:] if 33 <= t < 127)
    at = free.completion_token_ids.tolist().index(byte)
    answer = await ask(client, request(max_tokens=30, stop=chr(byte)))
    assert answer.completion_token_ids.tolist() == free.completion_token_ids[: at + 1].tolist()
    assert answer.text == free.text[: free.text.index(chr(byte))]
    assert answer.finish_reason == "stop"
    assert fake.asked("asample")[-1]["sampling_params"]["stop"] == [chr(byte)]


# --- versions ---


async def test_a_request_under_way_keeps_the_weights_it_began_with(fake: FakeTinker):
    policy = await asyncio.to_thread(policy_at, fake)
    fake.num_try_again = 3
    first = asyncio.create_task(ask(policy.client, request()))
    await asyncio.sleep(0)
    await asyncio.to_thread(policy.publish, 5)
    second = await ask(policy.client, request())
    assert (await first).version_runs[0].version == 0
    assert second.version_runs[0].version == 5
    assert await policy.client.get_policy_version() == 5


def test_weights_cannot_be_sent(client: TinkerChatClient):
    with pytest.raises(ConfigError, match="TinkerTrainer"):
        client.sync_weights({})


# --- trouble ---


async def test_slow_promises_dropped_connections_busy_servers_and_announced_results_are_lived_through(
    fake: FakeTinker, client: TinkerChatClient
):
    expected = await ask(client, request())
    fake.num_try_again, fake.inline_limit = 2, 4
    fake.faults["asample"] += ["drop"]
    fake.faults["retrieve_future"] += ["503"]
    answer = await ask(client, request())
    assert np.array_equal(answer.completion_token_ids, expected.completion_token_ids)
    assert len(fake.asked("asample")) == 3
    assert len(fake.asked("retrieve_future")) >= 6


async def test_a_promise_that_fails_says_why(fake: FakeTinker, client: TinkerChatClient):
    fake.faults["asample"] += ["fail: the model is on fire"]
    with pytest.raises(EndpointError, match="the model is on fire"):
        await ask(client, request())


async def test_a_completion_that_does_not_come_in_time_is_given_up_and_says_so(
    fake: FakeTinker, client: TinkerChatClient, monkeypatch: pytest.MonkeyPatch
):
    fake.num_try_again = 10_000
    monkeypatch.setattr(client, "_request_timeout_s", 0.2)
    with pytest.raises(ResponseTimeout, match=r"asked to sample.*request_timeout_s=0\.2"):
        await ask(client, request())
    fake.behave()  # otherwise the SDK keeps retrying


async def test_a_request_that_is_refused_says_so_at_once(fake: FakeTinker, client: TinkerChatClient):
    fake.faults["asample"] += ["422"]
    with pytest.raises(EndpointError, match="422") as refused:
        await ask(client, request())
    assert refused.value.status == 422
    assert len(fake.asked("asample")) == 1


async def test_a_prompt_without_room_is_refused_here(client: TinkerChatClient, fake: FakeTinker):
    with pytest.raises(PromptTooLong, match="70 tokens, but the limit is 64") as refused:
        await ask(client, request(prompt=np.zeros(40, np.int32), max_tokens=30))
    assert refused.value.limit == 64
    assert fake.asked("asample") == []


def test_a_conversation_may_be_bounded_below_what_the_service_has_room_for(fake: FakeTinker):
    policy = new_policy(fake, max_context=20)
    policy.close()
    assert policy.client.max_context == 20


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"temperature": 0.7}, "temperature=0.7"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 5}, "top_k=5"),
        ({"min_p": 0.1}, "min_p"),
        ({"frequency_penalty": 1.0, "min_tokens": 2}, "frequency_penalty, min_tokens"),
    ],
)
async def test_sampling_that_cannot_be_trained_on_is_refused(
    client: TinkerChatClient, sampling: dict[str, Any], said: str
):
    asked = request(**sampling)
    asked.return_ = ReturnSpec.for_rl()
    with pytest.raises(ConfigError, match=said):
        await ask(client, asked)


async def test_extensions_of_other_servers_and_empty_prompts_are_refused(client: TinkerChatClient):
    asked = request()
    asked.extensions = VLLMExtensions(max_think=3)
    with pytest.raises(ConfigError, match="VLLMExtensions"):
        await ask(client, asked)
    with pytest.raises(ConfigError, match="prompt is empty"):
        await ask(client, request(prompt=[]))


# --- connecting ---


def test_the_project_is_sent_and_an_unknown_one_is_refused_by_name(fake: FakeTinker):
    new_policy(fake, project_id="project-1").close()
    assert fake.asked("create_session")[-1]["project_id"] == "project-1"
    with pytest.raises(ConfigError, match=r"Project project-2 not found.*project_id='project-2'.*must exist"):
        new_policy(fake, project_id="project-2")


def test_a_base_model_that_the_service_lacks_is_named(fake: FakeTinker):
    with pytest.raises(ConfigError, match="Unknown base model huge.*base_model='huge'"):
        new_policy(fake, base_model="huge")
    assert [path for path, _ in fake.requests if path.endswith("/finish")], "its session has ended"


def test_a_wrong_key_names_the_variable(fake: FakeTinker):
    with pytest.raises(ConfigError, match="401.*TINKER_API_KEY"):
        new_policy(fake, api_key="tml-wrong")


def test_a_missing_key_names_the_variable(fake: FakeTinker, monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where `tinker auth login` keeps one
    with pytest.raises(ConfigError, match="no key for Tinker.*TINKER_API_KEY.*tinker auth login"):
        new_policy(fake, api_key=None)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(MissingExtra, match=r"pip install 'ludic-rl\[tinker\] @ git"):
        sdk()


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="lora_rank=0"):
        TinkerConfig(base_model="tiny", lora_rank=0)
    with pytest.raises(ConfigError, match="trains nothing"):
        TinkerConfig(base_model="tiny", train_attn=False, train_mlp=False, train_unembed=False)
    assert "tml" not in repr(TinkerConfig(base_model="tiny", api_key="tml-secret"))
