"""Results that wait for their clients: found by their tenant alone, announced in order, dropped in time."""

import asyncio

import pytest

from ludic.models.loading import character_tokenizer
from ludic.types import ConfigError
from ludic_serve.command import serve
from ludic_tinker.server.futures import KEPT_AFTER_RETRIEVAL_S, KEPT_S, Futures
from tests.tiny_families import family_model


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_waiting_client_is_woken_by_the_result():
    futures = Futures()
    future = futures.begin("a#1", "anna")
    assert await future.wait(0.0) is None
    waiting = asyncio.create_task(future.wait(60))
    await asyncio.sleep(0)
    futures.resolve(future, {"x": 1})
    futures.resolve(future, {"x": 2})
    assert await waiting == {"x": 1} == await future.wait(0.0), "a result is set once"


async def test_results_are_dropped_after_their_time_and_never_before_they_are_there():
    clock = Clock()
    futures = Futures(clock=clock)
    slow, read, unread = (futures.begin(name, "anna") for name in ("slow", "read", "unread"))
    futures.resolve(read, {})
    futures.resolve(unread, {})
    futures.retrieved(read)
    clock.now = KEPT_AFTER_RETRIEVAL_S + 1
    futures.sweep()
    assert futures.get("read", "anna") is None and futures.get("unread", "anna") is unread
    clock.now = KEPT_S + 1
    futures.sweep()
    assert futures.get("unread", "anna") is None and futures.get("slow", "anna") is slow


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "0.0.0.0"], "Give an --api-key"),
        (["--api-key", "secret"], "does not begin with 'tml-'"),
        (["--api-keys", "/nowhere/keys"], "cannot be read"),
    ],
)
def test_wrong_flags_of_the_command_are_named(flags, said, monkeypatch):
    monkeypatch.delenv("LUDIC_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=said):
        serve(["--tinker", "--model", "tiny", "--port", "0", *flags])


@pytest.mark.parametrize(
    ("family", "said"),
    [("falcon_h1", "it has recurrent layers."), ("gptj", "its samples cannot be packed into one row.")],
)
def test_a_family_that_cannot_be_served_is_refused_in_one_sentence(family, said, tmp_path):
    model = family_model(family)
    model.save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        serve(["--tinker", "--model", str(tmp_path / "model"), "--port", "0", "--data", str(tmp_path / "data")])
    sentence = str(caught.value)
    assert type(model).__name__ in sentence and sentence.endswith(said) and sentence.count(". ") == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--api-key", "tml-a", "--api-keys", "file"], "give one of them"), (["--max-runs", "0"], "max_runs")],
)
def test_flags_that_no_server_can_have_end_the_command(flags, said, capsys):
    with pytest.raises(SystemExit):
        serve(["--tinker", "--model", "tiny", *flags])
    assert said in capsys.readouterr().err
