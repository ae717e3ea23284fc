"""Publish a LoRA adapter to vLLM servers without its base: megabytes instead of gigabytes.

The control plane's order: check limits, base and name; try the adapter while generation continues; pause all servers at a
token boundary; replace the adapter; compare the received values; set the new version; empty prefix caches; resume.
"""

import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.types import ConfigError, MissingExtra
from ludic_vllm.publish.broadcast import BroadcastPolicyPublisher
from ludic_vllm.publish.control import ControlClient, PauseMode, VllmControlPlane, misfit
from ludic_vllm.publish.transfer import Bucket, WeightMetadata

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_ADVICE = "Publish merged weights instead: create_vllm_publisher(client)."
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""The others (PiSSA, OLoRA, CorDA, LoftQ) change the base too, so the server's base would differ from the trainer's."""
_UNSERVED = {
    "modules_to_save": "whole modules that are trained beside it",
    "trainable_token_indices": "trained embeddings of single tokens",
    "target_parameters": "LoRA on parameters instead of modules",
    "use_dora": "DoRA",
    "lora_bias": "a bias in LoRA's second matrix",
    "layer_replication": "layers that are repeated",
    "alora_invocation_tokens": "activated LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "arrow_config": "Arrow routing",
}
"""peft settings that change what an adapter computes and that vLLM does not support."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Allowed values of vLLM's --max-lora-rank."""


