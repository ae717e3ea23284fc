"""`ludic serve --tinker`: LoRA training and sampling for clients of Tinker's SDK, on one base model. See docs/tinker-server.md."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ludic.cli.args import Switch, need_extras, parse
from ludic.http.address import check_host, check_port, require_port
from ludic.run.config.entries import at_least
from ludic.run.config.model import Dtype
from ludic.types import ConfigError
from ludic.util.stop import DRAIN_S, serve_until_stopped

_KEY_SHOWN = "tml-any"
"""The SDK sends no request without a key."""


@dataclass(frozen=True)
class _TinkerServeArgs:
    """Serve Tinker's protocol: its SDK trains LoRA adapters of this model and samples from them."""

    model: str
    """A folder, a hub id, a .gguf file, smollm2-135m or tiny."""
    name: list[str] = field(default_factory=list)
    """Name that clients call the model by, if not by --model; several are allowed."""
    host: str = "127.0.0.1"
    """Address to listen on; other than loopback it wants a key."""
    port: int = 8000
    """Port; 0 takes a free one."""
    data: Path | None = None
    """Folder of runs and checkpoints; after a restart, also after kill -9, clients go on. Default: runs/tinker/<name>."""
    snapshot_every: int = 16
    """Steps of a run after which its state is saved; a restart computes no more than these again."""
    sync: Switch = False
    """Wait for the disk at every training request: nothing acknowledged is lost in a power cut either."""
    api_key: str | None = None
    """Key that clients must send; it begins with tml-. Default: $LUDIC_API_KEY."""
    api_keys: Path | None = None
    """File with lines of `name key`: each name is a tenant, which sees only its own runs and checkpoints."""
    max_runs: int = 16
    """Training runs that a tenant may have open."""
    max_rank: int = 256
    """Largest rank of an adapter."""
    max_requests: int = 4096
    """Requests of a tenant that may wait; more are answered with 429, and the SDK sends them again."""
    max_adapters: int = 32
    """Adapters that the sampler holds in memory; others are loaded again when they are asked for."""
    session_timeout_s: float = 3600.0
    """Seconds of silence after which a client's session ends."""
    token_budget: int | None = None
    """Tokens of one training pass, and of the longest row. Default: 4096, on a GPU 16384."""
    max_sequences: int | None = None
    """Completions computed at the same time."""
    max_model_len: int | None = None
    """Tokens of prompt and completion together."""
    dtype: Dtype = "auto"
    """Number format of the base model; auto is what this hardware is fast at. Adapters are float32."""
    device: str | None = None
    """cpu, cuda, cuda:1; the GPU if there is one."""
    insecure: Switch = False
    """Listen on any host without a key."""
    drain_s: float = DRAIN_S
    """Seconds that HTTP requests in progress may go on after SIGTERM or Ctrl-C."""

    def __post_init__(self) -> None:
        require_port(self.port)
        at_least(1, max_runs=self.max_runs, max_rank=self.max_rank, max_requests=self.max_requests)
        at_least(1, max_adapters=self.max_adapters, max_sequences=self.max_sequences, max_model_len=self.max_model_len)
        at_least(1, snapshot_every=self.snapshot_every)
        at_least(2, token_budget=self.token_budget)
        at_least(0, drain_s=self.drain_s)
        if not self.session_timeout_s > 0:
            raise ConfigError(f"--session-timeout-s {self.session_timeout_s:g}; it must be more than 0.")
        if self.api_key is not None and self.api_keys is not None:
            raise ConfigError("--api-key and --api-keys: give one of them.")


def serve_tinker(args: list[str]) -> int:
    """`args` without --tinker."""
    given = parse(_TinkerServeArgs, args, prog="ludic serve --tinker")
    need_extras("serve,tinker", "ludic serve --tinker")
    if given.api_keys is None:
        given = replace(given, api_key=given.api_key or os.environ.get("LUDIC_API_KEY") or None)
    has_keys = given.api_key is not None or given.api_keys is not None
    check_host(given.host, "keys" if has_keys else None, given.insecure)
    check_port(given.host, given.port)  # before a large model is loaded
    with contextlib.ExitStack() as stack:
        # Not in the coroutine: its signal handlers are not called while a model is loaded.
        run = _load(given, stack)
        asyncio.run(serve_until_stopped(run()))
    print("Stopped.")
    return 0


