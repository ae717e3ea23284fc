"""A MuSiQue question as it comes from a file or from the hub, checked and in one shape.

Two spellings are read: MuSiQue's own (`paragraph_text`, `question_decomposition`, `paragraph_support_idx`), which the hub
has, and a short one (`text`, `decomposition`, `support`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.types import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Paragraph:
    """One document of the question's knowledge base."""

    title: str
    text: str
    is_supporting: bool
    """Needed for the answer; the others are there to distract."""

    def __str__(self) -> str:
        return f"# {self.title}\n{self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """One step of the way to the answer."""

    question: str
    """With the answers of earlier steps in the place of #1, #2, …"""
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MuSiQueSample:
    """One question."""

    id: str
    question: str
    answer: str
    aliases: tuple[str, ...]
    """Other spellings of the answer."""
    paragraphs: tuple[Paragraph, ...]
    hops: tuple[Hop, ...]
    """Empty where the sample does not tell."""

    @property
    def accepted(self) -> tuple[str, ...]:
        return (self.answer, *self.aliases)

    @classmethod
    def read(cls, sample: Mapping[str, Any]) -> "MuSiQueSample":
        name = str(sample.get("id", "0"))
        if sample.get("answerable") is False:
            raise ConfigError(f"Sample {name!r} has no answer in its paragraphs (answerable is false). Leave it out.")
        paragraphs = tuple(_paragraph(p, name) for p in _one_of(sample, name, "paragraphs"))
        if not paragraphs:
            raise ConfigError(f"Sample {name!r} has no paragraphs to search in.")
        return cls(
            id=name,
            question=str(_one_of(sample, name, "question")),
            answer=str(_one_of(sample, name, "answer")),
            aliases=tuple(map(str, sample.get("answer_aliases") or ())),
            paragraphs=paragraphs,
            hops=_hops(sample.get("decomposition") or sample.get("question_decomposition") or (), name),
        )


def _one_of(mapping: Mapping[str, Any], sample: str, *keys: str) -> Any:
    for key in keys:
        if key in mapping:
            return mapping[key]
    raise ConfigError(
        f"Sample {sample!r} is not of MuSiQue's form: {' or '.join(map(repr, keys))} is missing among {sorted(mapping)}."
    )


def _paragraph(paragraph: Mapping[str, Any], sample: str) -> Paragraph:
    return Paragraph(
        title=str(_one_of(paragraph, sample, "title")),
        text=str(_one_of(paragraph, sample, "text", "paragraph_text")),
        is_supporting=bool(paragraph.get("is_supporting", False)),
    )


def _hops(decomposition: Sequence[Mapping[str, Any]], sample: str) -> tuple[Hop, ...]:
    hops: list[Hop] = []
    for step in decomposition:
        question = str(_one_of(step, sample, "question"))
        for number, earlier in enumerate(hops, start=1):
            question = re.sub(rf"#{number}\b", lambda _, hop=earlier: hop.answer, question)  # type: ignore[misc]
        hops.append(Hop(question=question, answer=str(_one_of(step, sample, "answer"))))
    return tuple(hops)