class AdapterControlPlane(VllmControlPlane):
    """Directs all servers of a client through one change of one adapter, over HTTP."""

    def __init__(
        self,
        client: ControlClient,
        name: str,
        base: Mapping[str, Tensor],
        *,
        pause: PauseMode = "keep",
        timeout_s: float = 600.0,
        wait_s: float = 120.0,
    ) -> None:
        """`base`: the frozen weights, which the servers must serve too."""
        super().__init__(client, pause=pause, timeout_s=timeout_s, wait_s=wait_s)
        self._name, self._base = name, base
        self._link = self._path = ""
        """Path under which the adapter was registered, and path last loaded."""

    def require_fits(self, metadata: Sequence[WeightMetadata]) -> None:
        self._wait_for_servers()
        self._require_rank(max(part.shape[0] for part in metadata if _is_first_matrix(part.name)))
        new = self._without_adapter()
        if new:
            self._require_base(new)
            self._require_free_name(new)

    def announce_update_batch(self, metadata: Sequence[WeightMetadata], version: int) -> None:
        self._paused = self.servers
        self._post("/pause", params={"mode": self._pause})

    def finalize_update(self, version: int, checksums: Mapping[str, int]) -> None:
        received = self._ask_workers("ludic_received_adapter", [self._name, self._path, list(checksums)])
        self._compare(checksums, received)
        self._post("/update_weight_version", {"new_version": str(version)})
        self._empty_prefix_caches()
        self._post("/resume")
        self._loading, self._paused = False, []

    def try_adapter(self, path: Path) -> None:
        """Before the pause: check that every server can load the adapter completely."""
        for server, workers in self._ask_workers("ludic_try_adapter", [str(path)]).items():
            left_out = set(workers[0]).intersection(*workers)  # with pipeline parallelism each worker has some layers
            if left_out:
                raise ConfigError(
                    f"{server} has no place for a part of the adapter, such as {min(left_out)}. Start it without "
                    "--lora-target-modules, or train an adapter without that module."
                )

    def load_adapter(self, link: Path, path: Path) -> None:
        """`link`: the path from which a server reloads an evicted adapter; `path`: what it reads now."""
        self._loading, self._link, self._path = True, str(link), str(path)
        without, paths = self._without_adapter(), self._registered_paths()
        new = [server for server in self.servers if server in without or paths[server] != self._link]
        old = [server for server in self.servers if server not in new]
        if new:
            self._unregister([server for server in new if paths[server] is not None])
            self._register(new)
        if old:
            self._ask_workers("ludic_replace_adapter", [self._name, self._path], servers=old)

    def _register(self, servers: Sequence[str]) -> None:
        before = self._ask_workers("ludic_adapter_ids", servers=servers)
        self._post("/v1/load_lora_adapter", {"lora_name": self._name, "lora_path": self._link}, servers=servers)
        for server in servers:
            self._ask_workers("ludic_adopt_adapter", [self._name, before[server][0]], servers=[server])

    def _unregister(self, servers: Sequence[str]) -> None:
        """Remove an adapter of another trainer: its folder may be gone, and an old request would make the server read it."""
        if servers:
            self._post("/abort_requests", {}, servers=servers)
            self._post("/v1/unload_lora_adapter", {"lora_name": self._name}, servers=servers)

    def _registered_paths(self) -> dict[str, str | None]:
        """The path from which each server would reload the adapter; None if it is not registered."""
        listed = {server: answer["data"] for server, answer in self._get("/v1/models").items()}
        return {
            server: next((card["root"] for card in cards if card["id"] == self._name), None)
            for server, cards in listed.items()
        }

    def _without_adapter(self) -> list[str]:
        """Servers that have never had the adapter, or were restarted since."""
        answers = self._ask_workers("ludic_adopted")
        return [server for server, workers in answers.items() if not all(self._name in names for names in workers)]

    def _require_rank(self, rank: int) -> None:
        flags = f"--enable-lora --max-lora-rank {fitting_rank(rank)}"
        for server, (limits, *_) in self._ask_workers("ludic_lora_limits").items():
            if limits is None:
                raise ConfigError(f"{server} runs without LoRA and cannot take an adapter. Start it with {flags}.")
            if rank > limits["max_rank"]:
                raise ConfigError(
                    f"The adapter has rank {rank}, but {server} takes at most {limits['max_rank']}. Start it with {flags}."
                )

    def _require_base(self, servers: Sequence[str]) -> None:
        """An adapter is valid only for the base it was trained on."""
        shapes = {name: list(weight.shape) for name, weight in self._base.items()}
        for server, workers in self._ask_workers("ludic_parameters", servers=servers).items():
            problem = misfit(shapes, workers[0])
            if problem:
                raise ConfigError(f"The adapter's base is not the model that {server} serves: {problem}")
        for server, workers in self._ask_workers("ludic_base_values", [shapes], servers=servers).items():
            wrong = [name for worker in workers for name in differing(self._base, worker)]
            if wrong:
                raise ConfigError(
                    f"The adapter's base is not the model that {server} serves: {wrong[0]} has other values there. Start the "
                    "server with the base model of the training, without a merged adapter."
                )

    def _require_free_name(self, servers: Sequence[str]) -> None:
        for server, path in self._registered_paths().items():
            if server in servers and path not in (None, self._link):
                raise ConfigError(
                    f"{server} already has a model named {self._name!r}, {path}, which no publisher registered. Give the publisher "
                    "another name=."
                )


def fitting_rank(rank: int) -> int:
    """The --max-lora-rank that a server needs for an adapter of this rank."""
    fitting = next((limit for limit in _RANKS if limit >= rank), None)
    if fitting is None:
        raise ConfigError(f"The adapter has rank {rank}, but vLLM serves at most {_RANKS[-1]}.")
    return fitting


