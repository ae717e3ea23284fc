"""Recorded rollouts that are trained on together with played ones (tables [[recorded]])."""

from ludic.batch_gen import OfflineBatchSource, make_chat_template_step_to_item
from ludic.batch_gen.sources.mixed import MixedBatchSource, MixedPart
from ludic.inference import HFChatTemplate
from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Around, Feature
from ludic.run.given import Parts
from ludic.run.parts.algorithm import PLAYED, recorded_algorithm
from ludic.run.resolve import ResolvedRun
from ludic.types import BatchSource, derive_seed

_SEEDS = 105


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
                seed=derive_seed(run.seed, _SEEDS, index),
                spans_by=HFChatTemplate(tokenizer) if algorithm.needs_message_spans else None,
            )
            parts.append(MixedPart(name=entry.name, source=offline, share=entry.share, objective=entry.name))
        return MixedBatchSource(parts)

    def says(self, run: ResolvedRun) -> list[str]:
        return [
            f"Beside every played sample {entry.share:g} of {', '.join(map(str, entry.files))}, with {entry.algo}."
            for entry in run.config.recorded
        ]
