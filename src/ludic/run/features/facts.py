"""Settings and objects that exclude or need others; the code that acts on them is elsewhere."""

from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Fact, because, engine_of
from ludic.types import shown_url

# --- servers that sample ---

_VLLM = "engine = 'vllm'"
ON_SERVERS = "engine = 'vllm' (in a pipeline actor_engine = 'vllm')"
"""Name of the fact that servers sample for the run, or for the actors of a pipeline."""


def _which(config: RunConfig) -> str:
    return _VLLM if engine_of(config).plays_here else "actor_engine = 'vllm'"


SERVERS = Fact(ON_SERVERS, lambda config, _: engine_of(config).samples_on_servers(config), shown=_which)
SERVER = Fact(
    "server",
    lambda config, _: config.rollouts.server,
    needs={ON_SERVERS: "it names servers that sample."},
    shown=lambda config: f"server = {', '.join(map(shown_url, config.rollouts.server))}",
)
PUSH = Fact(
    "push = 'adapter'",
    lambda config, _: config.rollouts.push == "adapter",
    needs={_VLLM: "only its servers take an adapter alone."},
)
TRANSPORT = Fact(
    "transport",
    lambda config, _: config.rollouts.transport != "auto",
    excludes=because("transport is for all weights; an adapter goes as files of the run folder.", "push = 'adapter'"),
    needs={ON_SERVERS: "it is how weights reach servers."},
    shown=lambda config: f"transport = {config.rollouts.transport!r}",
)
TRANSPORT_AWAY = Fact(
    "transport to named servers",
    lambda config, _: config.rollouts.engine == "vllm" and config.rollouts.transport in ("file", "gloo", "nccl"),
    needs={
        "server": "a server that is started for the run and restarted gets the last weights again, which shared_memory and "
        "cuda_ipc keep. Name servers with --server, or take one of these."
    },
    shown=lambda config: f"transport = {config.rollouts.transport!r}",
)
SERVER_SLEEP = Fact(
    "server_sleep",
    lambda config, _: config.rollouts.server_sleep,
    excludes=because(
        "it frees the server's memory while the trainer computes, but with the other it generates meanwhile.",
        "max_lag",
        "close_batch_at",
    )
    | because("it is for a vLLM server that the run starts. Leave one out.", "server"),
    needs={_VLLM: "it is for a vLLM server that the run starts."},
)

# --- playing and training ---

MAX_LAG = Fact("max_lag", lambda config, _: config.rollouts.max_lag)
DYNAMIC_SAMPLING = Fact(
    "dynamic_sampling",
    lambda config, _: config.rollouts.dynamic_sampling,
    says=lambda run: (
        f"Groups of equal returns are replaced by fresh tasks, so an update plays up to "
        f"{run.config.rollouts.dynamic_sampling} times as many episodes."
    ),
)
CLOSE_BATCH_AT = Fact(
    "close_batch_at",
    lambda config, _: config.rollouts.close_batch_at < 1,
    excludes=because("dynamic_sampling waits for whole rounds of episodes.", "dynamic_sampling"),
    says=lambda run: (
        f"An update begins when {run.config.rollouts.close_batch_at:.0%} of its episodes are done; the others go on, at most "
        f"{run.max_lag} versions behind."
    ),
)
FILTER = Fact(
    "filter",
    lambda config, _: config.algo.filter,
    says=lambda run: f"Samples are trained on where {' and '.join(run.config.algo.filter)} keep them.",
)
ENTROPY_BONUS = Fact(
    "entropy_bonus",
    lambda config, _: config.algo.entropy_bonus,
    says=lambda run: f"Entropy is rewarded: {run.config.algo.entropy_bonus:g} × its mean over tokens.",
)
EVAL_IN_BACKGROUND = Fact(
    "eval_in_background",
    lambda config, _: config.trainer.eval_in_background,
    excludes=because(
        "it needs an engine that can keep a copy of the weights: local. Servers have one set, which every update changes.",
        ON_SERVERS,
    ),
)
PROTOCOL = Fact(
    "protocol",
    lambda config, _: config.agent.protocol is not None,
    excludes=because(
        "an agent that is a function or a command runs its own turns. Leave one out.",
        "reward= of an agent behind the gateway", "policies= of an agent behind the gateway",
    ),
)  # fmt: skip
DATA = Fact("data", lambda config, _: config.env.data is not None)
UPDATES_PER_BATCH = Fact("updates_per_batch", lambda config, _: config.trainer.updates_per_batch > 1)
MINI_BATCHES = Fact("mini_batches", lambda config, _: config.trainer.mini_batches > 1)
QUANTIZE_BASE = Fact("quantize_base", lambda config, _: config.model.quantize_base)

# --- objects that `build` was given instead of names ---

SOURCE = Fact("source=", lambda _, parts: parts.source)
SCORERS = Fact("scorers=", lambda _, parts: parts.scorers)
SESSION_REWARD = Fact("reward= of an agent behind the gateway", lambda _, parts: parts.reward)
SESSION_POLICIES = Fact("policies= of an agent behind the gateway", lambda _, parts: parts.policies)
PROTOCOL_OBJECT = Fact("protocol= as an object", lambda _, parts: parts.protocol)
SAMPLES = Fact("data= as an object", lambda _, parts: parts.samples)
ALGORITHM = Fact("algo= as an object", lambda _, parts: parts.algorithm)
MODEL = Fact("model= as an object", lambda _, parts: parts.model)

FACTS = (
    SERVERS, SERVER, PUSH, TRANSPORT, TRANSPORT_AWAY, SERVER_SLEEP, MAX_LAG, EVAL_IN_BACKGROUND, PROTOCOL, DATA,
    UPDATES_PER_BATCH, MINI_BATCHES, QUANTIZE_BASE, SOURCE, SCORERS, SESSION_REWARD, SESSION_POLICIES, PROTOCOL_OBJECT,
    SAMPLES, ALGORITHM, MODEL,
)  # fmt: skip
"""Those that `--dry-run` says nothing of."""
