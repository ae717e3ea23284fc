"""Routes a model's attention through `ludic_attention`, and checks by probes that every layer uses it and that packing is exact."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.models.attention import NAME, SKIP_MASK, AttentionRules, NotRoutable
from ludic.models.kinds import Mix, part, recurrent_layers
from ludic.models.packed_attention import PackedSequences
from ludic.types import ConfigError, MissingExtra


class _Probe:
    """Records what each layer passes to the registered function."""

    def __init__(self) -> None:
        self.heads: dict[int, tuple[int, int]] = {}
        self.windows: dict[int, int | None] = {}
        self.recurrent: set[int] = set()

    def recur(self, layer: int, mix: Mix, hidden_TD: Tensor) -> Tensor:
        self.recurrent.add(layer)
        return mix(hidden_TD[None], None)[0]

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        if query_THD.shape[-1] != value_TKD.shape[-1] or key_TKD.shape != value_TKD.shape:
            raise NotImplementedError("its values are wider than its keys")
        self.heads[layer] = (key_TKD.shape[1], key_TKD.shape[2])
        self.windows[layer] = rules.sliding_window
        return query_THD


def route_attention(model: Any) -> tuple[tuple[int, int], ...]:
    """Route the model's attention through `ludic_attention` and check with a probe that every layer uses it.

    Returns (number of key/value heads, head size) of each layer; zeros for one without attention. Recurrent layers ask the
    state as well (`RecurrentState`).
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ConfigError(f"{type(model).__name__} is not a transformers model: it has no config.")
    if not getattr(model, "_can_set_attn_implementation", lambda: True)():  # else transformers logs a warning
        raise NotRoutable("its attention does not go through transformers' AttentionInterface")
    config = model.config.get_text_config()
    probe = _Probe()
    before = model.config._attn_implementation
    try:
        if recurrent_layers(model):
            part("recurrent").route_recurrence(model)
        model.set_attn_implementation(NAME)
        device = model.get_input_embeddings().weight.device
        ids = torch.zeros(1, 2, dtype=torch.long, device=device)
        with torch.no_grad():
            model(
                input_ids=ids,
                position_ids=torch.arange(2, device=device)[None],
                attention_mask=SKIP_MASK.to(device),
                use_cache=False,
                ludic_state=probe,
            )
        _check_probe(probe, model)
        _check_packing(model, before)
    except MissingExtra as error:
        raise NotRoutable(f"it has recurrent layers ({error})") from error
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        model.config._attn_implementation = before
        raise NotRoutable(
            f"its layers do not all compute attention by transformers' AttentionInterface in the usual way ({error})"
        ) from error
    return tuple(probe.heads.get(layer, (0, 0)) for layer in range(config.num_hidden_layers))


_PROBED_LENGTHS = (9, 7)


@torch.no_grad()
def _check_packing(model: Any, own_attention: str) -> None:
    """Raise unless two sequences in one flat row get the logits that each gets alone with the model's own attention."""
    embedding = model.get_input_embeddings().weight
    device = embedding.device
    if device.type == "meta":
        return
    was_training = model.training
    model.eval()
    try:
        ids_T = (torch.arange(sum(_PROBED_LENGTHS), device=device) * 7 + 1) % embedding.shape[0]
        positions_T = torch.cat([torch.arange(length, device=device) for length in _PROBED_LENGTHS])
        state: Any = PackedSequences(_PROBED_LENGTHS, device)
        if recurrent_layers(model):
            paths = np.split(np.arange(len(ids_T)), [_PROBED_LENGTHS[0]])
            state = part("recurrent").HybridSequences(state, paths, device)
        options = {"position_ids": positions_T[None], "attention_mask": SKIP_MASK.to(device), "ludic_state": state}
        packed_TV = model(input_ids=ids_T[None], use_cache=False, **options).logits[0].float()
        model.set_attn_implementation(own_attention)
        alone = [model(input_ids=own[None], use_cache=False).logits[0].float() for own in ids_T.split(_PROBED_LENGTHS)]
        model.set_attn_implementation(NAME)
    finally:
        model.train(was_training)
    # In half precision both ways round differently, and a token near the border of two experts may go to either.
    tolerance = 1e-3 if embedding.dtype is torch.float32 else 0.1
    alone_TV = torch.cat(alone)
    difference = float((packed_TV - alone_TV).nan_to_num().abs().mean() / (alone_TV.nan_to_num().abs().mean() + 1e-9))
    if difference > tolerance:
        raise ValueError(f"packed samples get other logits, by {difference:.0%} on average")


def _check_probe(probe: _Probe, model: Any) -> None:
    """Raise unless the arguments that the layers passed fully determine their attention."""
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    if probe.recurrent != set(recurrent_layers(model)):
        raise ValueError(f"{len(probe.recurrent)} of its recurrent layers are given the state of the pass")
    if set(probe.heads) | probe.recurrent != set(range(num_layers)):
        raise ValueError(
            f"{len(probe.heads)} of its {num_layers} layers use the registered function, {len(probe.recurrent)} are recurrent"
        )
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * num_layers)
    unknown = {kinds[layer] for layer in range(num_layers) if layer not in probe.recurrent}
    unknown -= {"full_attention", "sliding_attention", "attention"}
    if unknown:
        raise ValueError(f"it has layers of the kind {', '.join(sorted(unknown))}")
    # Some models encode a sliding window only in their mask, which Ludic does not build.
    window = getattr(config, "sliding_window", None) or 0
    is_declared = "sliding_attention" in kinds or (
        not getattr(config, "layer_types", None) and getattr(config, "use_sliding_window", True)
    )
    if is_declared and 0 < window < config.max_position_embeddings and not any(probe.windows.values()):
        raise ValueError("its sliding window is not handed to the attention function")
