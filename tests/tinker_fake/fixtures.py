"""A fake service with a tiny Llama that knows the byte template's ids, and policies trained there.

A client of the SDK takes a quarter of a second of computing to make. So the tests of a file share the service and, where they
want the same, a policy, which is put back to its first weights in a new training run.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from ludic.distributed import TinkerPolicy
from ludic.inference import ByteTemplate, TinkerConfig
from tests.tinker_fake.service import FakeTinker
from tests.unit.training.bandit import ByteTokenizer, tiny_llama

SEED = 7
_FIRST = "first"
_POLICIES: dict[tuple[Any, ...], tuple[TinkerPolicy, str]] = {}


@pytest.fixture(scope="module")
def service() -> Iterator[FakeTinker]:
    with (
        pytest.MonkeyPatch.context() as environment,
        # Eager, so that NaN stays NaN as it does at the service: some CPUs' fused attention makes zeros of it.
        FakeTinker({"tiny": tiny_llama(attn_implementation="eager")}, eos_id=ByteTemplate.END) as made,
    ):
        environment.setenv("TINKER_TELEMETRY", "0")
        yield made
        while _POLICIES:  # or their sessions' heartbeats look for a service that has gone
            _POLICIES.popitem()[1][0].close()


@pytest.fixture
def fake(service: FakeTinker) -> FakeTinker:
    """As if it were new."""
    service.behave()
    service.requests.clear()
    service.checkpoints = {path: saved for path, saved in service.checkpoints.items() if path.endswith(_FIRST)}
    return service


def config_for(fake: FakeTinker, **settings: Any) -> TinkerConfig:
    known: dict[str, Any] = {"base_model": "tiny", "lora_rank": 8, "lora_seed": SEED}
    return TinkerConfig(**{**known, "base_url": fake.url, "api_key": fake.api_key, **settings})


def new_policy(fake: FakeTinker, **settings: Any) -> TinkerPolicy:
    return TinkerPolicy(config_for(fake, **settings), tokenizer=ByteTokenizer())


def policy_at(fake: FakeTinker, **settings: Any) -> TinkerPolicy:
    """With its first weights, published as version 0. Two of the same settings cannot be used at once."""
    key = tuple(settings.items())
    if key not in _POLICIES:
        policy = new_policy(fake, **settings)
        _POLICIES[key] = policy, policy.save_state(_FIRST)
    policy, path = _POLICIES[key]
    policy.load_state(path)
    policy.publish(0)
    fake.requests.clear()
    return policy
