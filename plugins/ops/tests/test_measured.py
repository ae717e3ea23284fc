"""The memory formulae against what torch really holds, on models small enough to count every tensor."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ludic.models import head as head_module  # noqa: E402
from ludic.training.learner.gradients import accumulate_gradients, action_tokens, batch_facts  # noqa: E402
from ludic.training.learner.optimizer import FullPrecisionAdamW  # noqa: E402
from ludic.training.learner.policy import TrainedPolicy  # noqa: E402
from ludic.training.losses import TokenClippedSurrogateLoss  # noqa: E402
from ludic.types import ActorTokenLogps, SampleAttachments, SAWItem  # noqa: E402
from ludic_ops.scaling import (  # noqa: E402
    CHUNK_ELEMENTS,
    SHAPES,
    TrainingSetup,
    kept_activations,
    shape_from_config,
    training_memory,
)
from tests.extended import cases  # noqa: E402

pytestmark = pytest.mark.slow

LENGTH, NUM_PROMPT, NUM_SAMPLES = 64, 16, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def config_of(kind: str, **changes: Any) -> Any:
    sizes = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    return transformers.AutoConfig.for_model(kind, **{**sizes, **changes})


def build(config: Any, dtype: str = "fp32") -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(DTYPES[dtype]).train()


def samples() -> list[SAWItem]:
    mask = np.arange(LENGTH) >= NUM_PROMPT
    logps = ActorTokenLogps(np.full(LENGTH - NUM_PROMPT, -5.0, dtype=np.float32))
    ids = np.arange(LENGTH, dtype=np.int32)
    return [SAWItem(ids + i, None, mask, 1.0, {}, SampleAttachments(actor_logps=logps)) for i in range(NUM_SAMPLES)]


def setup(dtype: str = "fp32", **changes: Any) -> TrainingSetup:
    tokens = LENGTH * NUM_SAMPLES
    share = 1 - NUM_PROMPT / LENGTH
    return TrainingSetup(micro_tokens=tokens, action_share=share, computed=dtype, held=dtype, fused=False, **changes)


def num_bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# --- parameters ---


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4, "head_dim": 32}])
def test_parameters_are_counted_to_the_last_one(kind, changes):
    config = config_of(kind, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_from_config(config.to_dict(), name=kind)
    assert shape.params == sum(p.numel() for p in model.parameters())
    assert shape.block_params == sum(p.numel() for p in model.model.layers[0].parameters())


def test_biases_of_a_llama_are_counted():
    config = config_of("llama", attention_bias=True, mlp_bias=True)
    assert shape_from_config(config.to_dict(), name="x").params == sum(p.numel() for p in build(config).parameters())


@pytest.mark.parametrize(
    ("name", "kind"), [("135m", "llama"), ("1.5b", "qwen2"), ("7b", "qwen2"), ("32b", "qwen2"), ("70b", "llama")]
)
def test_the_known_shapes_are_what_transformers_makes_of_them(name, kind):
    shape = SHAPES[name]
    config = config_of(
        kind, vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.is_tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.params == sum(p.numel() for p in model.parameters())


def test_an_adapter_is_counted_to_the_last_parameter():
    peft = pytest.importorskip("peft")
    config = config_of("qwen2")
    model = peft.get_peft_model(build(config), peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape_from_config(config.to_dict(), name="x").lora_params(8) == counted


# --- weights, gradients, optimizer: exact ---


@pytest.mark.parametrize("dtype", cases(["fp32", "bf16"], default=["fp32"]))
def test_weights_gradients_and_optimizer_take_exactly_what_was_predicted(dtype):
    config = config_of("llama")
    model = build(config, dtype)
    kind = FullPrecisionAdamW if dtype == "bf16" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    accumulate_gradients(TrainedPolicy(model), TokenClippedSurrogateLoss(), samples(), micro_token_budget=LENGTH)
    gradients = num_bytes(p.grad for p in model.parameters())
    optimizer.step()
    moments = num_bytes(t for state in optimizer.state.values() for name, t in state.items() if name != "step")
    copies = num_bytes(optimizer.state_dict()["copies"]) if dtype == "bf16" else 0

    shape = shape_from_config(config.to_dict(), name="x")
    memory = training_memory(shape, setup(dtype, micro_batches=NUM_SAMPLES))
    assert memory.weights == num_bytes(model.parameters())
    assert memory.gradients == gradients
    assert memory.optimizer == moments + copies
    assert memory.step == copies  # the gradients of the copies, while the optimizer steps


# --- activations: what autograd keeps, within one per cent ---


def saved_bytes(model: Any) -> int:
    """Of every storage that forward leaves for backward, parameters and buffers excepted."""
    policy = TrainedPolicy(model)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not given to another
        return tensor

    items, loss = samples(), TokenClippedSurrogateLoss()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens = action_tokens(policy, loss, policy.batch(items), batch_facts(items), None, None, True)
        loss(tokens)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("dtype", cases(["fp32", "bf16"], default=["fp32"]))
def test_activations_are_predicted_within_one_per_cent(kind, dtype):
    config = config_of(kind)
    shape = shape_from_config(config.to_dict(), name=kind)
    assert kept_activations(shape, setup(dtype)) == pytest.approx(saved_bytes(build(config, dtype)), rel=0.01)


def test_checkpointed_activations_are_predicted_within_one_per_cent():
    config = config_of("llama")
    model = build(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shape = shape_from_config(config.to_dict(), name="x")
    # Checkpointing itself holds the rotary embedding, so that autograd has none of it to keep.
    rotary = 2 * 4 * shape.head_dim * LENGTH * NUM_SAMPLES
    assert kept_activations(shape, setup(checkpointing=True)) == pytest.approx(saved_bytes(model) + rotary, rel=0.01)


def test_the_chunk_of_logits_is_the_heads_own():
    assert head_module.GPU_CHUNK_ELEMENTS == CHUNK_ELEMENTS