class AdapterFolder:
    """The communicator of an adapter push: one subfolder per version, and a link under the adapter's name to the newest.

    A server that evicts an adapter (it holds few, and all its weights may have been replaced) reloads it at the next request
    from the path under which it was registered, so that path is the link.
    """

    rank = 0
    keeps_weights = True

    def __init__(
        self, control: AdapterControlPlane, name: str, write: Callable[[Path], None], folder: str | Path | None = None
    ) -> None:
        """`folder`: by default a temporary one, removed with the trainer."""
        self._control, self._name, self._write = control, name, write
        if folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ludic-adapters-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        else:
            self._folder = Path(folder).absolute()
        if not self._folder.is_dir():
            raise ConfigError(f"folder={str(folder)!r} is not a folder. Create it on a disk that every server sees.")
        self._versions: list[Path] = []

    def stage(self, buckets: Sequence[Bucket], weights: Mapping[str, Tensor]) -> None:
        path = Path(tempfile.mkdtemp(prefix=f"{self._name}-", dir=self._folder))
        self._versions.append(path)
        self._write(path)
        self._control.require_readable(
            [str(path / file) for file in (WEIGHTS, CONFIG)],
            f"Give a folder= that it sees under the same path as this machine (now {self._folder}).",
        )
        self._control.try_adapter(path)

    def broadcast(self, bucket: Bucket, weights: Mapping[str, Tensor], src_rank: int) -> None:
        """All buckets are in one folder, loaded at once by `barrier`."""

    def barrier(self) -> None:
        link = self._folder / self._name
        new = self._folder / f".{self._name}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(self._versions[-1].name, target_is_directory=True)
        new.replace(link)  # atomic: the link always has a target
        self._control.load_adapter(link, self._versions[-1])

    def release(self) -> None:
        """Remove old versions, also after a failure; never the one that the link points to."""
        served = (self._folder / self._name).resolve()
        for path in self._versions[:-2]:  # the version before is served until every server has the new one
            if path != served:
                shutil.rmtree(path)
        self._versions = [path for path in self._versions if path.exists()]


class VllmAdapterPublisher:
    """Sends the active adapter of `model`, a peft model; requests name it (`model="policy"`) instead of the base.

    `BroadcastPolicyPublisher` orders the push, retries and compares; `AdapterControlPlane` directs the servers; the files are in
    an `AdapterFolder`.
    """

    def __init__(
        self,
        client: ControlClient,
        model: Any,
        *,
        name: str = "policy",
        folder: str | Path | None = None,
        pause: PauseMode = "keep",
        timeout_s: float = 600.0,
        wait_s: float = 120.0,
        attempts: int = 2,
    ) -> None:
        """The servers run with --enable-lora and serve the base of `model`.

        `folder`: on a disk that every server sees under the same path; the default, a temporary one, fits servers on this
        machine that do not outlive the trainer. The others as for `create_vllm_publisher`.
        """
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ConfigError(f"name={name!r}; use letters, digits and . _ -")
        require_servable(model)
        self.name = name
        self._model = model
        control = AdapterControlPlane(
            client, name, base_parameters(model), pause=pause, timeout_s=timeout_s, wait_s=wait_s
        )
        files = AdapterFolder(control, name, self._write, folder)
        self._push = BroadcastPolicyPublisher(control, files, attempts=attempts)

    def publish(self, state_dict: Mapping[str, Tensor], version: int | None = None) -> None:
        """Send the current adapter; `state_dict` must be empty."""
        if state_dict:
            raise ConfigError(
                f"{len(state_dict)} weights were given, but this publisher sends only its own model's adapter: call "
                "publish({}, version). For all weights use create_vllm_publisher(client)."
            )
        self._push.publish(read_adapter(self._model).tensors, version)

    def is_current(self, version: int) -> bool:
        """Return True if every server has this version from this publisher. A restarted or stopped server has not."""
        return self._push.is_current(version)

    def publish_again(self) -> bool:
        """Send the last version to servers that were restarted; False if there is none."""
        return self._push.publish_again()

    def require_trained(self, model: Any) -> None:
        """Raise if another model is trained: this publisher would send an unchanged adapter again and again."""
        if model is not self._model:
            raise ConfigError(
                "This VllmAdapterPublisher was made for another model than the trained one, so the served adapter would never "
                "change. Give both the same peft model."
            )

    def _write(self, folder: Path) -> None:
        read_adapter(self._model).write(folder)


# --- the adapter of a peft model: vLLM silently ignores weights that were trained outside it --------------------


