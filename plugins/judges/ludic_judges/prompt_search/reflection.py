"""Changes of a prompt: reflectors read rollouts and write a better prompt; merges put the changes of two candidates together.

GEPA's merge works on systems of several texts, and takes each text whole. In a search over one text, its sentences take their
place; that needs no model.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from ludic.types import Rollout
from ludic_judges.model import Asking
from ludic_judges.verdicts import DATA_NOTE, Words, case_of, section


class Reflector(Protocol):
    """Reads what a prompt led to and writes a better one."""

    async def propose(self, prompt: str, rollouts: Sequence[Rollout]) -> str: ...


@runtime_checkable
class Merger(Protocol):
    """A reflector that can also write one prompt with the lessons of two."""

    async def merge(self, ancestor: str, first: str, second: str) -> str: ...


class ModelReflector:
    """A model that is shown the prompt, and of each rollout the task, the reply, its reward and what the env says about it."""

    def __init__(
        self, asking: Asking, *, goal: str = "earn a higher reward on tasks like these", feedback: str = "feedback"
    ) -> None:
        """`asking`: a `JudgeModel` or `JudgeAgent` of ludic_judges, which ask again until a reply can be read.
        `feedback`: key in the info of an episode's last env step."""
        self.asking, self.goal, self.feedback = asking, goal, feedback

    async def propose(self, prompt: str, rollouts: Sequence[Rollout]) -> str:
        head = (
            f"You improve the instruction of another model, so that it will {self.goal}. Say what its replies have in common that "
            f"costs reward, then write a new instruction: general rules, not answers to these tasks. {DATA_NOTE}"
        )
        parts = [head, section("instruction", self.asking.quote(prompt))]
        for rollout in rollouts:
            case, last = case_of(rollout), rollout.env_steps[-1:]
            told = last[0].info.get(self.feedback, "") if last else ""
            parts += [
                section("task", self.asking.quote(case.task)),
                section("reply", self.asking.quote(case.reply)),
                section("result", self.asking.quote(f"reward {rollout.total_reward:g}. {told}")),
            ]
        return await self._ask(parts)

    async def merge(self, ancestor: str, first: str, second: str) -> str:
        head = (
            f"Two people have improved the instruction of another model, so that it will {self.goal}; each version is better at "
            f"other tasks. Say what each of them has learned, then write one instruction with both. {DATA_NOTE}"
        )
        texts = {"instruction before": ancestor, "first version": first, "second version": second}
        return await self._ask([head, *(section(name, self.asking.quote(text)) for name, text in texts.items())])

    async def _ask(self, parts: Sequence[str]) -> str:
        form = {"diagnosis": Words(), "instruction": Words("the whole new instruction")}
        found = await self.asking.ask("\n\n".join(parts), form)
        return str(found["instruction"]).strip()


Texts: TypeAlias = Mapping[str, str]
"""Argument of the protocol factory → text."""


def merged_texts(ancestor: Texts, better: Texts, other: Texts) -> tuple[dict[str, str], bool]:
    """The changes that two descendants made to their ancestor, in one candidate; and whether both changed the same passage.

    Of several texts each is taken from the descendant that changed it; one that both changed is the better one's (GEPA's
    system-aware merge). A single text is treated in the same way sentence by sentence; what both added is kept.
    """
    if len(ancestor) == 1:
        ((name, text),) = ancestor.items()
        found, has_conflict = merged_sentences(text, better[name], other[name])
        return {name: found}, has_conflict
    made = {name: other[name] if better[name] == text else better[name] for name, text in ancestor.items()}
    return made, any(text not in (better[name], other[name]) for name, text in ancestor.items())


def merged_sentences(ancestor: str, better: str, other: str) -> tuple[str, bool]:
    """A three-way merge of sentences and lines. Where both changed the same ones, the better's count.

    >>> merged_sentences("Answer. Be kind.", "Answer. Be kind. Use digits.", "Answer briefly. Be kind.")
    ('Answer briefly. Be kind. Use digits.', False)
    """
    base = _sentences(ancestor)
    first, second = _edits(base, _sentences(better)), _edits(base, _sentences(other))
    taken = [range(start, end) for start, end, _ in first]
    lost = [edit for edit in second if any(set(range(*edit[:2])) & set(span) for span in taken) and edit not in first]
    edits = first + [edit for edit in second if edit not in lost and edit not in first]
    pieces: list[str] = []
    for place in range(len(base) + 1):
        for start, _, new in edits:
            if start == place:
                pieces += [piece for piece in new if piece.strip() not in {known.strip() for known in pieces}]
        if place < len(base) and not any(start <= place < end for start, end, _ in edits):
            pieces.append(base[place])
    found = {piece.strip() for piece in pieces}
    common = {piece.strip() for piece in _sentences(better)} & {piece.strip() for piece in _sentences(other)}
    if not common <= found:  # one of them has moved a sentence that the other's change covers
        return better.strip(), True
    joined = ""
    for piece in pieces:
        joined += piece if not joined or joined[-1].isspace() or piece[0].isspace() else f" {piece}"
    return joined.strip(), bool(lost)


def _sentences(text: str) -> list[str]:
    """The pieces of a text, each with the white space before it; together they are the text."""
    return [piece for piece in re.split(r"(?<=[.!?])(?=\s)|(?<=\n)(?=\S)", text) if piece]


def _edits(base: Sequence[str], changed: Sequence[str]) -> list[tuple[int, int, list[str]]]:
    """(first place, place after the last, what is there instead) of every passage that was changed."""
    before, after = [piece.strip() for piece in base], [piece.strip() for piece in changed]
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(start, end, list(changed[low:high])) for kind, start, end, low, high in codes if kind != "equal"]
