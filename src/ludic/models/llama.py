"""The modules of a transformers model of the Llama family, as the hand-written passes read them."""

from typing import Any, NamedTuple

from ludic.models.attention import AttentionRules
from ludic.models.llama_shape import MEMBERS
from ludic.models.weights import forward_hooks


def is_of_family(model: Any) -> bool:
    """True if the model is one of transformers' own of the Llama family, without hooks."""
    return (
        type(model).__module__.startswith("transformers.models.")
        and type(model).__name__ in {f"{member.prefix}ForCausalLM" for member in MEMBERS.values()}
        and model.config.hidden_act == "silu"
        and not any(forward_hooks(module) for module in model.modules())
    )


def linears(model: Any) -> list[Any]:
    """The linear layers of a model of the family."""
    found = [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        found += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return found


class LlamaAttention(NamedTuple):
    """The attention of one decoder layer."""

    num_heads: int
    num_kv: int
    head_dim: int
    rules: AttentionRules
    head_norms: tuple[Any, Any] | None
    """The norms of queries and keys, for members that have them."""

    @classmethod
    def of(cls, layer: Any) -> "LlamaAttention":
        attention = layer.self_attn
        member = next(m for m in MEMBERS.values() if type(layer).__name__ == f"{m.prefix}DecoderLayer")
        window = None
        if member.window is not None:
            window = (attention if member.window == "layer" else attention.config).sliding_window
        return cls(
            num_heads=attention.q_proj.out_features // attention.head_dim,
            num_kv=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            rules=AttentionRules(attention.scaling, window),
            head_norms=(attention.q_norm, attention.k_norm) if member.head_norms else None,
        )
