"""Where the data of a run stands: the state of whatever makes batches, for trainers here and elsewhere."""

from collections.abc import Mapping
from typing import Any

from ludic.training.algorithms import RLAlgorithm
from ludic.types import BatchSource, Stateful


def data_states(algo: RLAlgorithm, source: BatchSource | None) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in _parts(algo, source).items()}


def load_data_states(algo: RLAlgorithm, source: BatchSource | None, state: Mapping[str, Any]) -> None:
    for name, part in _parts(algo, source).items():
        if name in state:
            part.load_state_dict(state[name])


def _parts(algo: RLAlgorithm, source: BatchSource | None) -> dict[str, Stateful]:
    # The source last: one that works ahead knows the credit rule's state before the batches that are made again.
    parts: dict[str, Any] = {"credit_assigner": algo.credit_assigner, "batch_source": source}
    return {name: part for name, part in parts.items() if isinstance(part, Stateful)}
