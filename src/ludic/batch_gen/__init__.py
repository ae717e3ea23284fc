"""Batch generation: runs episodes, applies the credit rule, stitches tokens into samples, serves batches.

`run`, `eval` and `minimal` import it; `training` sees only its interfaces (`ludic.types`). Start with engine.py (episodes), then
stitching.py (samples), sources/ (batches), requests/ (tasks), pipeline/ (actors and learners over Redis).
"""

from ludic.batch_gen.engine import Progress, RolloutEngine
from ludic.batch_gen.episodes import TooManyFailures
from ludic.batch_gen.requests.curriculum import (
    Curriculum,
    EasiestFirstCurriculum,
    KnowsSuccess,
    PrioritisedCurriculum,
    SuccessBandCurriculum,
    TaskCurriculum,
    UniformCurriculum,
)
from ludic.batch_gen.requests.dataset import (
    DatasetRequests,
    MixedRequests,
    RequestsFn,
    make_dataset_queue_requests_fn,
    make_dataset_sequence_requests_fn,
    make_requests_fn_from_queue,
)
from ludic.batch_gen.requests.groups import GRPORequestStrategy, IdentityStrategy, RequestStrategy
from ludic.batch_gen.requests.roles import AssignedRequests, assign_roles
from ludic.batch_gen.sources.asynchronous import AsyncRolloutBatchSource
from ludic.batch_gen.sources.mixed import MixedBatchSource, MixedPart, ReplayBatchSource
from ludic.batch_gen.sources.offline import OfflineBatchSource, make_chat_template_step_to_item
from ludic.batch_gen.sources.preferences import PreferenceBatchSource
from ludic.batch_gen.sources.rollouts import DynamicSampling, RolloutBatchSource
from ludic.batch_gen.sources.shared import PolicyBatchSource, SharedRollouts
from ludic.batch_gen.sources.stragglers import Stragglers
from ludic.batch_gen.sources.teachers import (
    DomainTeachers,
    PrivilegedTeacher,
    TeacherAnnotatedBatchSource,
    Teachers,
    hint_first,
)
from ludic.batch_gen.stitching import stitch_rollout, stitch_rollouts
from ludic.types import RequestsExhausted

__all__ = [
    "RolloutEngine", "Progress", "TooManyFailures",
    "RequestStrategy", "IdentityStrategy", "GRPORequestStrategy", "DynamicSampling", "Stragglers",
    "Curriculum", "TaskCurriculum", "UniformCurriculum", "EasiestFirstCurriculum", "SuccessBandCurriculum",
    "PrioritisedCurriculum", "KnowsSuccess",
    "RequestsFn", "RequestsExhausted", "DatasetRequests", "MixedRequests", "make_requests_fn_from_queue",
    "make_dataset_queue_requests_fn", "make_dataset_sequence_requests_fn",
    "stitch_rollout", "stitch_rollouts",
    "RolloutBatchSource", "AsyncRolloutBatchSource", "OfflineBatchSource", "make_chat_template_step_to_item",
    "PreferenceBatchSource",
    "MixedBatchSource", "MixedPart", "ReplayBatchSource",
    "TeacherAnnotatedBatchSource", "Teachers", "DomainTeachers", "PrivilegedTeacher", "hint_first",
    "AssignedRequests", "assign_roles", "SharedRollouts", "PolicyBatchSource",
]  # fmt: skip
