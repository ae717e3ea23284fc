"""The vLLM client against a small server on loopback: what is sent, what is read, and what happens when things break."""

import asyncio
import json
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from ludic.http.address import free_port
from ludic.http.client import EndpointError
from ludic.types import (
    BackendExtensions,
    ConfigError,
    Image,
    ImageSpan,
    PolicyGone,
    PromptTooLong,
    ReturnSpec,
    TokenMismatch,
    VersionRun,
    VLLMExtensions,
)
from ludic.types.errors import retry_wait_s
from ludic_vllm.client import VLLMChatClient
from ludic_vllm.wire import completions_body, generate_body, read_completion
from plugins.vllm.tests.vllm_fake import a_request, client_of, fake

# --- what comes back ---


async def test_tokens_log_probs_and_text_come_back():
    async with fake() as server, client_of(server) as client:
        request = a_request()
        response, info = await client.complete_tokens(request)
    assert response.completion_token_ids.tolist() == [4, 5, 6, 7] and response.text == "4 5 6 7"
    assert response.completion_token_ids.dtype == np.int32
    assert response.completion_logprobs.tolist() == [-0.5] * 4
    assert response.prompt_token_ids is request.prompt_token_ids
    assert response.finish_reason == "length" and response.version_runs == (VersionRun(0, 4),)
    assert info["mode"] == "token_in" and info["used_args"]["token_ids"] == [1, 2, 3]
    assert json.loads(info["raw_response"])["choices"][0]["token_ids"] == [4, 5, 6, 7]


IMAGES = tuple(
    ImageSpan(Image.of(np.full((2, 2), shade, dtype=np.uint8)), start, 3) for shade, start in ((9, 1), (7, 5))
)
SEEN = (1, 50, 50, 50, 2, 50, 50, 50, 3)
"""A prompt with two pictures of three tokens each."""


async def test_pictures_are_sent_beside_one_placeholder_each():
    async with fake() as server, client_of(server) as client:
        with pytest.raises(
            TokenMismatch, match="differs from the 9 tokens"
        ):  # this server does not repeat the placeholders
            await client.complete_tokens(a_request(SEEN, images=IMAGES))
    body = server.requests[0][1]
    assert body["token_ids"] == [1, 50, 2, 50, 3]
    assert body["content_parts"] == [{"type": "image_url", "url": span.image.url} for span in IMAGES]


def test_a_prompt_with_pictures_that_the_server_has_repeated_is_accepted():
    answer = {
        "choices": [{"text": "", "token_ids": [4], "finish_reason": "stop"}],
        "usage": {"prompt_tokens": len(SEEN)},
    }
    request = a_request(SEEN, images=IMAGES)
    assert read_completion("", msgspec.json.encode(answer), request).prompt_token_ids is request.prompt_token_ids


def test_a_sampled_placeholder_and_an_endpoint_without_pictures_are_refused():
    with pytest.raises(ConfigError, match="sampled the placeholder"):
        generate_body(a_request((*SEEN, 50), images=IMAGES))
    with pytest.raises(ConfigError, match="only /inference/v1/generate"):
        completions_body(a_request(SEEN, images=IMAGES))


async def test_weights_that_change_in_the_middle_show_in_the_version_runs():
    async with fake(spans=[("6", 1), ("7", 3)]) as server, client_of(server) as client:
        response, _ = await client.complete_tokens(a_request())
    assert response.version_runs == (VersionRun(6, 1), VersionRun(7, 3))
    assert response.to_trace().policy_version == 6


# --- what is sent ---


