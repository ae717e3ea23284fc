"""Chat templates in the styles of the model families, and small real tokenizers to go with them.

The templates keep what makes their models' templates difficult: thinking that is dropped from old turns, tools in
the header or before the last user message, roles that must alternate, tool-call ids of exactly nine characters.
"""

from functools import cache
from typing import Any

QWEN_STYLE = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\nCall functions between <tool_call></tool_call>.\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content and loop.index0 < ns.last_query %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip()

LLAMA3_STYLE = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}
{{- 'Tools:' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n\\n' }}
{%- endif %}
{{- message.content | trim }}{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""".strip()

MISTRAL_STYLE = """
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set dialogue = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set dialogue = messages %}{%- endif %}
{%- set ns = namespace(turn=0, last_user=0) %}
{%- for message in dialogue %}
{%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.turn % 2 == 0) %}{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{%- set ns.turn = ns.turn + 1 %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in dialogue %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last_user %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + (system + '\\n\\n' if system and loop.index0 == ns.last_user else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- call.function | tojson }}{{- ', ' if not loop.last else ']' }}
{%- endfor %}
{{- eos_token }}
{%- elif message.role == 'assistant' %}
{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' }}{{- message.content | tojson }}{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
""".strip()

ROUNDS = """
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[Round ' ~ (loop.index0 // 2 + 1) ~ '] Q: ' + message.content + '\\nA:' }}
{%- else %}{{- message.content + '\\n\\n' }}{%- endif %}
{%- endfor %}
""".strip()
"""Numbers its rounds, so what follows a reply depends on where it stands; has no special tokens at all."""

NO_GENERATION_PROMPT = """
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
""".strip()

_QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA_TOKENS = ["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"]
_MISTRAL_TOKENS = ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
                   "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]  # fmt: skip

STYLES: dict[str, dict[str, Any]] = {
    "qwen": {"template": QWEN_STYLE, "tokens": _QWEN_TOKENS, "eos": "<|im_end|>", "bos": None, "metaspace": False},
    "llama3": {
        "template": LLAMA3_STYLE,
        "tokens": _LLAMA_TOKENS,
        "eos": "<|eot_id|>",
        "bos": "<|begin_of_text|>",
        "metaspace": False,
    },
    "mistral": {"template": MISTRAL_STYLE, "tokens": _MISTRAL_TOKENS, "eos": "</s>", "bos": "<s>", "metaspace": True},
    "rounds": {"template": ROUNDS, "tokens": ["<eos>"], "eos": "<eos>", "bos": None, "metaspace": False},
}

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? The capital is Paris.",
    'user assistant system tool {"name": "calculator", "arguments": {"expression": "1 + 2"}} <tool_call> </tool_call>',
    "<think> Let me see. </think> A1 B2 C3 board move free cells, your mark is X. Invalid action format:",
    "naïve café über straße 你好 世界 мир 🎲🎯 \n\n\t count=0 count=1 [Round 1] Q: A:",
]


@cache
def make_tokenizer(style: str) -> Any:
    """A byte-level BPE (or, for Mistral, a metaspace BPE with byte fallback) trained on a few lines."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    setting = STYLES[style]
    special = [AddedToken(token, special=True, normalized=False) for token in setting["tokens"]]
    if setting["metaspace"]:
        tokenizer = _metaspace_bpe(special)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=setting["eos"],
        bos_token=setting["bos"],
        chat_template=setting["template"],
        clean_up_tokenization_spaces=False,
    )


def _metaspace_bpe(special: list[Any]) -> Any:
    """Sentencepiece-like: no byte alphabet, so what was not in the corpus falls back to byte tokens."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def dressed(model: Any) -> Any:
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        return tokenizer

    trained = dressed(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    trained.train_from_iterator(_CORPUS * 3, trainer)
    learned = json.loads(trained.to_str())["model"]
    vocab = dict(learned["vocab"])
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = dressed(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.add_special_tokens(special)
    return tokenizer


def with_template(style: str, template: str | None) -> Any:
    """The style's tokenizer with another chat template."""
    from copy import deepcopy

    tokenizer = deepcopy(make_tokenizer(style))
    tokenizer.chat_template = template
    return tokenizer


# --- the `renderers` package: what a tokenizer must have for one of its renderers ---

_TOOL_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_QWEN_VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_GLM_TEXTS = [*_TOOL_TOKENS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_DEEPSEEK_TOOLS = [f"<｜tool▁{part}｜>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin",
                                                    "outputs▁end", "output▁begin", "output▁end")]  # fmt: skip

RENDERERS: dict[str, tuple[str, list[str], list[str]]] = {
    "qwen3": ("qwen", [], _TOOL_TOKENS),
    "qwen3.5": ("qwen", _QWEN_VISION, _TOOL_TOKENS),
    "glm-5": ("qwen", ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"], _GLM_TEXTS),
    "llama-3": ("llama3", ["<|end_of_text|>"], []),
    "deepseek-v3": (
        "qwen",
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        _DEEPSEEK_TOOLS,
    ),
    "minimax-m2": (
        "qwen",
        ["]~!b[", "]~b]", "[e~["],
        ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
    ),
}
"""Renderer -> style of the tokenizer, added special tokens, and added tokens that are text."""


@cache
def make_renderer_tokenizer(name: str) -> Any:
    """A small tokenizer with the tokens that this renderer looks up."""
    from copy import deepcopy

    style, special, texts = RENDERERS[name]
    tokenizer = deepcopy(make_tokenizer(style))
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens(texts)
    return tokenizer
