"""Which teacher scores which sample: several experts for one student, chosen by the sample's domain."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ludic.batch_gen.teachers import require_same_tokenizer
from ludic.types import ConfigError, SAWItem, TeacherScorer, UnknownName

DomainOf: TypeAlias = Callable[[SAWItem], str]


def domain_of(item: SAWItem) -> str:
    """What the request said (`RolloutRequest.meta["domain"]`); without that, the name of the environment."""
    domain = item.meta.get("request_meta", {}).get("domain") or item.meta.get("env_name")
    if domain is None:
        raise ConfigError(
            f"A sample (rollout {item.meta.get('rollout_id')}) names neither a domain nor an env, so no teacher can be chosen. "
            'Put meta={"domain": …} on its request.'
        )
    return str(domain)


class DomainTeachers:
    """A teacher for each domain, all with the same tokenizer."""

    def __init__(self, teachers: Mapping[str, TeacherScorer], *, domain_of: DomainOf = domain_of) -> None:
        if not teachers:
            raise ConfigError("DomainTeachers needs at least one teacher.")
        self._teachers = dict(teachers)
        self._domain_of = domain_of

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self._teachers)

    def teacher_for(self, item: SAWItem) -> TeacherScorer:
        domain = self._domain_of(item)
        if domain not in self._teachers:
            raise UnknownName.among("teacher for the domain", domain, self._teachers)
        return self._teachers[domain]

    def require_tokenizer(self, fingerprint: str) -> None:
        for domain, teacher in self._teachers.items():
            require_same_tokenizer(domain, teacher, fingerprint)
