"""`PipelineStats`: how a queue and its learner stand, and whether every item is accounted for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ludic.batch_gen.pipeline.queue import Census


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStats:
    """The queue at one moment, and what this learner has seen of it in its life."""

    produced: int = 0
    """Items that were ever pushed. This and the next four are of the queue's whole life, over all learners."""
    trained: int = 0
    """Trained on and acknowledged: by the learner's setting, once the update is done or in a checkpoint."""
    stale: int = 0
    """Older than max_lag, or of a policy that was never resumed."""
    filtered: int = 0
    """Left out by the trainer: its filters, its length limit."""
    dead: int = 0
    """Could not be read or trained on, or learners died of them."""
    in_queue: int = 0
    """Items of all entries in the queue, counted one by one: those that wait, and those not yet acknowledged."""
    queue_groups: int = 0
    """Groups that no learner has fetched."""
    queue_items: int = 0
    """Their items."""
    unacknowledged_items: int = 0
    """Fetched, and not yet acknowledged: in training, or waiting for a checkpoint."""
    oldest_waiting_s: float = 0.0
    """How long the oldest group that nobody has fetched has been waiting."""
    num_foreign: int = 0
    """Entries that no actor of ours has written; they will be buried."""
    num_dead_letters: int = 0
    """Kept for somebody to look at."""
    num_actors: int = 0
    """Heard of lately."""
    in_progress_items: int = 0
    """Being made by them."""
    version: int | None = None
    """The learner's."""
    lags: Mapping[int, int] = field(default_factory=dict)
    """Lag → items that this learner was given to train on with it."""
    dropped_lags: Mapping[int, int] = field(default_factory=dict)
    """Lag → items that this learner dropped because of it."""

    @classmethod
    def of(cls, census: Census, lags: Mapping[int, int], dropped_lags: Mapping[int, int]) -> "PipelineStats":
        return cls(
            produced=census.produced,
            trained=census.trained,
            stale=census.stale,
            filtered=census.filtered,
            dead=census.dead,
            in_queue=census.in_queue,
            queue_groups=census.waiting_groups,
            queue_items=census.waiting_items,
            unacknowledged_items=census.taken_items,
            oldest_waiting_s=census.oldest_waiting_s,
            num_foreign=census.num_foreign,
            num_dead_letters=census.num_dead_letters,
            num_actors=census.num_actors,
            in_progress_items=census.in_progress_items,
            version=census.version,
            lags=dict(sorted(lags.items())),
            dropped_lags=dict(sorted(dropped_lags.items())),
        )

    @property
    def balance(self) -> int:
        """0 when every item that was produced is accounted for."""
        return self.produced - (self.trained + self.stale + self.filtered + self.dead + self.in_queue)

    def identity(self) -> str:
        """The account in one line; it names what is missing, if anything is."""
        line = (
            f"produced {self.produced} = {self.trained} acknowledged + {self.stale} stale + {self.filtered} filtered + "
            f"{self.dead} dead + {self.unacknowledged_items} fetched + {self.in_queue - self.unacknowledged_items} waiting"
        )
        return line if self.balance == 0 else f"{line} + {self.balance} UNACCOUNTED FOR"

    def metrics(self) -> dict[str, float]:
        """As numbers for a logger."""
        return {
            "queue_groups": float(self.queue_groups),
            "queue_items": float(self.queue_items),
            "queue_oldest_s": self.oldest_waiting_s,
            "queue_unacknowledged": float(self.unacknowledged_items),
            "queue_stale": float(self.stale),
            "queue_filtered": float(self.filtered),
            "queue_dead": float(self.dead),
            "queue_balance": float(self.balance),
            "num_actors": float(self.num_actors),
        }
