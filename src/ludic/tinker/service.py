"""The connection to Tinker (remote LoRA training and sampling) through its official SDK, and its errors in our words.

The SDK is an extra. It imports torch where that is installed, so it is imported on the first connection.
"""

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ludic.inference.http import EndpointError, Unreachable
from ludic.types import ConfigError, LudicError, MissingExtra

if TYPE_CHECKING:
    import tinker


@dataclass(frozen=True, kw_only=True)
class TinkerConfig:
    """Which model is trained, in whose name, and where."""

    base_model: str
    """As Tinker calls it, such as "Qwen/Qwen3-8B"."""
    lora_rank: int = 32
    lora_seed: int | None = None
    """Decides the adapter's first weights; None leaves them to the service."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    project_id: str | None = None
    """A project that exists; None is $TINKER_PROJECT_ID, or else the account's default."""
    base_url: str | None = None
    """None is $TINKER_BASE_URL, or else the service itself."""
    api_key: str | None = field(default=None, repr=False)
    """None is $TINKER_API_KEY, or else what `tinker auth login` has stored."""
    max_context: int | None = None
    """Tokens of the longest conversation; None is what the service has room for."""
    checkpoint_ttl_s: int | None = None
    """When the service forgets saved states, at least an hour; None is never."""

    def __post_init__(self) -> None:
        if self.lora_rank < 1:
            raise ConfigError(f"TinkerConfig.lora_rank={self.lora_rank}; it must be at least 1.")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ConfigError("TinkerConfig trains nothing: one of train_attn, train_mlp, train_unembed must be True.")
        if self.checkpoint_ttl_s is not None and self.checkpoint_ttl_s < 3600:
            raise ConfigError(f"TinkerConfig.checkpoint_ttl_s={self.checkpoint_ttl_s}; the least is 3600, an hour.")


def sdk() -> Any:
    """The module `tinker`."""
    try:
        return importlib.import_module("tinker")
    except ImportError as error:
        raise MissingExtra("tinker", f"Tinker ({error})") from error


def connect(config: TinkerConfig) -> "tinker.ServiceClient":
    """A client of the service. Its session begins with the first training or sampling client that it makes."""
    with tinker_errors("make a client"):
        client: tinker.ServiceClient = sdk().ServiceClient(
            project_id=config.project_id, base_url=config.base_url, api_key=config.api_key
        )
        return client


def context_length(service: "tinker.ServiceClient", config: TinkerConfig) -> int | None:
    """How many tokens a conversation may have, as far as the service says. The quickest way to see whether the key is taken."""
    with tinker_errors("ask what it offers"):
        offered = service.get_server_capabilities().supported_models
    limits = [model.max_context_length for model in offered if model.model_name == config.base_model]
    return min((limit for limit in (*limits, config.max_context) if limit is not None), default=None)


@contextlib.contextmanager
def tinker_errors(purpose: str, config: TinkerConfig | None = None) -> Iterator[None]:
    """What goes wrong inside, as an error of ours; the SDK has tried again by then whatever is worth it.

    `purpose` completes "Tinker was asked to …"; `config` is given where its settings may be what is refused.
    """
    tinker = sdk()
    try:
        yield
    except tinker.APIStatusError as error:
        raise _refusal(purpose, error.status_code, error.message, config) from error
    except tinker.APIConnectionError as error:
        raise Unreachable(f"Tinker was asked to {purpose}, and cannot be reached: {error}") from error
    except tinker.RequestFailedError as error:
        raise EndpointError(f"Tinker was asked to {purpose}, and failed: {error.message}") from error
    except tinker.TinkerError as error:
        if "api_key" not in str(error):
            raise EndpointError(f"Tinker was asked to {purpose}: {error}") from error
        raise ConfigError(
            f"There is no key for Tinker ({error}). Set $TINKER_API_KEY, store one with `tinker auth login`, or give "
            "TinkerConfig an api_key."
        ) from error


def _refusal(purpose: str, status: int, message: str, config: TinkerConfig | None) -> LudicError:
    said = f"Tinker was asked to {purpose}, and answered {status}: {message}."
    if status == 401:
        return ConfigError(f"{said} Is $TINKER_API_KEY (or TinkerConfig.api_key) right?")
    if config is None or not 400 <= status < 500:
        return EndpointError(said, status=status)
    asked = f"base_model={config.base_model!r}, lora_rank={config.lora_rank}, project_id={config.project_id!r}"
    return ConfigError(f"{said} Asked for were {asked}; a project must exist before it is used.")
