"""Several servers behind one client: who gets the next request."""

import asyncio
from contextlib import ExitStack

import numpy as np

from ludic_vllm.routing import ServerPool
from plugins.vllm.tests.vllm_fake import a_request, client_of, fake

NOTHING = np.array([], np.int32)


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1000, size=length).astype(np.int32)


def pool_of(number: int) -> ServerPool:
    return ServerPool([f"http://s{i}" for i in range(number)], rest_s=1000.0)


def finish(pool: ServerPool, prompt: np.ndarray, completion: np.ndarray = NOTHING) -> str:
    """One request from beginning to end."""
    with pool.lease(prompt) as server:
        pool.worked(server, prompt, completion)
        return server.url


def test_new_prompts_are_spread_evenly():
    pool = pool_of(4)
    with ExitStack() as open_ones:
        for seed in range(40):
            open_ones.enter_context(pool.lease(tokens(64, seed)))
        assert [server.num_in_flight for server in pool.servers] == [10] * 4
    assert [server.num_in_flight for server in pool.servers] == [0] * 4


def test_the_next_turn_goes_where_the_conversation_is():
    pool = pool_of(3)
    conversations = []
    with ExitStack() as open_ones:
        for seed in range(6):
            prompt = tokens(100, seed)
            server = open_ones.enter_context(pool.lease(prompt))
            reply = tokens(40, 100 + seed)
            pool.worked(server, prompt, reply)
            conversations.append((server.url, np.concatenate([prompt, reply, tokens(20, 200 + seed)])))
    assert len({url for url, _ in conversations}) == 3
    assert all(finish(pool, following) == url for url, following in reversed(conversations))


def test_samples_of_one_prompt_that_were_spread_each_stay_with_their_own_server():
    pool, prompt = pool_of(2), tokens(64)
    replies = {}
    for index, server in enumerate(pool.servers):
        replies[server.url] = tokens(64, index + 1)
        pool.worked(server, prompt, replies[server.url])
    for url, reply in replies.items():
        assert finish(pool, np.concatenate([prompt, reply])) == url


def test_a_shared_beginning_does_not_draw_everything_to_one_server():
    pool, system = pool_of(4), tokens(64)
    with ExitStack() as open_ones:
        for seed in range(100):
            open_ones.enter_context(pool.lease(np.concatenate([system, tokens(64, seed)])))
        assert min(server.num_in_flight for server in pool.servers) >= 15


def test_a_warm_cache_is_not_worth_a_long_queue():
    pool, prompt = pool_of(2), tokens(64)
    home = finish(pool, prompt)
    with ExitStack() as open_ones:
        urls = [open_ones.enter_context(pool.lease(prompt)).url for _ in range(6)]
    assert urls == [home] * 5 + [next(s.url for s in pool.servers if s.url != home)]


def test_a_failed_server_is_skipped_for_a_while():
    pool, prompt = pool_of(2), tokens(64)
    home = finish(pool, prompt)
    broken = next(server for server in pool.servers if server.url == home)
    pool.failed(broken)
    assert not pool.has_another(next(server for server in pool.servers if server is not broken))
    assert {finish(pool, prompt) for _ in range(5)} == {s.url for s in pool.servers} - {home}
    broken.awake_at = 0.0
    assert home in {finish(pool, tokens(64, seed)) for seed in range(5)}


def test_if_all_servers_have_failed_the_first_to_wake_is_asked():
    pool = pool_of(3)
    for server in pool.servers:
        pool.failed(server)
    assert finish(pool, tokens(10)) == min(pool.servers, key=lambda server: server.awake_at).url


def test_requests_that_fail_together_are_one_failure():
    pool = pool_of(2)
    for _ in range(64):
        pool.failed(pool.servers[0])
    assert pool.servers[0].num_failures == 1


async def test_a_request_moves_on_to_another_server_at_once():
    async with fake(faults=["500"]) as bad, fake() as good, client_of(bad, good, wait_s=1000.0) as client:
        async with asyncio.timeout(60):
            response, info = await client.complete_tokens(a_request())
    assert len(response.completion_token_ids) == 4
    assert info["server"] == good.url and len(bad.requests) == 1


async def test_a_server_that_dies_under_load_costs_no_request():
    async with fake(delay_s=0.05) as dying, fake(delay_s=0.05) as living, client_of(dying, living) as client:
        asking = [asyncio.create_task(client.complete_tokens(a_request((1, i)))) for i in range(40)]
        while not (dying.requests and living.requests):
            await asyncio.sleep(0.005)
        await dying.stop()
        answers = await asyncio.gather(*asking)
    assert [response.completion_token_ids[0] for response, _ in answers] == [i + 1 for i in range(40)]
    assert len(dying.requests) > 0 and len(living.requests) > 20


async def test_a_conversation_stays_with_its_server_over_http():
    async with fake() as one, fake() as two, client_of(one, two) as client:
        prompts = [tokens(64, seed) for seed in range(8)]
        homes = {}
        answers = await asyncio.gather(*(client.complete_tokens(a_request(prompt)) for prompt in prompts))
        for index, (_, info) in enumerate(answers):
            homes[index] = info["server"]
        for index, (response, _) in enumerate(answers):
            following = np.concatenate([prompts[index], response.completion_token_ids, tokens(40, 50 + index)])
            _, info = await client.complete_tokens(a_request(following))
            assert info["server"] == homes[index]
    assert set(homes.values()) == {one.url, two.url}
