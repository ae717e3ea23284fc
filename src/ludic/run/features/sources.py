"""Replay: samples of earlier batches that are trained on again (section [replay])."""

from ludic.batch_gen import OfflineBatchSource, TeacherAnnotatedBatchSource, make_chat_template_step_to_item
from ludic.batch_gen.sources.mixed import MixedBatchSource, MixedPart, ReplayBatchSource
from ludic.inference import HFChatTemplate, tokenizer_fingerprint
from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Around, Feature, because
from ludic.run.given import Parts
from ludic.run.parts.algorithm import PLAYED, make_algorithm, recorded_algorithm
from ludic.run.parts.episodes import make_rewards
from ludic.run.resolve import ResolvedRun
from ludic.run.settings import refuse
from ludic.seeds import BatchSeeds
from ludic.types import BatchSource, ConfigError, FollowsDrift, derive_seed


class Replay(Feature):
    """Samples of earlier batches in each new one."""

    name = "[replay]"
    excludes = because(
        "replay brings older samples by itself, and these bound the lag of new ones.", "max_lag", "close_batch_at"
    )

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.replay.replay)

    def wrap(self, run: ResolvedRun, source: BatchSource, around: Around) -> BatchSource:
        settings = run.config.replay
        return ReplayBatchSource(
            source,
            capacity=settings.replay_capacity,
            num_replayed=settings.replay,
            max_lag=settings.replay_max_lag,
            half_life=settings.replay_half_life,
            fresh_every=settings.replay_fresh_every,
            seed=derive_seed(run.seed, BatchSeeds.REPLAY),
        )

    def says(self, run: ResolvedRun) -> list[str]:
        settings = run.config.replay
        return [
            f"Each batch has {settings.replay} samples of earlier ones, drawn from the last {settings.replay_capacity:,}."
        ]


class Recorded(Feature):
    """Each entry is a part of the mixture, with its own algorithm."""

    name = "[[recorded]]"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.recorded)

    def check(self, run: ResolvedRun) -> None:
        for entry in run.config.recorded:
            entry.files  # noqa: B018 - raises

    def wrap(self, run: ResolvedRun, source: BatchSource, around: Around) -> BatchSource:
        parts = [MixedPart(name=PLAYED, source=source, share=1.0)]
        for index, entry in enumerate(run.config.recorded):
            algorithm, tokenizer = recorded_algorithm(entry), around.tokenizer
            offline = OfflineBatchSource(
                entry.files,
                make_chat_template_step_to_item(tokenizer, with_spans=algorithm.needs_message_spans)
                if entry.render
                else None,
                algorithm=algorithm,
                seed=derive_seed(run.seed, BatchSeeds.RECORDED, index),
                spans_by=HFChatTemplate(tokenizer) if algorithm.needs_message_spans else None,
            )
            parts.append(MixedPart(name=entry.name, source=offline, share=entry.share, objective=entry.name))
        return MixedBatchSource(parts)

    def says(self, run: ResolvedRun) -> list[str]:
        return [
            f"Beside every played sample {entry.share:g} of {', '.join(map(str, entry.files))}, with {entry.algo}."
            for entry in run.config.recorded
        ]


_PLAYING = ("max_lag", "close_batch_at", "dynamic_sampling", "curriculum")
_WHY = "its samples come from a file, and nothing is played. Leave one out."


class StoredRollouts(Feature):
    """Rollouts that `ludic rescore` or another run wrote."""

    name = "rollouts"
    excludes = because(_WHY, *_PLAYING)

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.rollouts.rollouts)

    def check(self, run: ResolvedRun) -> None:
        refuse(
            f"rollouts = {path}: there is no such file. `ludic rescore` writes one, and runs into rollouts/."
            for path in run.config.rollouts.rollouts
            if not path.is_file()
        )


class _Texts(Feature):
    excludes = because(
        _WHY,
        *_PLAYING,
        "rollouts",
        "filter",
        "teacher",
        "[teachers]",
        "[[envs]]",
        "[[recorded]]",
        "league_every",
        "[replay]",
    )
    needs = because("nothing is played, except to evaluate in this process.", "engine = 'local'")


