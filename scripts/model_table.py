"""Write docs/models.md: what Ludic does with every model family of tests/tiny_families.py.

    PYTHONPATH=src:. python scripts/model_table.py          # writes the page
    PYTHONPATH=src:. python scripts/model_table.py --check  # fails if the page is not current

A cell is what the library's own code decides for a tiny model of the family; tests/unit/models/test_families.py shows for each
family that the way it decides for computes what transformers computes. tests/contract/test_models_page.py compares the page.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ludic.distributed.ranks import Ranks
from ludic.inference.local.backends import choose_backend
from ludic.inference.local.cached import CachedBackend
from ludic.models.loading import LoadedModel
from ludic.run.config.model import ModelSettings
from ludic.run.model import load_policy
from ludic.training.learner.policy import TrainedPolicy, check_shared_prefixes
from ludic.types import SAWItem
from tests.tiny_families import FAMILIES, family_model

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
COLUMNS = ("embedded engine", "packed training", "padded training", "LoRA", "prefix trees", "vLLM push")
VLLM = "0.32.0"
"""The release whose registry has all these architectures (`vllm/model_executor/models/registry.py`)."""
PUSHED = {
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3", "gemma4", "phi3"), "yes"
    ),
    **dict.fromkeys(("glm4", "glm4_moe", "olmo2", "olmo3", "smollm3", "granite", "granite_moe_hybrid"), "yes"),
    **dict.fromkeys(("falcon_h1", "zamba2", "gpt2", "gptj"), "yes"),
    **dict.fromkeys(("llama4", "gpt_oss", "deepseek_v3", "lfm2", "qwen3_next"), "yes"),
    "jamba": "yes, on a GPU",
    "bamba": "no: unknown to vLLM",
    "qwen3_5": "untested: CPU build fails",
}
"""Families whose pushed weights a test reads back from a running vLLM (tests/integration/test_vllm_*.py, test_cuda_vllm_*.py)."""
NOTES = {
    "llama4": "Its full-attention layers scale queries by their place in the row, and its other layers attend in chunks.",
    "gptj": "Its attention is not called through transformers' AttentionInterface.",
    "zamba2": "Its shared block is called by several layers. In transformers, its cached step and its plain forward differ.",
    "phi3": "Checkpoints with `longrope` are paged up to the original length; a longer `max_model_len` is computed in full.",
    "gpt_oss": "On a GPU the embedded engine falls back to transformers' own cache: its decoding kernel has no sinks.",
    "deepseek_v3": "The cache holds expanded keys and values, the values padded to the size of the keys. vLLM's router differs "
    "where config.json lacks `scoring_func` and `topk_method`, for example in one that transformers wrote for a new model.",
    "lfm2": "vLLM ties its head to its embedding whatever the config says. Its CPU build computes LFM2 correctly with one "
    "attention head only.",
}
HEAD = """# Which models can be trained

<!-- Written by scripts/model_table.py; edit that script, not this page. -->

`ludic train --model X` takes any causal language model that transformers can load. How it runs depends on the family:

{table}

Every way gives the log-probabilities of transformers' own forward pass (to 1e-4 in fp32) and its gradients. A slower way is named
once, in a warning that says why. Real weights tried: SmolLM2-135M, Qwen2.5-Coder-1.5B, Gemma 3 270M, TinyLlama.
The table holds for tiny random models of transformers {transformers} on a CPU
(`tests/unit/models/test_families.py`). Every run decides again for its model, by small probes, so other families
run, too.

- **embedded engine**: `LocalEngine` with its block cache. Where that cannot be used it takes transformers' own cache, or computes
  every token from the start. Hybrids keep a state per sequence beside it.
- **packed training**: samples end to end in one row, instead of padded rows. Hybrids pad the samples of a row inside their
  recurrent layers; their libraries' varlen kernels are not used.
- **LoRA**: `--lora-rank` adapts all linear layers, except `out_proj` and `dt_proj` of Mamba mixers and Llama 4's router. Experts:
  `--lora-experts` ([mixtures](mixtures.md)).
- **prefix trees**: tokens that samples begin with in common are computed once ([training](training.md)).
- **vLLM push**: "yes": a test has read pushed weights back from vLLM {vllm} on a CPU; from 0.26 on a GPU only Llama, Llama 4 and
  Jamba. Ludic compares all names and shapes before it sends weights, and refuses what does not fit.

## Notes

{notes}

## What is not possible

- `--replay-experts` with the embedded engine, and adapters beside each other (`LocalEngine(adapters=True)`, `ludic serve
  --tinker`): hybrids, Llama 4, GPT-J, and gpt-oss on a GPU. They need the block cache.
- Pictures of other families than [Qwen2-VL and Qwen2.5-VL](vision.md): take the family's text model.
- A plain module without a transformers config trains on padded rows; the embedded engine cannot sample from it.
- A critic on the policy, or a KL over the vocabulary, for a model that does more to its logits than scale or soft-cap them: use a
  separate critic, or a KL of the sampled tokens.
- Encoder-decoder models.
"""


@cache
def support(name: str) -> tuple[str, ...]:
    """The cells of one family, in the order of the columns."""
    model = family_model(name)
    backend = choose_backend(model, 64)
    engine = "yes"
    if isinstance(backend, CachedBackend):
        way = "computing every token in full" if backend.recompute else "transformers' own cache"
        engine = f"falls back to {way}"
    rows = TrainedPolicy(model, packed=False)
    padded = "yes" if bool(rows.logps(rows.batch(_pair()))[0].isfinite().all()) else "no"
    policy = TrainedPolicy(model, share_prefixes=True)
    packed = "yes" if policy.packed else "falls back to padded"
    check_shared_prefixes(policy, _pair(), 1e-3, Ranks())
    trees = "yes" if policy.share_prefixes else f"falls back to {'packed' if policy.packed else 'padded'}"
    adapted = load_policy(ModelSettings(lora_rank=2), given=LoadedModel(model, None, name)).model
    has_adapter = any("lora_" in parameter for parameter, _ in adapted.named_parameters())
    return engine, packed, padded, "yes" if has_adapter else "no", trees, PUSHED.get(name, "untested")


def _pair() -> list[SAWItem]:
    """Two samples behind the same twenty tokens."""
    ids = [np.concatenate([np.arange(1, 21), np.array(end)]).astype(np.int32) for end in ([30, 31, 32], [40, 41])]
    return [SAWItem(own, None, np.arange(len(own)) >= 20, 1.0, {}) for own in ids]


def page() -> str:
    """The text of docs/models.md."""
    import transformers

    rows: list[tuple[Any, ...]] = [("family", *COLUMNS), ("---",) * (1 + len(COLUMNS))]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, family in FAMILIES.items():
        alike.setdefault(support(name), []).append(family.title)
    rows += [("; ".join(titles), *cells) for cells, titles in alike.items()]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    notes = "\n".join(f"- {FAMILIES[name].title}: {note}" for name, note in NOTES.items())
    return HEAD.format(table=table, transformers=transformers.__version__, vllm=VLLM, notes=notes)


def main() -> None:
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is not current: run scripts/model_table.py")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
