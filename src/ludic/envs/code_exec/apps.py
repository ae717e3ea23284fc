"""APPS: programs that read stdin, from competitive programming sites."""

import json
from collections.abc import Sequence
from typing import Any

from ludic.envs.code_exec.adapters import PROGRAM_PROMPT, Sample, TestAdapter, as_text, field_of
from ludic.envs.code_exec.cases import TestCase
from ludic.envs.code_exec.verifiers import OutputVerifier, WhitespaceNormalizedVerifier
from ludic.types import ConfigError

APPS_SYSTEM_PROMPT = PROGRAM_PROMPT


class APPSTestAdapter(TestAdapter):
    """Reads inputs and outputs as two lists of the sample, or from the `input_output` JSON of the original dataset."""

    system_prompt = APPS_SYSTEM_PROMPT
    verifier: OutputVerifier = WhitespaceNormalizedVerifier()
    """The sites that the problems come from do not count spaces at line ends either."""

    def __init__(
        self,
        question_key: str = "question",
        inputs_key: str = "inputs",
        outputs_key: str = "outputs",
        problem_id_key: str = "problem_id",
    ) -> None:
        self.question_key = question_key
        self.inputs_key = inputs_key
        self.outputs_key = outputs_key
        self.problem_id_key = problem_id_key

    def get_tests(self, sample: Sample) -> list[TestCase]:
        inputs, outputs = self._inputs_and_outputs(sample)
        if len(inputs) != len(outputs):
            raise ConfigError(
                f"APPS problem {self.get_problem_id(sample)} has {len(inputs)} inputs and {len(outputs)} outputs; each "
                "input needs its output."
            )
        pairs = enumerate(zip(inputs, outputs, strict=True), start=1)
        return [TestCase(as_text(given), as_text(wanted), id=str(number)) for number, (given, wanted) in pairs]

    def _inputs_and_outputs(self, sample: Sample) -> tuple[Sequence[Any], Sequence[Any]]:
        if self.inputs_key in sample:
            return sample[self.inputs_key], field_of(sample, self.outputs_key)
        packed = field_of(sample, "input_output", self.inputs_key)
        unpacked = json.loads(packed) if isinstance(packed, str) else packed
        if unpacked.get("fn_name"):
            raise ConfigError(
                f"APPS problem {self.get_problem_id(sample)} asks for a function ({unpacked['fn_name']}) and not for a "
                "program. Leave such problems out: keep the samples whose input_output has no fn_name."
            )
        return unpacked["inputs"], unpacked["outputs"]

    def get_prompt(self, sample: Sample) -> str:
        return str(field_of(sample, self.question_key))

    def get_problem_id(self, sample: Sample) -> str:
        return str(sample.get(self.problem_id_key, sample.get("id", "0")))

    def get_reference(self, sample: Sample) -> str | None:
        """The first of the dataset's solutions; some of them are wrong, or written for Python 2."""
        solutions = sample.get("solutions") or "[]"
        unpacked = json.loads(solutions) if isinstance(solutions, str) else solutions
        return str(unpacked[0]) if unpacked else None
