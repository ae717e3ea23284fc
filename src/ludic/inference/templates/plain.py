"""A plain-text chat template for base models, whose tokenizers have none.

Such a model continues by writing the user's next line too, so a reply ends where that line begins.
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
    """True if the tokenizer has this template, set now or when its model was saved; then `PLAIN_STOP` should end a reply."""
    if tokenizer.chat_template not in (None, "", PLAIN_CHAT):
        return False
    tokenizer.chat_template = PLAIN_CHAT
    return True


def with_plain_stop(sampling: SamplingParams) -> SamplingParams:
    """Add `PLAIN_STOP` to the stop texts."""
    given = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
    return replace(sampling, stop=[*given, PLAIN_STOP])
