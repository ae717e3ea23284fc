"""Talking with a base model: its tokenizer has no chat template, so it is given one of plain words.

Such a model goes on by writing the other side's next line too; a reply ends where that begins.
"""

from typing import Any

PLAIN_CHAT = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOP = "\n\nUser:"


def give_plain_chat(tokenizer: Any) -> bool:
    """True if the tokenizer had no chat template; it has one now, and `PLAIN_STOP` should end a reply."""
    if tokenizer.chat_template:
        return False
    tokenizer.chat_template = PLAIN_CHAT
    return True
