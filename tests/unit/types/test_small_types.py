import math

import numpy as np
import pytest

from ludic.types import (
    ActorTokenLogps,
    ChatResponse,
    ConfigError,
    MissingExtra,
    PromptTooLong,
    SampleAttachments,
    SamplingParams,
    SAWBatch,
    SAWItem,
    UnknownName,
    VLLMExtensions,
    derive_seed,
    has_actor_logps,
)


def test_sampling_defaults_are_those_of_the_spec():
    assert SamplingParams().to_openai_kwargs() == {
        "temperature": 0.7, "max_tokens": 256, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    }  # fmt: skip
    assert SamplingParams(stop=["\n"]).to_openai_kwargs()["stop"] == ["\n"]


@pytest.mark.parametrize("bad", [{"max_think": 0}, {"max_think": True}, {"repetition_penalty": 0.0}])
def test_wrong_vllm_extensions_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        VLLMExtensions(**bad)
    assert VLLMExtensions(extra_body_overrides={"stop_token_ids": [2]}).to_dict()["kind"] == "vllm"


def test_a_response_with_too_few_logprobs_warns_and_has_no_trace(caplog):
    response = ChatResponse(text="x", prompt_token_ids=[1], completion_token_ids=[2, 3], completion_logprobs=[-0.1])
    assert "2 completion tokens but 1 logprobs" in caplog.text
    with pytest.raises(ValueError, match="logprobs"):
        response.to_trace()
    assert response.merge_into_info({"a": 1}) == {"a": 1, "completion": "x"}


def test_derived_seeds_are_stable_48_bits_and_distinct():
    assert derive_seed(7, 1) == derive_seed(7, 1)
    assert derive_seed(7, 1) != derive_seed(8, 0) and derive_seed(7, 1, 2) != derive_seed(7, 2, 1)
    seeds = {derive_seed(base, call) for base in range(300) for call in range(300)}
    assert len(seeds) == 300 * 300 and max(seeds) < 2**48
    assert derive_seed(7, 1) == 187731701186630  # the same on every machine and in every release


def test_an_item_checks_its_masks_and_weight():
    item = SAWItem([1, 2, 3], None, [0, 1, 1], 0.5, {}, SampleAttachments(actor_logps=ActorTokenLogps([-1.0, -2.0])))
    assert item.attention_mask.all() and item.num_action_tokens == 2
    assert has_actor_logps(item) and item.actor_logps.tolist() == [-1.0, -2.0]
    assert not has_actor_logps(SAWItem([1], None, [1], 1.0))
    with pytest.raises(ValueError, match="action_mask"):
        SAWItem([1, 2], None, [1], 1.0)
    with pytest.raises(ValueError, match="0 and 1"):
        SAWItem([1, 2], None, [0, 2], 1.0)
    with pytest.raises(ValueError, match="finite"):
        SAWItem([1], None, [1], float("nan"))
    with pytest.raises(TypeError, match="token_logps"):
        ActorTokenLogps(["x"])
    assert len(SAWBatch(items=[item])) == 1


def test_errors_suggest_names_and_print_as_text():
    assert str(UnknownName.among("env", "gsm9k", ["gsm8k", "tic_tac_toe"])) == (
        "No env named 'gsm9k'. Did you mean 'gsm8k'? Known: gsm8k, tic_tac_toe."
    )
    said = str(MissingExtra("math", "Grading"))
    assert "pip install -e '.[math]'" in said and "pip install 'ludic-rl[math] @ git+" in said
    assert "the extras 'train' and 'pipeline'" in str(MissingExtra("train,pipeline", "ludic launch"))
    assert isinstance(MissingExtra("math", "Grading"), ImportError)
    assert "5 tokens" in str(PromptTooLong(5, 3)) and "limit is 3" in str(PromptTooLong(5, 3))


LIMITS = {
    "temperature": ([0, 1e-3, 1e6], [1e-4, 1.1e6, -1, 10**400]),
    "top_p": ([5e-324, 1], [0, -0.1, 1.0001, 1.5]),
    "min_p": ([0, 0.999], [-1e-9, 1]),
    "top_k": ([0, 2**31 - 1], [-1, 2**31, 2.5]),
    "frequency_penalty": ([-2, 2], [-2.01, 2.01]),
    "presence_penalty": ([-2, 2], [-2.01, 2.01]),
    "repetition_penalty": ([0.01, 100], [0, 1e-300, 0.0099, 101, -1]),
    "max_tokens": ([1, 2**31 - 1, np.int32(5)], [0, 2**31, 1.5, 10**400]),
    "min_tokens": ([0, 256], [-1, 257, 0.5]),
    "stop": (
        [None, "x", (), ["x"] * 32, "é" * 256],
        ["", ["a", ""], ["x"] * 33, "x" * 257, "\ud800", "\ud800😀", 3, b"x", [None]],
    ),
    "stop_token_ids": ([(), (0,), tuple(range(1024))], [tuple(range(1025)), (5.0,), ("5",), 5]),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_sampling_params(name):
    good, bad = LIMITS[name]
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) is value
    wrong_types = [] if name == "stop" else ["much", None]
    no_numbers = [math.nan, math.inf, -math.inf] if isinstance(good[0], int | float) else []
    for value in [*bad, *wrong_types, *no_numbers]:
        with pytest.raises(ConfigError, match=rf"SamplingParams\.{name}=.*; it must be ") as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 250
