import pytest

from ludic.interaction import SingleAgentProtocol, recorded
from ludic.types import ConfigError, PolicyGone, StopReason
from tests.fakes import CountingEnv, make_agent


def test_a_failed_episode_becomes_a_rollout_with_its_failure():
    with recorded(SingleAgentProtocol(make_agent([])), {"n": 1}) as rollouts:
        raise OSError("no server")
    (rollout,) = rollouts
    assert rollout.stop is StopReason.FAILED and rollout.failure.message == "no server" and rollout.meta == {"n": 1}


@pytest.mark.parametrize("error", [ConfigError("wrong"), PolicyGone("no server left")], ids=repr)
def test_config_errors_and_policy_gone_are_raised(error):
    with pytest.raises(type(error), match=str(error)), recorded(SingleAgentProtocol(make_agent([])), {}):
        raise error


async def test_a_config_error_of_a_protocol_run_is_raised():
    protocol = SingleAgentProtocol(make_agent(["<a>inc</a>"]))
    with pytest.raises(ConfigError, match="max_steps=0"), recorded(protocol, {}):
        await protocol.run(env=CountingEnv(2), max_steps=0)
