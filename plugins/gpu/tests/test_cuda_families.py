"""Every family of docs/models.md on a GPU in fp32: the engine and the trainer against the model's own forward.

Prints one line per family: which way the engine and the trainer took, and how far their log-probs are from that forward.
"""

import asyncio
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

import transformers  # noqa: E402 - after the skip

from ludic.inference.local import LocalEngine  # noqa: E402
from ludic.inference.local.backends import choose_backend  # noqa: E402
from ludic.inference.local.cached import CachedBackend  # noqa: E402
from ludic.training.learner.policy import TrainedPolicy  # noqa: E402
from ludic.types import ReturnSpec, SamplingParams, SAWItem, TokenCompletionRequest  # noqa: E402
from tests.tiny_families import FAMILIES, family_model  # noqa: E402
from tests.unit.inference.local.tiny_models import some_prompt  # noqa: E402
from tests.unit.training.samples import random_items, with_prefix  # noqa: E402

PROMPTS = [some_prompt(9), some_prompt(9), some_prompt(30), some_prompt(4)]
"""The first two are one prompt; the third is longer than every window and chunk of the tiny configs."""
NUM_NEW, MAX_LENGTH = 8, 64
TOLERANCE = 1e-4


def logps(model: Any, ids: np.ndarray[Any, Any]) -> Any:
    """Log-probs [T - 1, V] of the model's own forward pass, of the tokens after each one."""
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None].cuda(), use_cache=False)
    return out.logits[0, :-1].float().log_softmax(-1).cpu()


def samples() -> list[SAWItem]:
    first, second, *group = random_items([13, 5, 6, 9])
    prefix = np.arange(3, 21, dtype=np.int32)
    return [first, second, *(with_prefix(item, prefix) for item in group)]


def engine_way(model: Any) -> str:
    backend = choose_backend(model, MAX_LENGTH)
    if isinstance(backend, CachedBackend):
        return "computes in full" if backend.recompute else "transformers' cache"
    return "paged"


def answers(model: Any) -> list[Any]:
    """Greedy answers of the engine. Its layers are not compiled: that takes seconds per family and rounds differently."""
    engine = LocalEngine(
        model, kv_tokens=1024, block_size=4, max_model_len=MAX_LENGTH, max_sequences=4, compile_layers=False
    )

    async def ask() -> list[Any]:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
        requests = [
            TokenCompletionRequest(
                model="", prompt_token_ids=list(prompt), sampling=params, return_=ReturnSpec.for_rl()
            )
            for prompt in PROMPTS
        ]
        return [response for response, _ in await asyncio.gather(*map(engine.complete_tokens, requests))]

    try:
        return asyncio.run(ask())
    finally:
        engine.close()


def engine_difference(found: list[Any], reference: Any) -> float:
    """Of the log-probs of the greedy tokens, which must be those of the reference."""
    largest = 0.0
    for prompt, answer in zip(PROMPTS, found, strict=True):
        written = answer.completion_token_ids
        logps_NV = logps(reference, np.concatenate([prompt, written]))[len(prompt) - 1 :]
        assert logps_NV.argmax(-1).tolist() == written.tolist()
        expected_N = logps_NV.gather(-1, torch.from_numpy(written.astype(np.int64))[:, None])[:, 0].numpy()
        largest = max(largest, float(np.abs(expected_N - answer.completion_logprobs).max()))
    return largest


def training_difference(policy: TrainedPolicy, reference: Any) -> float:
    with torch.no_grad():
        found_A = policy.logps(policy.batch(samples()))[0].float().cpu()
    expected = []
    for item in samples():
        chosen_T = logps(reference, item.input_ids).gather(
            -1, torch.from_numpy(item.input_ids[1:].astype(np.int64))[:, None]
        )
        expected.append(chosen_T[:, 0][torch.from_numpy(np.asarray(item.action_mask, dtype=bool))[1:]])
    return float((found_A - torch.cat(expected)).abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_and_the_trainer_have_the_log_probs_of_the_models_own_forward(name, capsys):
    family = FAMILIES[name]
    missing = [wanted for wanted in (family.config, family.model) if not hasattr(transformers, wanted)]
    if missing:
        pytest.skip(f"transformers {transformers.__version__} has no {' and no '.join(missing)}")
    reference = family_model(name).cuda()
    try:
        logps(reference, np.asarray(PROMPTS[0]))
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"transformers {transformers.__version__} cannot compute {name} here: {str(error).splitlines()[0]}")
    policy = TrainedPolicy(family_model(name).cuda(), mixed_precision_dtype=None)
    ways = f"{engine_way(family_model(name).cuda())}; {'packed' if policy.packed else 'padded'}"
    found: dict[str, float | Exception] = {}
    for part, work in (
        ("engine", lambda: engine_difference(answers(family_model(name).cuda()), reference)),
        ("training", lambda: training_difference(policy, reference)),
    ):
        try:
            found[part] = work()
        except Exception as error:  # noqa: BLE001 - the line says what each part did before the test fails
            found[part] = error
    shown = [
        f"{part} {value:.1e}" if isinstance(value, float) else f"{part} {type(value).__name__}"
        for part, value in found.items()
    ]
    with capsys.disabled():
        sys.stdout.write(f"\n{family.title}: {ways}; {', '.join(shown)}\n")
    for value in found.values():
        if isinstance(value, Exception):
            raise value
        assert value < TOLERANCE
