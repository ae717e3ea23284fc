"""When a completion is over, why it says so, and what is cut from its text and never from its tokens."""

import math
from functools import cache
from typing import Any

import pytest
import torch

from ludic.inference.local.sequence import Sequence, StopRule
from tests.chat_templates import make_tokenizer
from tests.unit.inference.local.tiny_models import ask, ask_all, make_engine, new_model, request, tokens

TOKENIZER = make_tokenizer("qwen")
EOS = TOKENIZER.eos_token_id


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def spelled(text: str) -> list[int]:
    """One token per byte, as a model that never learned to merge would write it."""
    return [TOKENIZER.convert_tokens_to_ids(byte_characters()[byte]) for byte in text.encode()]


@cache
def byte_characters() -> dict[int, str]:
    """GPT-2's table from bytes to printable characters."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def write(ids: list[int], *, max_length: int = 1000, stop_ids: tuple[int, ...] = (), **sampling: Any) -> Sequence:
    """Let the rule see a completion token by token, until it stops."""
    rule = StopRule(lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True), max_length)
    sequence = Sequence(
        number=0,
        request=request([1, 2, 3], **{"max_tokens": 500, **sampling}),
        deliver=lambda sequence, error: None,
        seed=0,
        stop_ids=frozenset(stop_ids),
    )
    for token in ids:
        rule.absorb(sequence, [token], [-1.0], 0)
        if sequence.finish_reason is not None:
            break
    return sequence


def text_of(sequence: Sequence) -> str:
    return sequence.response(lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True)).text


@pytest.mark.parametrize("write_text", [encode, spelled], ids=["merged tokens", "single bytes"])
@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("The quick brown fox jumps", "fox", "The quick brown "),
        ("The quick brown fox jumps", "quick brown fox", "The "),
        ("The quick brown fox jumps", ["lazy", "own f", "fox"], "The quick br"),
        ("The quick brown fox jumps", "The", ""),
        ("one\n\ntwo", "\n\n", "one"),
        ("naïve café 🎲 dice", "🎲", "naïve café "),
        ("naïve café 🎲 dice", "fé 🎲 d", "naïve ca"),
        ("你好 世界", "世", "你好 "),
    ],
)
def test_a_stop_string_ends_the_completion_and_is_cut_from_the_text_only(write_text, text, stop, expected):
    ids = write_text(text)
    sequence = write(ids, stop=stop)
    assert sequence.finish_reason == "stop" and text_of(sequence) == expected
    assert sequence.completion == ids[: len(sequence.completion)]
    stops = [stop] if isinstance(stop, str) else stop
    assert any(s in TOKENIZER.decode(sequence.completion) for s in stops)
    before = TOKENIZER.decode(sequence.completion[:-1])
    assert not any(s in before for s in stops), "it stops at the first token that completes one"


@pytest.mark.parametrize("stop", ["cat", ["fox jumped", "dog"], [], None])
def test_a_stop_string_that_does_not_come_stops_nothing(stop):
    sequence = write(encode("The quick brown fox jumps"), stop=stop)
    assert sequence.finish_reason is None and text_of(sequence) == "The quick brown fox jumps"


def test_a_stop_token_before_min_tokens_does_not_end_it():
    ids = [5, 6, 5, 6, 5]
    assert len(write(ids, stop_ids=(6,)).completion) == 2
    assert len(write(ids, stop_ids=(6,), min_tokens=2).completion) == 4
    assert write(ids, stop_ids=(6,), min_tokens=4).finish_reason is None


@pytest.mark.parametrize("write_text", [encode, spelled], ids=["merged tokens", "single bytes"])
def test_a_stop_string_within_min_tokens_does_not_end_it(write_text):
    ids = write_text("one. two. three. four")
    first = len(write(ids, stop=".").completion)
    assert text_of(write(ids, stop=".", min_tokens=first - 1)) == "one"
    later = write(ids, stop=".", min_tokens=first)
    assert later.finish_reason == "stop" and text_of(later) == "one. two"
    assert write(ids, stop=".", min_tokens=len(ids)).finish_reason is None


def test_a_stop_string_that_ends_behind_min_tokens_ends_it():
    ids = spelled("one END two")
    assert text_of(write(ids, stop="END", min_tokens=6)) == "one "
    assert write(ids, stop="END", min_tokens=7).finish_reason is None


def test_limits_end_it_for_length_and_a_stop_on_the_last_token_is_a_stop():
    ids = [5, 6, 7, 8]
    assert write(ids, max_tokens=3).finish_reason == "length"
    assert len(write(ids, max_tokens=3).completion) == 3
    assert write(ids, max_length=5).finish_reason == "length"
    assert len(write(ids, max_length=5).completion) == 2, "two, behind a prompt of three"
    assert write(ids, max_tokens=3, stop_ids=(7,)).finish_reason == "stop"


def test_tokens_sampled_beyond_the_end_are_dropped():
    rule = StopRule(TOKENIZER.decode, 1000)
    for settings, stop_ids, expected in (
        ({"max_tokens": 2}, (), [5, 6]),
        ({"max_tokens": 9}, (6,), [5, 6]),
        ({"max_tokens": 9}, (), [5, 6, 7]),
    ):
        sequence = Sequence(
            number=0, request=request([1], **settings), deliver=lambda s, e: None, seed=0, stop_ids=frozenset(stop_ids)
        )
        rule.absorb(sequence, [5, 6, 7], [-1.0, -2.0, -3.0], 4)
        assert sequence.completion == expected
        assert sequence.logprobs == [-1.0, -2.0, -3.0][: len(expected)] and sequence.runs == [[4, len(expected)]]


# --- through the engine ---


@cache
def speaking_model() -> Any:
    return new_model("llama", vocab_size=len(TOKENIZER))


def make_speaker(**settings: Any) -> Any:
    return make_engine(speaking_model(), TOKENIZER, **settings)


@cache
def eager_to_end() -> Any:
    """A model that says eos about every tenth time, whatever came before."""
    model = new_model("llama", vocab_size=len(TOKENIZER), initializer_range=0.02)
    bias = torch.zeros(len(TOKENIZER))
    bias[EOS] = math.log(len(TOKENIZER) / 9)
    model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return model


PROMPT = encode("What is the capital of France?")


async def test_the_engine_stops_at_stop_strings_that_span_tokens():
    async with make_speaker() as engine:
        free = await ask(engine, PROMPT, temperature=1.0, seed=1, max_tokens=24)
        texts = [TOKENIZER.decode(tokens(free)[: n + 1]) for n in range(24)]
        stop = free.text[len(texts[8]) - 1 : len(texts[11])]  # from the end of one token, over two, into another
        stopped = await ask(engine, PROMPT, temperature=1.0, seed=1, max_tokens=24, stop=["<never>", stop])
    assert stop and stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]
    count = len(stopped.completion_token_ids)
    assert tokens(stopped) == tokens(free)[:count] and stop in texts[count - 1] and stop not in texts[count - 2]


async def test_eos_ends_a_completion_unless_it_is_to_be_ignored():
    settings = {"temperature": 1.0, "max_tokens": 24}
    async with make_engine(eager_to_end(), TOKENIZER) as engine:
        ended = await ask_all(engine, [request(PROMPT, seed=n, **settings) for n in range(16)])
        ignored = await ask_all(engine, [request(PROMPT, seed=n, **settings, ignore_eos=True) for n in range(16)])
        late = await ask_all(engine, [request(PROMPT, seed=n, **settings, min_tokens=9) for n in range(16)])
        both = await ask_all(
            engine, [request(PROMPT, seed=n, **settings, ignore_eos=True, stop_token_ids=(EOS,)) for n in range(16)]
        )
    stopped = [answer for answer in ended if answer.finish_reason == "stop"]
    assert len(stopped) > 4 and all(tokens(a)[-1] == EOS and EOS not in tokens(a)[:-1] for a in stopped)
    assert not any("<|im_end|>" in a.text for a in stopped), "special tokens are no text"
    assert all(a.finish_reason == "length" and len(tokens(a)) == 24 for a in ignored)
    assert [a.finish_reason for a in late].count("stop") > 1 and not any(EOS in tokens(a)[:9] for a in late)
    assert [tokens(a) for a in both] == [tokens(a) for a in ended]
    assert [a.finish_reason for a in both] == [a.finish_reason for a in ended]


async def test_end_tokens_of_model_and_tokenizer_both_count():
    model = new_model("llama", vocab_size=len(TOKENIZER))
    async with make_engine(model, TOKENIZER) as engine:
        free = tokens(await ask(engine, PROMPT, temperature=1.0, seed=1))
    model.generation_config.eos_token_id = [free[3], free[7]]
    async with make_engine(model, TOKENIZER) as engine:
        stopped = await ask(engine, PROMPT, temperature=1.0, seed=1)
    assert tokens(stopped) == free[: free.index(free[3]) + 1] and stopped.finish_reason == "stop"


async def test_an_engine_without_a_tokenizer_returns_tokens_and_no_text():
    async with make_engine() as engine:
        answer = await ask(engine, [1, 2, 3])
    assert answer.text == "" and len(answer.completion_token_ids) == 16
