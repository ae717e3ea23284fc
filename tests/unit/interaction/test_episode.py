import pytest

from ludic.interaction import SingleAgentProtocol, run_or_record
from ludic.types import ConfigError, PolicyGone, StopReason
from tests.fakes import CountingEnv, make_agent


def raising(error):
    async def run():
        raise error

    return run


async def test_a_failed_episode_becomes_a_rollout_that_says_why():
    protocol = SingleAgentProtocol(make_agent([]))
    (rollout,) = await run_or_record(protocol, raising(OSError("no server")), meta={"n": 1})
    assert rollout.stop is StopReason.FAILED and rollout.failure.message == "no server" and rollout.meta == {"n": 1}


async def test_a_mistake_in_the_set_up_is_no_failed_episode():
    with pytest.raises(ConfigError, match="wrong"):
        await run_or_record(SingleAgentProtocol(make_agent([])), raising(ConfigError("wrong")), meta={})


async def test_a_mistake_in_the_set_up_of_a_real_run_travels_on():
    protocol = SingleAgentProtocol(make_agent(["<a>inc</a>"]))

    async def run():
        return await protocol.run(env=CountingEnv(2), max_steps=0)

    with pytest.raises(ConfigError, match="max_steps=0"):
        await run_or_record(protocol, run, meta={})


async def test_a_policy_that_is_gone_ends_more_than_the_episode():
    protocol = SingleAgentProtocol(make_agent([]))
    with pytest.raises(PolicyGone, match="no server left"):
        await run_or_record(protocol, raising(PolicyGone("no server left")), meta={})
