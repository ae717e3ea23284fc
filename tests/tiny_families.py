"""A tiny random config of every model family in docs/models.md, of transformers' real classes.

`family_model` makes weights large enough that attention matters: a broken cache or border changes log-probs visibly. A
family whose layers differ in kind (sliding and full, recurrent and attention) has at least one of each.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCAB = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED_LAYERS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA_NET = {
    "head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}


@dataclass(frozen=True, slots=True)
class Family:
    """How a family is called, its config class, and what its config has beside the common sizes."""

    title: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""
    """The model class; the config's name with ForCausalLM where it is empty."""
    without: tuple[str, ...] = ()
    """Common sizes that the config does not know."""

    @property
    def model(self) -> str:
        return self.architecture or self.config.removesuffix("Config").removesuffix("Text") + "ForCausalLM"


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 2, 3", "LlamaConfig"),
    "llama4": Family(
        "Llama 4 (text)",
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 6,
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
        },
    ),
    "qwen2": Family("Qwen2, Qwen2.5", "Qwen2Config"),
    "qwen3": Family("Qwen3", "Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": Family("Qwen3-MoE", "Qwen3MoeConfig", {**_EXPERTS, "head_dim": 8}),
    "qwen3_next": Family(
        "Qwen3-Next",
        "Qwen3NextConfig",
        {**_EXPERTS, **_DELTA_NET, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": Family("Qwen3.5", "Qwen3_5TextConfig", _DELTA_NET),
    "qwen3_5_moe": Family(
        "Qwen3.5-MoE",
        "Qwen3_5MoeTextConfig",
        {**_EXPERTS, **_DELTA_NET, "shared_expert_intermediate_size": 16},
    ),
    "mistral": Family("Mistral", "MistralConfig", {"head_dim": 8, "sliding_window": 7}),
    "mixtral": Family("Mixtral", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": Family(
        "Gemma 2",
        "Gemma2Config",
        {**_MIXED_LAYERS, "head_dim": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": Family("Gemma 3 (text)", "Gemma3TextConfig", {**_MIXED_LAYERS, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma4": Family(
        "Gemma 4 (text)",
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
        },
    ),
    "phi3": Family("Phi 3, Phi 4", "Phi3Config"),
    "glm4": Family("GLM 4", "Glm4Config", {"head_dim": 8}),
    "glm4_moe": Family(
        "GLM 4.5 (MoE)",
        "Glm4MoeConfig",
        {
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "olmo2": Family("OLMo 2", "Olmo2Config"),
    "olmo3": Family("OLMo 3", "Olmo3Config", _MIXED_LAYERS),
    "gpt_oss": Family(
        "gpt-oss", "GptOssConfig", {**_MIXED_LAYERS, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3 (MLA)",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "smollm3": Family("SmolLM3", "SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "granite": Family("Granite", "GraniteConfig", {"attention_multiplier": 0.4, "logits_scaling": 2.0}),
    "granite_moe_hybrid": Family(
        "Granite 4 (Mamba-2, MoE)",
        "GraniteMoeHybridConfig",
        {
            **_MAMBA2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "layer_types": ["mamba", "attention"],
            "attention_multiplier": 0.4,
        },
    ),
    "falcon_h1": Family("Falcon-H1", "FalconH1Config", {**_MAMBA2, "mamba_d_ssm": 64}),
    "bamba": Family("Bamba", "BambaConfig", {**_MAMBA2, "attn_layer_indices": [1]}),
    "jamba": Family(
        "Jamba",
        "JambaConfig",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "zamba2": Family(
        "Zamba2",
        "Zamba2Config",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "chunk_size": 8,
            "use_mamba_kernels": False,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": Family(
        "LFM2",
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    ),
    "gpt2": Family(
        "GPT-2",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
        architecture="GPT2LMHeadModel",
        without=("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    ),
    "gptj": Family(
        "GPT-J",
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 4},
        without=("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    ),
}  # fmt: skip
"""By a short name, in the order of docs/models.md."""


def family_config(name: str, **overrides: Any) -> Any:
    """A new config of the family; `overrides` replace its settings."""
    family = FAMILIES[name]
    sizes = {key: value for key, value in _SIZES.items() if key not in family.without}
    return getattr(transformers, family.config)(**{**sizes, **family.settings, **overrides})


def family_model(name: str, *, seed: int = 0, attention: str = "eager", **overrides: Any) -> Any:
    """A new model in eval mode with random fp32 weights; biases, norms and sinks are random too."""
    config = family_config(name, **overrides)
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, FAMILIES[name].model)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
