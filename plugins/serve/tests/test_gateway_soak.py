"""What closed sessions leave behind: no objects of theirs, and in the engine no more prefixes than its blocks."""

import gc
from collections import Counter

import httpx
import pytest

pytest.importorskip("torch", reason="the train extra is not installed")

from ludic.inference.local import LocalEngine
from ludic.run.config.model import ModelSettings
from ludic.run.model import load_policy, make_template
from ludic.types import InferenceSpec, SamplingParams
from ludic_serve.gateway.server import Gateway
from ludic_serve.gateway.session import Policy

CONTROL = {"X-Ludic-Control-Token": "token"}


def num_objects() -> Counter[str]:
    """Living objects of Ludic's classes."""
    gc.collect()
    kinds = map(type, gc.get_objects())
    return Counter(
        f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if str(kind.__module__).startswith("ludic")
    )


async def play(http: httpx.AsyncClient, url: str, number: int) -> None:
    session = (await http.post(f"{url}/sessions", headers=CONTROL, json={})).json()
    messages = [{"role": "user", "content": f"Task {number}: " + "say more. " * 8}]
    for _ in range(2):
        key = {"Authorization": f"Bearer {session['api_key']}"}
        answer = await http.post(f"{session['base_url']}/chat/completions", headers=key, json={"messages": messages})
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Again."}]
    await http.post(f"{url}/sessions/{session['id']}/reward", headers=CONTROL, json={"value": 1.0})
    closed = await http.post(f"{url}/sessions/{session['id']}/close", headers=CONTROL)
    assert closed.json()["rollouts"] == 1, closed.text


async def test_closed_sessions_leave_no_objects_and_the_engine_no_more_prefixes_than_blocks():
    loaded = load_policy(ModelSettings(model="tiny"))
    engine = LocalEngine(loaded.model, loaded.tokenizer, kv_tokens=1024)
    policy = Policy(client=engine, chat_template=make_template(loaded.tokenizer, with_tools=True), model="tiny")
    inference = InferenceSpec(sampling=SamplingParams(max_tokens=4))
    gateway = Gateway({"tiny": policy}, default="tiny", control_token="token", inference=inference)
    await gateway.start()
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            for number in range(16):  # the blocks are all in use then
                await play(http, gateway.url, number)
            before, pool = num_objects(), engine._worker.scheduler.pool
            for number in range(16, 32):
                await play(http, gateway.url, number)
        grown = {kind: count for kind, count in (num_objects() - before).items() if count >= 16}
        assert not grown, f"objects that each session leaves: {grown}"
        assert pool.num_used == 0 and len(pool._published_as) <= pool.num_blocks
        assert len(pool._chains) <= len(pool._published_as) + 1
    finally:
        await gateway.close()
        engine.close()
