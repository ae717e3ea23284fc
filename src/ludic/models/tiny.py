"""Small random models and tokenizers, for laptops, tests and ideas that need no pretrained weights."""

from collections.abc import Sequence
from typing import Any

import torch

from ludic.models import TINY
from ludic.models.loading import LoadedModel

TINY_LENGTH = 4096

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
