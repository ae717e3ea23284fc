"""The streams of random numbers that are derived from one seed: the first index after it in `ludic.types.derive_seed`.

No number ever changes. With another one, a run that is resumed, or played again from its seed, would get other tasks and
other samples. A new stream takes the next free number of its table; plug-ins number theirs themselves, from 200.
"""

from enum import IntEnum, unique


@unique
class BatchSeeds(IntEnum):
    """Streams of a run's seed, from which its batches are drawn, and of an evaluation's."""

    EVAL_ENV = 101
    EVAL_SAMPLING = 102
    TASKS = 103
    """Single tasks, and what a curriculum draws."""
    ENVS = 104
    """The tasks of each of several envs."""
    RECORDED = 105
    HELD_OUT = 106
    """The samples of a stream that an evaluation takes."""
    REPLAY = 107


@unique
class EpisodeSeeds(IntEnum):
    """Streams of a request's or a group's seed."""

    ENV = 0
    SAMPLING = 1


@unique
class RoleSeeds(IntEnum):
    """Streams of the seed of a task that several policies play."""

    ASSIGNMENT = 0
    VERSION = 1
    """The snapshot of a league that plays."""
    CHANGED = 2
    """Another assignment, so that every policy that learns has a seat."""


@unique
class FileSeeds(IntEnum):
    """Streams of the seed of rollouts that are read from files."""

    ORDER = 0
    WITHIN_CHUNK = 1


@unique
class CallSeeds(IntEnum):
    """Streams of an episode's sampling seed, whose small numbers are those of its turns."""

    SUMMARY = 0x5EED
    CHILD = 0x0C41D
    """Episodes of sub-agents."""