async def test_the_request_body_holds_every_setting():
    extensions = VLLMExtensions(
        max_think=9,
        repetition_penalty=1.2,
        extra_body_overrides={"stop_token_ids": [5], "cache_salt": "v3", "vllm_xargs": {"a": 1}},
    )
    sampling = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "min_tokens": 2, "stop": ("x", "y"),
                "stop_token_ids": (4,), "ignore_eos": True, "frequency_penalty": 0.5}  # fmt: skip
    async with fake() as server, client_of(server) as client:
        await client.complete_tokens(a_request(sampling=sampling, seed=(1 << 64) + 3, extensions=extensions))
    path, body = server.requests[0]
    assert path == "/inference/v1/generate"
    assert (body["model"], body["token_ids"], body["cache_salt"]) == ("fake", [1, 2, 3], "v3")
    assert body["sampling_params"] == {
        "temperature": 0.7, "max_tokens": 4, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.5,
        "presence_penalty": 0.0, "repetition_penalty": 1.2, "min_tokens": 2, "ignore_eos": True, "stop": ["x", "y"],
        "stop_token_ids": [5], "seed": 3, "logprobs": 0, "extra_args": {"max_think": 9, "a": 1},
    }  # fmt: skip


async def test_a_stop_token_is_part_of_the_text_and_a_stop_string_is_not():
    async with fake() as server, client_of(server) as client:
        await client.complete_tokens(a_request(sampling={"stop_token_ids": (9,)}))
        await client.complete_tokens(a_request(sampling={"stop": "x"}))
        await client.complete_tokens(a_request(extensions=VLLMExtensions(extra_body_overrides={"stop": ["x"]})))
    sent = [body["sampling_params"].get("include_stop_str_in_output") for _, body in server.requests]
    assert sent == [True, None, None]


async def test_without_scale_out_the_completions_endpoint_is_used_after_one_probe():
    extensions = VLLMExtensions(max_think=9, extra_body_overrides={"stop_token_ids": [5]})
    async with fake(has_generate=False, version="7") as server, client_of(server) as client:
        for _ in range(3):
            response, _ = await client.complete_tokens(a_request(extensions=extensions))
    assert [path for path, _ in server.requests] == ["/inference/v1/generate"] + ["/v1/completions"] * 3
    assert server.num_probes == 1
    body = server.requests[-1][1]
    assert body["return_token_ids"] is True and body["prompt"] == [1, 2, 3] and body["logprobs"] == 0
    assert body["vllm_xargs"] == {"max_think": 9} and body["stop_token_ids"] == [5]
    assert response.completion_token_ids.tolist() == [4, 5, 6, 7]
    assert response.completion_logprobs.tolist() == [-0.5] * 4
    assert response.version_runs == (VersionRun(7, 4),)


async def test_an_older_vllm_is_asked_for_completions_which_have_text_and_get_the_served_version():
    async with fake(is_old=True, version="7") as server, client_of(server) as client:
        response, _ = await client.complete_tokens(a_request())
    assert [path for path, _ in server.requests] == ["/v1/completions"]
    assert response.text == "4 5 6 7" and response.version_runs == (VersionRun(7, 4),)


async def test_a_server_without_versions_gives_no_version_runs():
    async with fake(has_generate=False, has_versions=False) as server, client_of(server) as client:
        response, _ = await client.complete_tokens(a_request())
    assert response.version_runs == ()


async def test_concurrent_requests_probe_a_server_once():
    async with fake() as server, client_of(server) as client:
        answers = await asyncio.gather(*(client.complete_tokens(a_request((1, i))) for i in range(100)))
    assert [response.completion_token_ids[0] for response, _ in answers] == [i + 1 for i in range(100)]
    assert server.num_probes == 1


async def test_settings_for_another_server_are_refused():
    async with fake() as server, client_of(server) as client:
        with pytest.raises(TypeError, match="VLLMExtensions"):
            await client.complete_tokens(a_request(extensions=BackendExtensions(kind="other")))
        with pytest.raises(ConfigError, match="empty"):
            await client.complete_tokens(a_request(()))


# --- asking again ---


@pytest.mark.parametrize("fault", ["500", "503", "reset", "abort"])
async def test_server_failures_are_retried(fault):
    async with fake(faults=[fault, fault]) as server, client_of(server) as client:
        response, _ = await client.complete_tokens(a_request())
    assert response.completion_token_ids.tolist() == [4, 5, 6, 7]
    assert len(server.requests) == 3


