"""Generation: where the samples of a run come from, and how new weights get there. Four implementations, chosen here.

- `EmbeddedGeneration` (engine = local): the engine in this process, which shares the trainer's weights.
- `VLLMGeneration` (engine = vllm): vLLM servers, given or started for the run.
- `PipelineGeneration` (engine = pipeline): actors push samples to a queue in Redis; weights go to a folder or to servers.
- `PreferenceGeneration` (--preferences, or --data with sft): comparisons or answers of a file.
"""

from collections.abc import Mapping

from ludic.run.config.run_config import RunConfig
from ludic.run.generation.base import Generation as Generation
from ludic.run.generation.in_process import EmbeddedGeneration, PreferenceGeneration, VLLMGeneration
from ludic.run.generation.in_process import check_preferences as check_preferences
from ludic.run.generation.teachers import check_teacher as check_teacher
from ludic.run.generation.teachers import make_teachers as make_teachers
from ludic_pipeline.generation import PipelineGeneration
from ludic_pipeline.generation import clear_queue as clear_queue
from ludic_pipeline.generation import mark_finished as mark_finished
from ludic_pipeline.generation import pipeline_algorithm as pipeline_algorithm

GENERATIONS: Mapping[str, type[EmbeddedGeneration] | type[PipelineGeneration]] = {
    "local": EmbeddedGeneration,
    "vllm": VLLMGeneration,
    "pipeline": PipelineGeneration,
}
"""Engine of the settings -> what generates."""


def generation_of(
    config: RunConfig,
) -> type[EmbeddedGeneration] | type[PipelineGeneration] | type[PreferenceGeneration]:
    return PreferenceGeneration if config.stored is not None else GENERATIONS[config.rollouts.engine]
