"""The engine `pipeline` as a feature of `ludic train`: its section of the settings, and what it excludes. Loads without torch."""

from typing import Any

from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Engine, Fact, because
from ludic.run.given import Parts
from ludic.run.resolve import ResolvedRun
from ludic_pipeline.settings import PipelineSettings, pipeline_of

_ACTORS_PLAY = (
    "these are for runs that play their own episodes (engine = local or vllm); in a pipeline actors play them."
)
_OBJECTS = "it is an object of this process, and in a pipeline actors play the episodes."


class Pipeline(Engine):
    """Actors in separate processes play, and a queue is between them and the learner."""

    engine = "pipeline"
    session = "ludic_pipeline.generation:PipelineSession"
    section = "pipeline"
    Settings = PipelineSettings
    plays_here = False
    batches_behind = 4
    command = "launch"
    retries_a_divergence = True  # a batch that ends a few learners is set aside
    excludes = (
        because(
            _ACTORS_PLAY,
            "dynamic_sampling", "curriculum", "close_batch_at", "filter", "[[recorded]]", "[replay]", "rollouts", "[[envs]]",
        )
        | because(
            "use local or vllm, or wrap the learner's source in code (TeacherAnnotatedBatchSource).", "teacher", "[teachers]"
        )
        | because(
            f"{_OBJECTS} Give reward='file.py:function', or an env of your own, whose step grades the answer.",
            "scorers=", "reward= of an agent behind the gateway",
        )
        | because(_OBJECTS, "policies= of an agent behind the gateway", "source=")
    )  # fmt: skip

    def samples_on_servers(self, config: RunConfig) -> bool:
        return pipeline_of(config).actor_engine == "vllm"

    def corrects_lag(self, config: RunConfig) -> bool:
        return pipeline_of(config).corrections

    def filled(self, config: RunConfig, name: str, group_size: int) -> dict[str, Any]:
        settings, num_groups = pipeline_of(config), config.rollouts.rollouts_per_update // group_size
        return {
            "queue_key": settings.queue_key or f"ludic:{name}",
            "max_waiting": settings.max_waiting or max(64, 4 * num_groups),
        }

    async def finished(self, run: ResolvedRun, step: int) -> None:
        from ludic_pipeline.generation import mark_finished

        await mark_finished(run, step)


PIPELINE = Pipeline()


def _has_redis(config: RunConfig, _: Parts) -> bool:
    return pipeline_of(config).redis is not None


REDIS = Fact("redis", _has_redis, needs={PIPELINE.name: "it is the queue between actors and learner."})
