"""Loading models by path and name, and the tiny random models."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from ludic.inference import HFChatTemplate
from ludic.models.loading import character_tokenizer, load_gguf_tokenizer, load_model, tiny_llama, word_tokenizer
from ludic.types import ConfigError, MissingExtra
from tests.tiny_families import family_model

TINY = Path(__file__).parents[3] / "examples" / "tic_tac_toe" / "tiny" / "config.json"


def weights(seed: int) -> torch.Tensor:
    return load_model(TINY, device="cpu", seed=seed).model.get_input_embeddings().weight.detach()


def test_weights_from_a_config_depend_on_the_seed_only():
    assert torch.equal(weights(0), weights(0)) and not torch.equal(weights(0), weights(1))


def test_loading_from_a_config_keeps_the_global_random_state():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    weights(0)
    assert torch.equal(torch.rand(3), expected)


def test_tokenizer_beside_the_config_is_loaded_with_its_chat_template():
    loaded = load_model(TINY, device="cpu")
    ids = HFChatTemplate(loaded.tokenizer).apply([{"role": "user", "content": "X A1 A2=O"}]).prompt_token_ids
    assert loaded.tokenizer.decode(ids) == "<|user|> X A1 A2=O <|end|> <|assistant|>"
    assert loaded.tokenizer.unk_token_id not in ids


def test_error_names_a_missing_config(tmp_path):
    with pytest.raises(ConfigError, match=r"Cannot make a model from .*nowhere/config.json"):
        load_model(tmp_path / "nowhere" / "config.json")


def test_tiny_loads_without_a_file(tmp_path):
    loaded, again, other = (load_model("tiny", device="cpu", seed=seed) for seed in (0, 0, 1))
    first, same, different = (one.model.get_input_embeddings().weight for one in (loaded, again, other))
    assert torch.equal(first, same) and not torch.equal(first, different)
    assert loaded.name == "tiny" and first.dtype is torch.float32 and not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Hi!")) == "Hi!"
    assert load_model("tiny", device="cpu", dtype=torch.bfloat16).model.dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="'smollm2-135m' or 'tiny'"):
        load_model(str(tmp_path / "tiny_model"))


def test_word_tokenizer_has_one_token_per_word():
    tokenizer = word_tokenizer(["A1", "B2", "X"])
    ids = tokenizer.encode("X A1 B2")
    assert len(ids) == 3 and tokenizer.decode(ids) == "X A1 B2"
    assert tokenizer.encode("what") == [tokenizer.unk_token_id]


def test_word_tokenizer_template_continues_token_by_token():
    template = HFChatTemplate(word_tokenizer(["A1", "B2", "X"]))
    opening = [{"role": "user", "content": "X A1"}]
    prompt = template.apply(opening).prompt_token_ids.tolist()
    reply = [template.tokenizer.convert_tokens_to_ids("B2"), template.tokenizer.eos_token_id]
    messages = [*opening, {"role": "assistant", "content": "B2"}, {"role": "user", "content": "X B2"}]
    delta = template.delta(messages, num_sent=1, completion_token_ids=reply).tolist()
    assert prompt + reply + delta == template.apply(messages).prompt_token_ids.tolist()


def test_tiny_llama_depends_on_its_seed_and_keeps_the_global_random_state():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second, other = tiny_llama(32), tiny_llama(32), tiny_llama(32, seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def tiny_falcon():
    """It reads the dropout of its config in every pass."""
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(**sizes, hidden_dropout=0.3, attention_dropout=0.3))


@pytest.mark.parametrize("make", [lambda: family_model("gpt2"), tiny_falcon], ids=["gpt2", "falcon"])
def test_a_loaded_model_computes_the_same_in_training_mode(make, tmp_path):
    model = make()
    ids = torch.arange(9)[None]
    assert not torch.equal(model.train()(ids).logits, model.eval()(ids).logits), "it has dropout"
    model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        loaded = load_model(source, device="cpu", dtype=torch.float32).model
        assert torch.equal(loaded.train()(ids).logits, loaded.eval()(ids).logits)


# --- files that lie ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_llama(64).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def with_header(folder: Path, change: Callable[[dict], object]) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_weights_that_a_file_lacks_are_named_and_never_random(copied):
    with_header(copied, lambda header: header.update({"x.weight": header.pop("model.norm.weight")}))
    with pytest.raises(ConfigError, match=rf"{copied} lacks 1 weights of a LlamaForCausalLM.*: model.norm.weight"):
        load_model(copied, device="cpu")


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_too_little_memory_is_not_blamed_on_the_model_folder(saved, kind, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise kind("no room")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", fail)
    with pytest.raises(kind, match="no room"):
        load_model(saved, device="cpu")


def test_a_gguf_tokenizer_without_its_package_names_the_extra(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise MissingExtra("smollm2", "This tokenizer")

    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(MissingExtra, match="This tokenizer"):
        load_gguf_tokenizer(str(tmp_path / "a.gguf"))


EMBEDDING = "model.embed_tokens.weight"
LIES = {
    "cut off": lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100),
    "a header of 2^60 bytes": lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) * 9),
    "a shape of 2^60": lambda folder: with_header(folder, lambda h: h[EMBEDDING].update(shape=[2**40, 2**20])),
    "an offset": lambda folder: with_header(folder, lambda h: h[EMBEDDING].update(data_offsets=[0, 2**60])),
    "other names": lambda folder: with_header(folder, lambda h: h.update({f"x.{k}": h.pop(k) for k in list(h)})),
    **{
        f"{name} = {value}": lambda folder, name=name, value=value: (folder / "config.json").write_text(
            json.dumps({**json.loads((folder / "config.json").read_text()), name: value})
        )
        for name in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
        for value in (10**9, "many")
    },
    "a deep config": lambda folder: (folder / "config.json").write_text("[" * 100_000),
    "a config that is no text": lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_model_folder_that_lies_is_refused_by_name(copied, lie):
    lie(copied)
    with pytest.raises(ConfigError, match=str(copied)):
        load_model(copied, device="cpu")


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory) -> bytes:
    """A llama of two layers with random weights."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from tokenizers.pre_tokenizers import ByteLevel

    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokens, rng, writer = (
        [*sorted(ByteLevel.alphabet()), "ab", "<|im_end|>"],
        np.random.default_rng(0),
        gguf.GGUFWriter(file, "llama"),
    )
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_name("tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(tokens) - 1)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    for layer in range(2):
        own = {"attn_norm": (32,), "ffn_norm": (32,), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
        own |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (32, 32))
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


FIRST_TENSOR, TOKENS = b"token_embd.weight", b"tokenizer.ggml.tokens"
PLACES = {
    "number of tensors": (b"GGUF", 4, "<Q"),
    "number of keys": (b"GGUF", 12, "<Q"),
    "length of a key": (b"GGUF", 20, "<Q"),
    "length of a name": (FIRST_TENSOR, -25, "<Q"),
    "dimensions": (FIRST_TENSOR, 0, "<I"),
    "a dimension": (FIRST_TENSOR, 4, "<Q"),
    "type": (FIRST_TENSOR, 20, "<I"),
    "offset": (FIRST_TENSOR, 24, "<Q"),
    "number of texts": (TOKENS, 8, "<Q"),
    "length of a text": (TOKENS, 16, "<Q"),
    "layers": (b"llama.block_count", 4, "<I"),
    "width": (b"llama.embedding_length", 4, "<I"),
    "heads": (b"llama.attention.head_count", 4, "<I"),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_gguf_file_that_lies_is_refused_by_name(gguf_bytes, place, tmp_path):
    """In counts, lengths, shapes and offsets: large ones take no memory, and small ones make no other model."""
    name, distance, form = place
    at = gguf_bytes.index(name) + len(name) + distance
    for value in (2**31, 2**62, 2**64 - 2) if form == "<Q" else (2**31, 2**32 - 1):
        lie = struct.pack(form, value)
        file = tmp_path / "tiny.gguf"
        file.write_bytes(gguf_bytes[:at] + lie + gguf_bytes[at + len(lie) :])
        with pytest.raises(ConfigError, match=str(file)):
            load_model(file, device="cpu")


def test_a_gguf_file_whose_tensor_has_another_shape_is_refused(gguf_bytes, tmp_path):
    file, at = tmp_path / "tiny.gguf", gguf_bytes.index(FIRST_TENSOR) + len(FIRST_TENSOR) + 4
    file.write_bytes(gguf_bytes)
    assert load_model(file, device="cpu").model.config.num_hidden_layers == 2
    file.write_bytes(gguf_bytes[:at] + struct.pack("<Q", 16) + gguf_bytes[at + 8 :])
    with pytest.raises(ConfigError, match=r"embed_tokens.weight is not \(258, 32\)"):
        load_model(file, device="cpu")
