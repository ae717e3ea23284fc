"""Who scores a sample: the interface behind one teacher for all, one per domain, one that is told more."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ludic.types import ConfigError, SAWItem, TeacherScorer


@runtime_checkable
class Teachers(Protocol):
    """Chooses a teacher for each sample."""

    def teacher_for(self, item: SAWItem) -> TeacherScorer: ...

    def require_tokenizer(self, fingerprint: str) -> None:
        """ConfigError if a teacher's ids mean something else than the student's."""
        ...


@dataclass(frozen=True, slots=True)
class OneTeacher:
    """The same for every sample."""

    teacher: TeacherScorer

    def teacher_for(self, item: SAWItem) -> TeacherScorer:
        return self.teacher

    def require_tokenizer(self, fingerprint: str) -> None:
        require_same_tokenizer("teacher", self.teacher, fingerprint)


def require_same_tokenizer(name: str, teacher: TeacherScorer, fingerprint: str) -> None:
    """`name` is what the message calls the teacher."""
    if teacher.tokenizer_fingerprint != fingerprint:
        raise ConfigError(
            f"The teacher {name!r} has another tokenizer ({teacher.tokenizer_fingerprint:.12}…) than the student "
            f"({fingerprint:.12}…): the same ids mean other texts. Take a teacher of the student's family."
        )