def _load(given: _TinkerServeArgs, stack: contextlib.ExitStack) -> Callable[[], Coroutine[Any, Any, None]]:
    """Load the model, and return what serves it."""
    import torch  # here and not above: it takes seconds, and --help should not

    from ludic.models.loading import load_model
    from ludic.run.model import find_device
    from ludic_tinker.server.app import serve
    from ludic_tinker.server.records import LOCAL_TENANT, Keys, TenantLimits
    from ludic_tinker.server.runs import TrainingBase
    from ludic_tinker.server.sampling import Offer
    from ludic_tinker.server.service import Service
    from ludic_tinker.server.storage.store import DiskStore

    keys = Keys({given.api_key: LOCAL_TENANT} if given.api_key else {})
    if given.api_keys is not None:
        keys = Keys.read(given.api_keys)
    names = tuple(given.name) or (given.model,)
    data = given.data or Path("runs", "tinker", names[0].strip("/").replace("/", "--"))
    # Before a large model is loaded: another server may have the folder.
    store = DiskStore(data, base_model=names[0], sync=given.sync, snapshot_every=given.snapshot_every)
    stack.callback(store.close)
    device = find_device(given.device)
    dtype = None if given.dtype == "auto" else getattr(torch, given.dtype)
    loaded = load_model(given.model, dtype=dtype, device=device)
    token_budget = given.token_budget or (16_384 if device.type == "cuda" else 4096)
    base = TrainingBase(loaded.model, token_budget=token_budget)
    engine = _engine(given, loaded)
    stack.callback(engine.close)
    offer = Offer(
        names=names,
        max_context=min(engine.max_total_tokens, token_budget),
        architecture=loaded.model.config.model_type,
        tokenizer_id=_tokenizer_id(given.model, loaded.tokenizer, data.absolute() / "tokenizer"),
    )

    def announce(url: str) -> None:
        print(_how_to_use(url, names[0], data, has_keys=bool(keys)), flush=True)

    async def run() -> None:
        service = Service(
            base,
            engine,
            store,
            offer,
            token_budget=token_budget,
            limits=TenantLimits(max_runs=given.max_runs, max_rank=given.max_rank, max_requests=given.max_requests),
            max_adapters=given.max_adapters,
            max_idle_s=given.session_timeout_s,
        )
        service.recover()
        await serve(
            service, keys, given.host, given.port, insecure=given.insecure, drain_s=given.drain_s, on_ready=announce
        )

    return run


def _engine(given: _TinkerServeArgs, loaded: Any) -> Any:
    """The sampler of the base model with adapters of several runs at a time."""
    from ludic.inference.local import LocalEngine
    from ludic.models.attention import NotRoutable

    try:
        return LocalEngine(
            loaded.model,
            loaded.tokenizer,
            adapters=True,
            max_sequences=given.max_sequences,
            max_model_len=given.max_model_len,
        )
    except ConfigError as error:
        if not isinstance(error.__cause__, NotRoutable):
            raise
        raise ConfigError(
            f"ludic serve --tinker cannot serve {type(loaded.model).__name__}, as adapters of several runs need the engine's block "
            f"cache: {error.__cause__.reason}."
        ) from error


def _tokenizer_id(model: str, tokenizer: Any, folder: Path) -> str | None:
    """The source from which clients load the tokenizer: the hub id, or a folder on this machine."""
    from ludic.models import SMOLLM2, TINY

    if model not in (SMOLLM2, TINY) and not Path(model).exists():
        return model
    if tokenizer is None:
        return None
    tokenizer.save_pretrained(folder)
    return str(folder)


def _how_to_use(url: str, name: str, data: Path, *, has_keys: bool) -> str:
    key = "<your key>" if has_keys else _KEY_SHOWN
    return (
        f"Tinker server of {name} at {url} (Ctrl-C stops)\n"
        f"  clients:  export TINKER_BASE_URL={url} TINKER_API_KEY={key}\n"
        f"  data:     {data}"
    )
