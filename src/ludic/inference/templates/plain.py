"""Talking with a base model: its tokenizer has no chat template, so it is given one of plain words.

Such a model goes on by writing the other side's next line too; a reply ends where that begins.
"""

from dataclasses import replace
from typing import Any

from ludic.types import SamplingParams

PLAIN_CHAT = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOP = "\n\nUser:"


def give_plain_chat(tokenizer: Any) -> bool:
    """True if the tokenizer has this template, given now or when its model was saved; `PLAIN_STOP` should end a reply."""
    if tokenizer.chat_template not in (None, "", PLAIN_CHAT):
        return False
    tokenizer.chat_template = PLAIN_CHAT
    return True


def with_plain_stop(sampling: SamplingParams) -> SamplingParams:
    """`PLAIN_STOP` ends a reply, too."""
    given = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
    return replace(sampling, stop=[*given, PLAIN_STOP])
