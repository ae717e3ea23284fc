import pytest

from ludic.interaction import SingleAgentProtocol, run_or_record
from ludic.types import ConfigError, PolicyGone, StopReason
from tests.fakes import CountingEnv, make_agent


def raising(error):
    async def run():
        raise error

    return run


async def test_a_failed_episode_becomes_a_rollout_with_its_failure():
    protocol = SingleAgentProtocol(make_agent([]))
    (rollout,) = await run_or_record(protocol, raising(OSError("no server")), meta={"n": 1})
    assert rollout.stop is StopReason.FAILED and rollout.failure.message == "no server" and rollout.meta == {"n": 1}


@pytest.mark.parametrize("error", [ConfigError("wrong"), PolicyGone("no server left")], ids=repr)
async def test_config_errors_and_policy_gone_are_raised(error):
    with pytest.raises(type(error), match=str(error)):
        await run_or_record(SingleAgentProtocol(make_agent([])), raising(error), meta={})


async def test_a_config_error_of_a_protocol_run_is_raised():
    protocol = SingleAgentProtocol(make_agent(["<a>inc</a>"]))

    async def run():
        return await protocol.run(env=CountingEnv(2), max_steps=0)

    with pytest.raises(ConfigError, match="max_steps=0"):
        await run_or_record(protocol, run, meta={})