async def test_a_call_fails_after_the_last_retry():
    async with fake(faults=["500"] * 9) as server, client_of(server, max_retries=2) as client:
        with pytest.raises(EndpointError, match="500: fault 500 It was tried 3 times"):
            await client.complete_tokens(a_request())
    assert len(server.requests) == 3


@pytest.mark.parametrize("fault", ["400", "403", "409", "422", "429"])
async def test_a_request_that_the_server_refuses_is_not_repeated(fault):
    async with fake(faults=[fault]) as server, client_of(server) as client:
        with pytest.raises(EndpointError, match=f"{fault}: fault"):
            await client.complete_tokens(a_request())
    assert len(server.requests) == 1


async def test_a_wrong_key_and_a_wrong_model_are_config_errors():
    async with fake(faults=["401"]) as server, client_of(server) as client:
        with pytest.raises(ConfigError, match="api_key"):
            await client.complete_tokens(a_request())
        with pytest.raises(ConfigError, match=r"Valid aliases: fake.*served-model-name"):
            await client.complete_tokens(a_request(model="gpt-9"))
    async with fake() as server, client_of(server) as client:
        with pytest.raises(ConfigError, match="Valid aliases: fake"):
            await client.complete_tokens(a_request(model="gpt-9"))


async def test_unreachable_server_is_named_and_used_again_after_its_return():
    port = free_port()
    client = VLLMChatClient(port=port, connection_timeout_s=0, max_retries=1, wait_s=0.001)
    with pytest.raises(EndpointError, match=f"127.0.0.1:{port}.*cannot be reached"):
        await client.complete_tokens(a_request())
    async with fake() as server:
        await server.stop()
        await server.start(port)
        response, _ = await client.complete_tokens(a_request())
    assert len(response.completion_token_ids) == 4
    await client.close()


async def test_capabilities_of_a_restarted_server_are_probed_again():
    async with fake() as server, client_of(server) as client:
        await client.complete_tokens(a_request())
        server.has_generate = False
        await server.stop()
        asking = asyncio.create_task(client.complete_tokens(a_request()))
        await asyncio.sleep(0.01)
        await server.start(server.port)
        response, _ = await asking
    assert len(response.completion_token_ids) == 4
    assert server.requests[-1][0] == "/v1/completions"


def test_retry_waits_grow_differ_and_stay_below_their_limit():
    waits = [retry_wait_s(failures, 1.0, 10.0) for failures in (*range(9), 5000)]
    assert waits[0] <= 1.25 and 1.5 <= waits[1] <= 2.5 and waits[-1] >= 7.5 and max(waits) <= 12.5
    assert len({retry_wait_s(0, 1.0, 10.0) for _ in range(20)}) > 1


# --- too long ---


async def test_a_prompt_that_cannot_fit_is_not_sent():
    async with fake() as server, client_of(server) as client:
        with pytest.raises(
            PromptTooLong, match=r"513 tokens, but the limit is 512.*509 of the prompt and max_tokens=4"
        ):
            await client.complete_tokens(a_request(range(509)))
        await client.complete_tokens(a_request(range(508)))
    assert len(server.requests) == 1


async def test_length_errors_of_the_server_become_prompt_too_long():
    async with fake(max_model_len=None, context=64) as server, client_of(server) as client:
        with pytest.raises(PromptTooLong, match="the limit is 64"):
            await client.complete_tokens(a_request(range(64)))
    assert len(server.requests) == 1


async def test_a_silently_shortened_completion_is_an_error():
    async with fake(max_model_len=None, context=64) as server, client_of(server) as client:
        with pytest.raises(PromptTooLong, match="66 tokens, but the limit is 64"):
            await client.complete_tokens(a_request(range(62)))


# --- answers that cannot be used ---


