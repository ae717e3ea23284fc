"""The engine `vllm` as a feature of `ludic train`. Loads without torch and vLLM."""

from contextlib import ExitStack

from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Engine
from ludic.run.resolve import ResolvedRun
from ludic.types import TeacherScorer


class VLLM(Engine):
    """vLLM servers, named or started for the run."""

    engine = "vllm"
    session = "ludic_vllm.generation:VLLMSession"

    def samples_on_servers(self, config: RunConfig) -> bool:
        return True

    def served_teacher(self, run: ResolvedRun, url: str, closing: ExitStack) -> TeacherScorer:
        """Scorer of samples by the model of a vLLM server."""
        from ludic_vllm.generation import connect_to_teacher  # loads torch

        return connect_to_teacher(run, url, closing)


ENGINE = VLLM()
