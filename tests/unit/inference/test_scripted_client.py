import pytest

from ludic.inference import ByteTemplate, ReturnSpec, SamplingParams, ScriptedClient, TokenCompletionRequest
from ludic.types import ConfigError, PromptTooLong


def request(**kwargs):
    return TokenCompletionRequest(model="m", prompt_token_ids=[1, 2, 3], **kwargs)


async def test_replies_come_in_order_and_then_run_out():
    client = ScriptedClient(["a", "b"])
    assert [(await client.complete_tokens(request()))[0].text for _ in range(2)] == ["a", "b"]
    with pytest.raises(ConfigError, match="no replies left"):
        await client.complete_tokens(request())


async def test_a_reply_past_max_tokens_is_cut_and_says_so():
    response, _ = await ScriptedClient(lambda _: "abcdef").complete_tokens(
        request(sampling=SamplingParams(max_tokens=3))
    )
    assert response.text == "abc" and response.finish_reason == "length" and len(response.completion_token_ids) == 3


async def test_scripted_logprobs_are_returned_only_if_requested():
    plain, _ = await ScriptedClient(["a"]).complete_tokens(request())
    assert plain.completion_logprobs is None and plain.completion_token_ids[-1] == ByteTemplate.END
    asked, _ = await ScriptedClient(["a"]).complete_tokens(request(return_=ReturnSpec.for_rl()))
    assert len(asked.completion_logprobs) == 2 and asked.version_runs == ((0, 2),)


async def test_a_prompt_past_the_limit_is_a_named_error():
    with pytest.raises(PromptTooLong, match="3 tokens, but the limit is 2"):
        await ScriptedClient(["a"], max_prompt_tokens=2).complete_tokens(request())
