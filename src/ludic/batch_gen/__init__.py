"""Batch generation: runs episodes, applies the credit rule, stitches tokens into samples, serves batches.

`run` and `eval` import it; `training` sees only its interfaces (`ludic.types`). Start with engine.py (episodes), then
stitching.py (samples), sources/ (batches), requests/ (tasks). The names below are imported when they are asked for.
"""

from typing import TYPE_CHECKING

from ludic.util.lazy import lazy

if TYPE_CHECKING:
    from ludic.batch_gen.engine import *  # noqa: F403
    from ludic.batch_gen.episodes import *  # noqa: F403
    from ludic.batch_gen.requests.curriculum import *  # noqa: F403
    from ludic.batch_gen.requests.dataset import *  # noqa: F403
    from ludic.batch_gen.requests.groups import *  # noqa: F403
    from ludic.batch_gen.sources.asynchronous import *  # noqa: F403
    from ludic.batch_gen.sources.mixed import *  # noqa: F403
    from ludic.batch_gen.sources.offline import *  # noqa: F403
    from ludic.batch_gen.sources.preferences import *  # noqa: F403
    from ludic.batch_gen.sources.rollouts import DynamicSampling as DynamicSampling
    from ludic.batch_gen.sources.rollouts import RolloutBatchSource as RolloutBatchSource
    from ludic.batch_gen.sources.shared import *  # noqa: F403
    from ludic.batch_gen.sources.stragglers import *  # noqa: F403
    from ludic.batch_gen.sources.teachers import *  # noqa: F403
    from ludic.batch_gen.stitching import *  # noqa: F403
    from ludic.types import RequestsExhausted as RequestsExhausted

_NAMES_BY_MODULE = {
    "engine": "Progress RolloutEngine",
    "episodes": "TooManyFailures",
    "requests.curriculum": "Curriculum EasiestFirstCurriculum KnowsSuccess PrioritisedCurriculum SuccessBandCurriculum "
    "TaskCurriculum UniformCurriculum",
    "requests.dataset": "DatasetRequests MixedRequests RequestsFn make_dataset_queue_requests_fn "
    "make_dataset_sequence_requests_fn make_requests_fn_from_queue",
    "requests.groups": "assign_roles AssignedRequests GRPORequestStrategy IdentityStrategy RequestStrategy",
    "sources.asynchronous": "AsyncRolloutBatchSource",
    "sources.mixed": "MixedBatchSource MixedPart ReplayBatchSource",
    "sources.offline": "OfflineBatchSource make_chat_template_step_to_item",
    "sources.preferences": "PreferenceBatchSource",
    "sources.rollouts": "DynamicSampling RolloutBatchSource",
    "sources.shared": "PolicyBatchSource SharedRollouts",
    "sources.stragglers": "Stragglers",
    "sources.teachers": "DomainTeachers PrivilegedTeacher TeacherAnnotatedBatchSource Teachers hint_first",
    "stitching": "stitch_rollout stitch_rollouts",
    "ludic.types": "RequestsExhausted",
}
__all__ = [name for names in _NAMES_BY_MODULE.values() for name in names.split()]
__getattr__ = lazy(__name__, _NAMES_BY_MODULE)
