"""Reading actions: buttons by name, each with a number of presses if it is more than one.

`a`, `up 3`, `up 3 right a`, also with commas, line breaks and × between.
"""

import re

from ludic.envs.game_boy.emulator import BUTTONS

_WORD = re.compile(r"[^\W\d]+|\d+|[^\s,;.×]")


def read_buttons(action: str, limit: int) -> list[str] | str:
    """The presses in order; or, in words, why the text cannot be read."""
    presses: list[str] = []
    previous = ""
    for word in _WORD.findall(action.lower()):
        if word == "x":  # up x3
            continue
        if word in BUTTONS:
            presses.append(word)
        elif word.isdecimal() and previous in BUTTONS:
            count = int(word[:6])
            if count == 0:
                return "A number of presses is at least 1."
            presses += [previous] * min(count - 1, limit + 1)
        else:
            return f"{word!r:.40} is no button. Write one or several of {', '.join(BUTTONS)}, for example: up 3 a"
        if len(presses) > limit:
            return f"That is more than {limit} presses; send at most {limit} at a time."
        previous = word
    return presses or f"No button was named. Write one or several of {', '.join(BUTTONS)}, for example: up 3 a"
