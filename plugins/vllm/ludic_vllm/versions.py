"""Differences between the vLLM releases that Ludic works with, as one table. Used by the trainer and inside the server.

docs/serving.md says what was run with which release. plugins/vllm/tests/test_vllm_versions.py compares this table, and every name
of vLLM that Ludic imports, with vLLM's sources.
"""

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """One release of vLLM, and the later ones that the table does not list."""

    first: tuple[int, int]
    end: tuple[int, int]
    """The row was written for versions from `first` on, before `end`."""
    tested_on: Literal["CPU", "GPU"]
    """Machine of Ludic's tests with it: a CPU in `make test`, a GPU by hand (plugins/vllm/tests/test_cuda_vllm.py)."""
    entry_point: str
    """Module of the API server, for `python -m`."""
    generate_flag: str | None
    """The flag without which /inference/v1/generate is off; None where it is always on."""
    has_weight_versions: bool
    """/weight_info, /update_weight_version, `weight_version` of /finish_weight_update, and text and versions in the answers of
    /inference/v1/generate. Without them middlewares.py serves the endpoints, and the client takes /v1/completions."""
    configures_updates: bool
    """The worker sets vLLM's current configuration while it loads weights; layers that are built again read it."""
    loads_beside_lora: bool
    """All weights can be loaded into a server with --enable-lora: its layers have other names there."""
    rename_mapper: str
    """Method of a model's `hf_to_vllm_mapper`: the mapper without the fusing of layers."""
    reads_lora_patterns: bool
    """An adapter's rank_pattern and alpha_pattern count (`PEFTHelper.get_rank_and_scaling`)."""
    batch_processor: str | None
    """Module of the logits-processor interface of the newer model runner; None: that runner takes no processors, and vLLM uses
    the older one when it is given one."""


RELEASES = (
    Release(
        first=(0, 26),
        end=(0, 27),
        tested_on="GPU",
        entry_point="vllm.entrypoints.openai.api_server",
        generate_flag=None,
        has_weight_versions=False,
        configures_updates=False,
        loads_beside_lora=False,
        rename_mapper="get_unstacked_mapper",
        reads_lora_patterns=False,
        batch_processor=None,
    ),
    Release(
        first=(0, 32),
        end=(0, 33),
        tested_on="CPU",
        entry_point="vllm.entrypoints.launchers.api_server.entry",
        generate_flag="--enable-scale-out",
        has_weight_versions=True,
        configures_updates=True,
        loads_beside_lora=True,
        rename_mapper="get_rename_mapper",
        reads_lora_patterns=True,
        batch_processor="vllm.v1.worker.gpu.sample.logits_processor.interface",
    ),
)


def _number_of(version: str) -> tuple[int, ...]:
    """(0, 32) of "0.32.1+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def release_of(version: str) -> Release:
    """The row for a version: of the listed releases the newest that is not newer, or the oldest."""
    number = _number_of(version)
    return next((release for release in reversed(RELEASES) if release.first <= number), RELEASES[0])


def is_listed(version: str) -> bool:
    """Return True if the table was written for this version, not for an older or newer one."""
    release = release_of(version)
    return release.first <= _number_of(version) < release.end


def version_range(release: Release) -> str:
    """The versions of a row in pip's notation."""
    first, end = (".".join(map(str, bound)) for bound in (release.first, release.end))
    return f">={first},<{end}"


TESTED_ON_CPU, TESTED_ON_GPU = (next(row for row in RELEASES if row.tested_on == place) for place in ("CPU", "GPU"))