async def test_raw_log_probs_are_refused_where_they_would_be_wrong():
    async with fake(is_processed=False) as server, client_of(server) as client:
        await client.complete_tokens(a_request())
        await client.complete_tokens(a_request(sampling={"temperature": 0.7}, return_=ReturnSpec.for_eval()))
        for sampling in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"presence_penalty": 1}):
            with pytest.raises(ConfigError, match="processed_logprobs"):
                await client.complete_tokens(a_request(sampling=sampling))
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("logprobs", "sampling", "forced"),
    [
        ([-0.5, 0.0, 0.0, 0.0, -0.1, 0.0], {}, [0, 0, 1, 1, 0, 0]),
        ([-0.5, -0.5, -0.2, 0.0, 0.0, 0.0], {}, [0, 0, 0, 0, 0, 0]),  # the tag was there already
        ([-0.5, -0.5, 0.0, 0.0, 0.0, 0.0], {}, [0, 0, 1, 1, 1, 1]),
        ([-0.5, 0.0, 0.0, 0.0, -0.1, 0.0], {"top_p": 0.9}, None),
    ],
)
def test_tokens_that_max_think_forced_had_one_candidate(logprobs, sampling, forced):
    """So a trainer gives them probability 1 as well, and no gradient: the policy did not choose them."""
    choice = {"token_ids": [1, 2, 3, 4, 5, 6], "logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop"}
    asked = a_request(sampling={"temperature": 1.0, **sampling}, extensions=VLLMExtensions(max_think=2))
    response = read_completion("http://x", msgspec.json.encode({"choices": [choice]}), asked)
    assert (None if response.candidates is None else response.candidates.lengths.tolist()) == forced
    assert read_completion("http://x", msgspec.json.encode({"choices": [choice]}), a_request()).candidates is None


async def test_a_log_prob_that_is_missing_is_an_error():
    async with fake(logprob=-9999.0) as server, client_of(server) as client:
        with pytest.raises(EndpointError, match="finite"):
            await client.complete_tokens(a_request())


@pytest.mark.parametrize("has_generate", [True, False])
async def test_a_server_that_saw_another_prompt_is_an_error(has_generate):
    async with fake(has_generate=has_generate, faults=["other prompt"]) as server, client_of(server) as client:
        with pytest.raises(TokenMismatch):
            await client.complete_tokens(a_request((1, 2)))


@pytest.mark.parametrize(("fault", "error"), [("two", EndpointError), ("page", ConfigError)])
async def test_a_malformed_answer_is_an_error(fault, error):
    async with fake(faults=[fault]) as server, client_of(server) as client:
        with pytest.raises(error, match=r"came|does not respond like vLLM"):
            await client.complete_tokens(a_request())


# --- deadlines and cancellation ---


async def test_a_hanging_server_times_out_and_is_disconnected():
    async with fake(faults=["hang"]) as server, client_of(server, request_timeout_s=0.2) as client:
        with pytest.raises(TimeoutError, match="request_timeout_s=0.2"):
            await client.complete_tokens(a_request())
        await until(lambda: server.num_hung_up == 1)


async def test_cancelling_closes_the_connection():
    async with fake(faults=["hang"]) as server, client_of(server) as client:
        asking = asyncio.create_task(client.complete_tokens(a_request()))
        await server.hanging.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: server.num_hung_up == 1)
        await client.complete_tokens(a_request())


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


# --- versions ---


@pytest.mark.parametrize(("label", "version"), [("default", 0), ("0", 0), ("41", 41)])
async def test_the_label_of_the_weights_is_the_version(label, version):
    async with fake(version=label) as server, client_of(server) as client:
        assert await client.get_policy_version() == version


async def test_an_unreachable_server_has_no_version():
    async with fake(version="3") as up, client_of(up) as client:
        client.servers.append(f"http://127.0.0.1:{free_port()}")
        with pytest.raises(EndpointError, match="cannot be reached"):
            await client.get_policy_version()
    async with fake(has_versions=False) as server, client_of(server) as client:
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE"):
            await client.get_policy_version()
    async with fake(version="nightly") as server, client_of(server) as client:
        with pytest.raises(EndpointError, match="nightly"):
            await client.get_policy_version()


# --- control ---


