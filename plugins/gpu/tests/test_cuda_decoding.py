"""Decoding on a GPU: attention over blocks by rows, parts and groups; fused families, prompts in chunks, adapters."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

from ludic.inference.local import LocalEngine  # noqa: E402
from ludic.inference.local.blocks import GROUP_ROWS, shared_prefixes  # noqa: E402
from ludic.models.attention import AttentionRules  # noqa: E402
from plugins.gpu.tests.test_cuda_engine import complete, prompts, tiny  # noqa: E402 - after the skip

BLOCK = 16


def reference(query: Any, keys: Any, values: Any, tables: Any, lengths: list[int], rules: Any) -> Any:
    """Row by row in fp64."""
    rows = []
    for row, length in enumerate(lengths):
        positions = torch.arange(length, device="cuda")
        slots = tables[row, positions // BLOCK].long() * BLOCK + positions % BLOCK
        repeat = query.shape[1] // keys.shape[1]
        k, v = (x[slots].double().repeat_interleave(repeat, 1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", query[row].double(), k) * rules.scaling
        if rules.softcap is not None:
            scores = rules.softcap * torch.tanh(scores / rules.softcap)
        if rules.sliding_window is not None:
            scores[:, : max(0, length - rules.sliding_window)] = float("-inf")
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
    return torch.stack(rows)


def random_state(blocks: list[list[int]], heads: tuple[int, int, int], dtype: Any) -> tuple[Any, Any, Any, Any]:
    num_heads, kv_heads, size = heads
    torch.manual_seed(0)
    num_blocks = 1 + max(block for row in blocks for block in row)
    tables = torch.full((len(blocks), max(map(len, blocks)) + 1), num_blocks, dtype=torch.int32)
    for row, own in enumerate(blocks):
        tables[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    new = lambda *shape: torch.randn(*shape, device="cuda").to(dtype)  # noqa: E731
    slots = (num_blocks + 1) * BLOCK
    return tables.cuda(), new(len(blocks), num_heads, size), new(slots, kv_heads, size), new(slots, kv_heads, size)


def assert_close(found: Any, expected: Any) -> None:
    """Half precision rounds the weights and the result; fp32 sums in another order."""
    unit = torch.finfo(found.dtype).eps
    assert float((found.double() - expected).abs().max()) <= 4 * unit * float(expected.abs().max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("heads", [(4, 2, 64), (12, 2, 128), (9, 3, 64), (8, 8, 80)])
def test_attention_over_blocks_equals_attention_row_by_row(dtype, splits, heads):
    from ludic_gpu.cuda.decode_attention import DecodeAttention

    lengths = [1, 5, 16, 17, 300, 33, 1000, 64, 65]
    numbers = iter(np.random.default_rng(0).permutation(500).tolist())
    blocks = [[next(numbers) for _ in range(length // BLOCK + 1)] for length in lengths]
    tables, query, keys, values = random_state(blocks, heads, getattr(torch, dtype))
    lengths_T = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    attention = DecodeAttention(tables, lengths_T, torch.zeros_like(lengths_T), BLOCK, splits)
    for rules in (AttentionRules(0.1), AttentionRules(0.1, 40), AttentionRules(0.1, None, 3.0)):
        expected = reference(query, keys, values, tables, lengths, rules)
        assert_close(attention(query, keys, values, rules), expected)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("heads", [(4, 2, 64), (12, 2, 128), (9, 3, 64)])
def test_groups_that_read_their_prefix_together_get_the_same(splits, heads):
    from ludic_gpu.cuda.decode_attention import DecodeAttention, SharedPrefixes

    rng, numbers = np.random.default_rng(0), iter(range(10_000))
    blocks, lengths = [], []
    for num_shared, members in ((10, 16), (1, 4), (40, 21), (0, 3)):
        shared = [next(numbers) for _ in range(num_shared)]
        for own in rng.integers(1, 200, members):
            blocks.append([*shared, *(next(numbers) for _ in range(int(own) // BLOCK + 1))])
            lengths.append(num_shared * BLOCK + int(own))
    order = rng.permutation(len(blocks))
    blocks, lengths = [blocks[i] for i in order], [lengths[i] for i in order]
    groups = shared_prefixes(blocks)
    assert sorted(len(rows) for rows, _ in groups) == [4, 5, 16, 16]
    rows_CM = torch.full((len(groups) + 3, GROUP_ROWS), -1, dtype=torch.int32)
    lengths_C, num_shared_T = (
        torch.zeros(len(groups) + 3, dtype=torch.int32),
        torch.zeros(len(blocks), dtype=torch.int32),
    )
    for number, (rows, num_blocks) in enumerate(groups):
        rows_CM[number, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
        lengths_C[number] = num_shared_T[rows] = num_blocks * BLOCK
    tables, query, keys, values = random_state(blocks, heads, torch.bfloat16)
    lengths_T = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    together = SharedPrefixes(rows_CM.cuda(), lengths_C.cuda())
    attention = DecodeAttention(tables, lengths_T, num_shared_T.cuda(), BLOCK, splits, together)
    rules = AttentionRules(0.1)
    assert_close(attention(query, keys, values, rules), reference(query, keys, values, tables, lengths, rules))


def logprobs(model: Any, prompt: list[int], tokens: list[int]) -> Any:
    ids = torch.tensor([[*prompt, *tokens]]).cuda()
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()


def test_logprobs_of_groups_are_as_exact_as_those_of_a_plain_forward_pass():
    exact, model = tiny(), tiny(torch.bfloat16)
    texts = [prompt for prompt in prompts(6, 150, 300) for _ in range(6)]
    with torch.no_grad():
        for parameter, rounded in zip(exact.parameters(), model.parameters(), strict=True):
            parameter.copy_(rounded)
    engine = LocalEngine(model, kv_tokens=40_000, max_sequences=40)
    answers = complete(engine, texts, temperature=1.0, max_tokens=40)
    assert any(kernels.has_groups for kernels in engine._worker.runner._graphs)
    ours, plain = [], []
    for prompt, answer in zip(texts, answers, strict=True):
        tokens = answer.completion_token_ids.tolist()
        expected = logprobs(exact, prompt, tokens)
        ours.append(np.abs(answer.completion_logprobs - expected))
        plain.append(np.abs(logprobs(model, prompt, tokens) - expected))
    assert np.concatenate(ours).mean() <= 1.5 * np.concatenate(plain).mean()
    engine.close()


def family(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    settings = {"Mistral": {"sliding_window": 60}, "Qwen3": {"head_dim": 64}}.get(name, {})
    config = getattr(transformers, f"{name}Config")(
        vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, **settings,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that differ from 0 and 1
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_fused_families_with_prompts_in_chunks_have_the_logprobs_of_a_plain_forward_pass(name):
    model, texts = family(name), prompts(8)
    engine = LocalEngine(model, kv_tokens=20_000, max_prefill_tokens=100)
    for prompt, answer in zip(texts, complete(engine, texts, temperature=1.0), strict=True):
        expected = logprobs(model, prompt, answer.completion_token_ids.tolist())
        np.testing.assert_allclose(answer.completion_logprobs, expected, atol=1e-4)
    assert engine._worker.runner._fused is not None
    engine.close()


def test_an_adapter_has_the_logprobs_of_a_plain_forward_pass_also_after_a_step():
    peft = pytest.importorskip("peft", reason="peft is not installed")

    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    texts = prompts(6)
    engine = LocalEngine(model, kv_tokens=20_000, max_prefill_tokens=100)
    for _ in range(2):
        for prompt, answer in zip(texts, complete(engine, texts, temperature=1.0), strict=True):
            expected = logprobs(model, prompt, answer.completion_token_ids.tolist())
            np.testing.assert_allclose(answer.completion_logprobs, expected, atol=1e-4)
        with engine.updating(), torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5)
    assert engine._worker.runner._fused is not None
    engine.close()