@dataclass(frozen=True, slots=True)
class _PeftAdapter:
    """The tensors and settings that a server needs in addition to the base."""

    config: Any
    """peft's LoraConfig."""
    tensors: Mapping[str, Tensor]
    """Keyed by peft's names in files."""

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(tensor.shape[0] for name, tensor in self.tensors.items() if _is_first_matrix(name))

    def write(self, folder: Path) -> None:
        """Write the files of `save_pretrained`, without the model card."""
        from safetensors.torch import save_file

        save_file({name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}, folder / WEIGHTS)
        self.config.save_pretrained(str(folder))


def _is_first_matrix(name: str) -> bool:
    """Return True if a tensor is the A of an adapter's B·A, whose number of rows is the rank."""
    return name.endswith((".lora_A.weight", ".lora_embedding_A"))


def read_adapter(model: Any) -> _PeftAdapter:
    """The current values of the active adapter; ConfigError if vLLM cannot serve it."""
    from peft import get_peft_model_state_dict

    require_servable(model)
    (name,) = model.active_adapters
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return _PeftAdapter(model.peft_config[name], {key: tensor.detach() for key, tensor in tensors.items()})


def require_servable(model: Any) -> None:
    problem = problem_with(model)
    if problem is not None:
        raise ConfigError(f"The adapter alone cannot be published: {problem}. {_ADVICE}")


def problem_with(model: Any) -> str | None:
    """Why the adapter alone does not hold everything that is trained, or vLLM cannot serve it; None if all is well."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingExtra("lora", "publishing an adapter") from error
    if not isinstance(model, PeftModel):
        return f"{type(model).__name__} has no adapter; wrap the model with peft.get_peft_model first"
    configs = model.peft_config
    learned_prompts = [name for name, config in configs.items() if config.is_prompt_learning]
    if learned_prompts:
        return f"{learned_prompts} are learned prompts, but vLLM serves LoRA only"
    if len(model.active_adapters) != 1:
        return f"{len(model.active_adapters)} adapters are active ({model.active_adapters}), but a request names one"
    return _problem_in(configs[model.active_adapters[0]].to_dict()) or _trained_beside(model)


def _problem_in(config: Mapping[str, Any]) -> str | None:
    """The same check, from the settings alone."""
    kind = str(config["peft_type"]).rpartition(".")[2]
    if kind != "LORA":
        return f"it is of the kind {kind}, but vLLM serves LoRA only"
    for setting, meaning in _UNSERVED.items():
        if config.get(setting):
            return f"it has {setting}={config[setting]!r} ({meaning}), which vLLM does not serve"
    if config["bias"] != "none":
        return f"it has bias={config['bias']!r}, so biases of the base are trained too, which vLLM does not serve"
    init = config["init_lora_weights"]
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        return f"it has init_lora_weights={init!r}, which changes the base model, but the server has the original base"
    return None


def _trained_beside(model: Any) -> str | None:
    others = [name for name, weight in model.named_parameters() if weight.requires_grad and ".lora_" not in name]
    if not others:
        return None
    return f"{len(others)} weights outside it are trained too, such as {others[0].removeprefix(_PREFIX)}"


def base_parameters(model: Any) -> dict[str, Tensor]:
    """The frozen weights, by their names in the model without an adapter."""
    named = ((name, weight) for name, weight in model.named_parameters() if ".lora_" not in name)
    return {name.removeprefix(_PREFIX).replace(".base_layer.", "."): weight.detach() for name, weight in named}


def differing(ours: Mapping[str, Tensor], theirs: Mapping[str, list[float]]) -> list[str]:
    """Names of weights whose first values differ by more than half precision explains."""

    def is_other(name: str, values: list[float]) -> bool:
        own = ours[name].reshape(-1)[: len(values)].float().cpu()
        return not torch.allclose(own, torch.tensor(values), rtol=2e-2, atol=2e-2 * float(own.abs().max()))

    return [name for name, values in theirs.items() if is_other(name, values)]
