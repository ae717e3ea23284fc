"""The settings of a prompt search. Sections env, agent and reward are those of `ludic train`; every field is a flag."""

from dataclasses import dataclass, field, fields
from pathlib import Path

from ludic.cli.eval.config import PolicySettings, ServingSettings
from ludic.run.config.entries import at_least, check_name
from ludic.run.config.env_and_agent import AgentSettings, EnvSettings
from ludic.run.config.reward import RewardSettings
from ludic.run.given import EnvFactory, check_data
from ludic.run.resolve import resolve_play, slug
from ludic.run.settings import with_values
from ludic.types import ConfigError
from ludic.util.urls import PUT_LOGIN, refuse_login


@dataclass(frozen=True, kw_only=True)
class PlayerSettings(ServingSettings):
    """Who plays."""

    model: str | None = None
    """A folder, checkpoint or run, a hub id, a .gguf file; a config.json, or tiny: random weights. Default: smollm2-135m; at
    --base-url the model that it serves."""

    @property
    def policy(self) -> PolicySettings:
        """The player's settings in the form of `ludic eval`."""
        shared = {one.name: getattr(self, one.name) for one in fields(ServingSettings)}
        return PolicySettings(model=() if self.model is None else (self.model,), **shared)


@dataclass(frozen=True, kw_only=True)
class ReflectorSettings:
    """The model that rewrites the prompt."""

    reflector: str | None = None
    """The model that reads episodes and writes a better prompt: as --model, or the URL of an OpenAI-compatible endpoint. Default:
    the model that plays; a larger one finds more."""
    reflector_model: str | None = None
    """For a URL: the model's name there. Default: the one that it serves."""
    reflector_key_env: str | None = None
    """For a URL: the environment variable that holds its key."""
    reflector_tokens: int = 1024
    """Tokens of one reflection."""
    reflector_temperature: float = 1.0
    """Temperature of reflections."""
    goal: str = "earn a higher reward on tasks like these"
    """The purpose of the prompt, as the reflector is told."""

    def __post_init__(self) -> None:
        at_least(1, reflector_tokens=self.reflector_tokens)
        at_least(0, reflector_temperature=self.reflector_temperature)
        if self.is_served:
            refuse_login("reflector", self.reflector or "", f"Give --reflector-key-env NAME. Or: {PUT_LOGIN}")
        elif given := [name for name in ("reflector_model", "reflector_key_env") if getattr(self, name) is not None]:
            raise ConfigError(f"{given[0]} is for an endpoint; give its URL as --reflector.")

    @property
    def is_served(self) -> bool:
        return self.reflector is not None and self.reflector.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The length and the tasks of a search."""

    prompt_file: Path | None = None
    """File with the first prompt. Default: --system-prompt, else the env's own prompt."""
    num_tasks: int = 32
    """Tasks that every prompt is scored on: the first of --data, or this number of seeds; 0 takes all of --data."""
    max_episodes: int = 500
    """Episodes in all, the first prompt's and those before a --resume included."""
    shown: int = 3
    """Tasks whose episodes a reflection sees, and on which its prompt has to be better."""
    max_merges: int = 0
    """The number of merges of two prompts that are good at different tasks."""
    temperature: float = 0.6
    """Sampling temperature of the player; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that make up this share."""
    seed: int = 0
    """Seed of tasks, sampling and choices."""
    concurrency: int | None = None
    """Episodes at a time. Default: as many as the engine computes together; at an endpoint 64."""

    def __post_init__(self) -> None:
        at_least(0, num_tasks=self.num_tasks, max_merges=self.max_merges, temperature=self.temperature)
        at_least(1, shown=self.shown, concurrency=self.concurrency)


@dataclass(frozen=True, kw_only=True)
class PromptOutput:
    """The folder of a search."""

    name: str | None = None
    """Name of the folder. Default: env and model."""
    out: Path = Path("runs/prompts")
    """Parent of such folders."""

    def __post_init__(self) -> None:
        check_name(self.name)


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """Everything that decides what a search finds."""

    env: EnvSettings = field(default_factory=EnvSettings)
    player: PlayerSettings = field(default_factory=PlayerSettings)
    reflector: ReflectorSettings = field(default_factory=ReflectorSettings)
    agent: AgentSettings = field(default_factory=AgentSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    output: PromptOutput = field(default_factory=PromptOutput)

    @property
    def folder(self) -> Path:
        env = self.env.id.rpartition(":")[2].rpartition("/")[2]
        return self.output.out / (self.output.name or slug(f"{env}-{self.player.model or 'served'}")[:100])


MAY_CHANGE_ON_RESUME = frozenset(
    {"max_episodes", "max_merges", "name", "out", "dtype", "device", "threads", "concurrency", "base_url", "api_key_env",
     "reflector", "reflector_model", "reflector_key_env", "reflector_tokens", "reflector_temperature", "goal", "episode_timeout",
     "env_timeout", "env_workers", "env_memory_mb", "env_server", "sandbox", "judge_key_env", "judge_concurrency", "judge_cache",
     "judge_device"}
)  # fmt: skip
"""Settings that do not affect the scores so far."""


def resolve(config: PromptConfig, found: EnvFactory) -> PromptConfig:
    """The config with the env's suggestions and the text of the first prompt filled in where it is given, checked."""
    search, agent = config.search, config.agent
    check_data(found, config.env.data, config.env.set, "--data")
    if search.num_tasks == 0 and config.env.data is None:
        raise ConfigError("--num-tasks 0 takes all of --data, but there is none. Give a number.")
    config.reward.check_siblings(1, "the number of episodes of a task in a prompt search")
    if search.prompt_file is not None:
        if agent.system_prompt is not None:
            raise ConfigError("--prompt-file and --system-prompt both give the first prompt. Leave one out.")
        try:
            text = search.prompt_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file {search.prompt_file} cannot be read: {error}.") from error
        config = with_values(config, {"system_prompt": text, "prompt_file": None})
    return resolve_play(config, found.suggested)
