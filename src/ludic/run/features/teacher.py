"""Teachers: one for all samples (teacher), or one for each domain ([teachers])."""

from ludic.batch_gen import TeacherAnnotatedBatchSource
from ludic.inference import tokenizer_fingerprint
from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Around, Feature, because
from ludic.run.given import Parts
from ludic.run.resolve import ResolvedRun
from ludic.types import BatchSource


class Teacher(Feature):
    """Every sample is scored by a teacher. A loss that compares whole distributions has the teacher's model instead."""

    name = "teacher"
    excludes = because("one teaches all samples, and the other has one for each domain. Leave one out.", "[teachers]")

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return config.algo.teacher is not None

    def wrap(self, run: ResolvedRun, source: BatchSource, around: Around) -> BatchSource:
        if around.algorithm.loss.needs.teacher_kl is not None:
            return source
        from ludic.run.teachers import make_teachers  # loads torch

        teachers, fingerprint = make_teachers(run, around.closing), tokenizer_fingerprint(around.tokenizer)
        return TeacherAnnotatedBatchSource(source, teachers, tokenizer_fingerprint=fingerprint)


class DomainTeachers(Teacher):
    """Every sample is scored by the teacher of its domain."""

    name = "[teachers]"
    excludes = because("")

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.teachers)