async def test_control_calls_carry_the_token(monkeypatch):
    async with fake() as server, client_of(server, control_token="right") as client:
        answer = await client.control_post(server.url, "/pause", {"a": 1}, params={"mode": "keep"})
        assert answer == {"status": "paused", "mode": "keep", "body": '{"a":1}'}
        assert await client.control_post(server.url, "/v1/load_lora_adapter") == {"message": "Success: added."}
    monkeypatch.setenv("LUDIC_CONTROL_TOKEN", "right")
    async with fake() as server, client_of(server) as client:
        assert (await client.control_post(server.url, "/pause"))["status"] == "paused"


@pytest.mark.parametrize(("token", "message"), [("wrong", "is not the server's"), (None, "has no control token")])
async def test_without_the_right_token_nothing_changes(token, message, monkeypatch):
    monkeypatch.delenv("LUDIC_CONTROL_TOKEN", raising=False)
    async with fake() as server, client_of(server, control_token=token) as client:
        with pytest.raises(ConfigError, match=f"401.*{message}"):
            await client.control_post(server.url, "/pause")
    assert server.num_pauses == 0


async def test_a_control_call_that_gets_no_answer_is_not_repeated():
    async with fake() as server, client_of(server, control_token="right") as client:
        with pytest.raises(ConnectionError, match="cannot be reached"):
            await client.control_post(f"http://127.0.0.1:{free_port()}", "/pause")
        server.pause_s = 10.0
        with pytest.raises(TimeoutError, match="no response within 0.1 s"):
            await client.control_post(server.url, "/pause", timeout_s=0.1)
    assert server.num_pauses == 1


# --- weights ---


class Shelf:
    """A publisher that keeps what it is given."""

    def __init__(self) -> None:
        self.published = []

    def publish(self, state_dict, version=None) -> None:
        self.published.append((dict(state_dict), version))


async def test_weights_go_through_the_publisher():
    shelf = Shelf()
    async with fake(version="4") as server, client_of(server, publisher=shelf) as client:
        assert client.sync_weights({"a": 1}, version="7") == "7"
        assert await asyncio.to_thread(client.sync_weights, {"a": 2}) == "5"
    assert shelf.published == [({"a": 1}, 7), ({"a": 2}, 5)]


# --- set-up ---


def test_a_server_that_does_not_come_up_is_named():
    port = free_port()
    with pytest.raises(ConnectionError, match=f"{port}/health.*connection_timeout_s=0.1"):
        VLLMChatClient(port=port, connection_timeout_s=0.1)


@pytest.mark.parametrize("url", ["localhost:8000", "http://localhost:8000/v1/"])
def test_a_malformed_address_is_refused(url):
    with pytest.raises(ConfigError, match="servers"):
        VLLMChatClient(servers=[url], connection_timeout_s=0)


async def test_several_event_loops_share_a_client_and_leave_nothing_open():
    async with fake() as server, client_of(server) as client:
        await client.complete_tokens(a_request())

        async def elsewhere():
            await client.complete_tokens(a_request())
            return (await client._http.for_loop()).session

        sessions = [await asyncio.to_thread(asyncio.run, elsewhere()) for _ in range(2)]
        assert all(session.closed for session in sessions)
        await client.complete_tokens(a_request())
        assert not (await client._http.for_loop()).session.closed
    assert len(server.requests) == 4


def test_importing_it_needs_neither_vllm_nor_torch_nor_aiohttp():
    probe = "import sys, ludic_vllm.client; print({'torch', 'vllm', 'aiohttp', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


async def test_a_watch_that_has_given_up_ends_the_wait_for_a_dead_server():
    class GivenUp:
        num_starts = 0

        async def ready(self) -> int:
            return 0

        def require_alive(self) -> None:
            raise PolicyGone("the server process has ended")

    client = VLLMChatClient("127.0.0.1", free_port(), connection_timeout_s=0, wait_s=60, watch=GivenUp())
    with pytest.raises(PolicyGone, match="has ended"):
        await client.complete_tokens(a_request())
    with pytest.raises(PolicyGone, match="has ended"):
        await client.get_policy_version()
    await client.close()