class Preferences(_Texts):
    """Pairs or labels of a file, for dpo, ipo and kto."""

    name = "preferences"
    excludes = _Texts.excludes | because(_WHY, "data")

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return config.rollouts.preferences is not None


class Answers(_Texts):
    """Questions with their answers, for sft."""

    name = "data (with sft)"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return config.stored is not None and config.rollouts.preferences is None


class Teacher(Feature):
    """Every sample is scored by a teacher. A loss that compares whole distributions has the teacher's model instead."""

    name = "teacher"
    excludes = because("one teaches all samples, and the other has one for each domain. Leave one out.", "[teachers]")

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return config.algo.teacher is not None

    def wrap(self, run: ResolvedRun, source: BatchSource, around: Around) -> BatchSource:
        if around.algorithm.loss.needs.teacher_kl is not None:
            return source
        from ludic.run.model import make_teachers  # loads torch

        teachers, fingerprint = make_teachers(run, around.closing), tokenizer_fingerprint(around.tokenizer)
        return TeacherAnnotatedBatchSource(source, teachers, tokenizer_fingerprint=fingerprint)


class DomainTeachers(Teacher):
    """Every sample is scored by the teacher of its domain."""

    name = "[teachers]"
    excludes = because("")

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.teachers)


class Envs(Feature):
    """Groups of several envs in each batch."""

    name = "[[envs]]"
    excludes = because(
        "that is for runs with one env.",
        "rollouts", "curriculum", "league_every", "protocol= as an object", "data= as an object",
    )  # fmt: skip

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.envs)

    def check(self, run: ResolvedRun) -> None:
        if isinstance(make_algorithm(run).credit_assigner, FollowsDrift):
            raise ConfigError(
                f"algo = {run.config.algo.algo!r} tracks single prompts, which only one env can number. Take grpo."
            )


class SeveralPolicies(Feature):
    """Policies that play together, each with its own model, algorithm and trainer."""

    name = "[policies.…]"
    excludes = because(
        "that is for runs that train one policy. Leave one out; docs/multi_policy.md says what several policies can do, and "
        "what is done in code.",
        "[[envs]]", "[[recorded]]", "[replay]", "rollouts", "preferences", "data (with sft)", "max_lag", "close_batch_at",
        "dynamic_sampling", "curriculum", "teacher", "[teachers]", "updates_per_batch", "mini_batches", "quantize_base",
        "protocol", "source=", "algo= as an object", "model= as an object",
        "reward= of an agent behind the gateway", "policies= of an agent behind the gateway",
    )  # fmt: skip
    needs = because("every policy has an engine in this process.", "engine = 'local'")

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.policies)


class Scored(Feature):
    """Scorers and weights of rewards, besides what the env gives."""

    name = "reward"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.reward.reward or config.reward.judge or config.reward.reward_weight or parts.scorers)

    def check(self, run: ResolvedRun) -> None:
        make_rewards(run.config.reward, run.config.agent, run.parts)
        run.config.reward.check_siblings(run.group_size, "--group-size")

    def says(self, run: ResolvedRun) -> list[str]:
        rewards = make_rewards(run.config.reward, run.config.agent, run.parts)
        if rewards is None:
            return []
        names = dict.fromkeys(["env", *rewards.weights, *(scorer.name for scorer in rewards.scorers)])
        return [f"Rewards: {', '.join(f'{rewards.weight_of(name):g} × {name}' for name in names)}."]


class NearReference(Feature):
    """A KL to a frozen reference."""

    name = "kl_coeff"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.algo.kl_coeff)

    def says(self, run: ResolvedRun) -> list[str]:
        algo = run.config.algo
        usual = "the model under the adapter" if run.config.model.lora_rank else "a frozen copy of its first weights"
        return [f"The policy is held near {algo.reference or usual}: {algo.kl_coeff:g} × KL ({algo.kl_estimator})."]
