"""Which adapters can be published without their base: plain LoRA only."""

import pytest
import torch

from ludic.distributed import VllmAdapterPublisher
from ludic.models.loading import tiny_llama
from ludic.types import ConfigError
from ludic_vllm.publish.adapter import base_parameters, differing, fitting_rank, read_adapter, require_servable

peft = pytest.importorskip("peft", reason="the lora extra is not installed")


def lora(**settings):
    config = {"r": 4, "target_modules": ["q_proj", "down_proj"], **settings}
    return peft.get_peft_model(tiny_llama(16, width=16, layers=1), peft.LoraConfig(**config))


def test_peft_loads_the_written_adapter(tmp_path):
    model = lora(init_lora_weights=False, rank_pattern={"down_proj": 6})
    adapter = read_adapter(model)
    assert adapter.rank == 6
    adapter.write(tmp_path)
    again = peft.PeftModel.from_pretrained(tiny_llama(16, width=16, layers=1), tmp_path)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens).logits, model.eval()(tokens).logits)


def test_base_parameters_have_the_names_of_the_plain_model():
    plain = tiny_llama(16, width=16, layers=1)
    base = base_parameters(lora())
    assert {name: weight.shape for name, weight in base.items()} == {n: p.shape for n, p in plain.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"use_dora": True}, "use_dora=True"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices="),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_error_names_the_setting_that_vllm_does_not_serve(settings, named):
    with pytest.raises(ConfigError, match=rf"{named}.* Publish merged weights instead: create_vllm_publisher"):
        require_servable(lora(**settings))


def test_other_kinds_of_adapters_are_refused():
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match="learned prompts"):
        require_servable(peft.get_peft_model(tiny_llama(16, width=16, layers=1), prompts))
    scales = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    with pytest.raises(ConfigError, match="of the kind IA3"):
        require_servable(peft.get_peft_model(tiny_llama(16, width=16, layers=1), scales))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no adapter"):
        require_servable(tiny_llama(16, width=16, layers=1))


def test_weights_trained_besides_the_adapter_are_refused():
    model = lora()
    require_servable(model)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"1 weights .* trained too, such as model\.norm\.weight"):
        require_servable(model)


def test_two_adapters_at_once_are_refused():
    model = lora()
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ConfigError, match="2 adapters are active"):
        require_servable(model)


@pytest.mark.parametrize(("rank", "limit"), [(1, 1), (2, 8), (8, 8), (9, 16), (512, 512)])
def test_fitting_rank_is_the_next_rank_of_vllm(rank, limit):
    assert fitting_rank(rank) == limit


def test_differing_allows_for_half_precision():
    ours = {"a": torch.linspace(-1, 1, 8), "b": torch.ones(4)}
    theirs = {"a": ours["a"].bfloat16().float().tolist(), "b": [1.0, 1.0, 1.1, 1.0]}
    assert differing(ours, theirs) == ["b"]


class NoServers:
    """A client that must not be asked for anything."""

    servers = ("http://127.0.0.1:1",)

    async def control_post(self, *args, **kwargs):
        raise AssertionError("something was sent")

    control_get = control_post


def test_publisher_checks_its_arguments_before_sending(tmp_path):
    with pytest.raises(ConfigError, match="use_dora"):
        VllmAdapterPublisher(NoServers(), lora(use_dora=True))
    with pytest.raises(ConfigError, match="name='a/b'"):
        VllmAdapterPublisher(NoServers(), lora(), name="a/b")
    with pytest.raises(ConfigError, match="is not a folder"):
        VllmAdapterPublisher(NoServers(), lora(), folder=tmp_path / "nowhere")
    model = lora()
    publisher = VllmAdapterPublisher(NoServers(), model)
    with pytest.raises(ConfigError, match=r"1 weights were given.*publish\(\{\}, version\)"):
        publisher.publish({"a": torch.zeros(1)}, version=1)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="trained too"):
        publisher.publish({}, version=1)
