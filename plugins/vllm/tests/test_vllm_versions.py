"""What Ludic uses of vLLM, compared with vLLM's sources: by parsing them, since importing vLLM takes seconds and another torch.

`make vllm` installs one release. Facts about the others were read from their wheels and are listed here; with
LUDIC_VLLM_SOURCES=FOLDER (a package folder `vllm` of a listed release) the same tests compare the list with that folder.
"""

import ast
import asyncio
import json
import os
import re
from pathlib import Path

import pytest

from ludic_vllm.command import VLLMInstall, default_flags, server_command
from ludic_vllm.inside.middlewares import WeightVersions
from ludic_vllm.versions import Release, is_listed, release_of

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "plugins" / "vllm" / "ludic_vllm"
INSIDE_VLLM = ["inside/worker.py", "inside/reload.py", "inside/logits_processor.py"]
CALLERS = [
    "client.py",
    "process.py",
    "watch.py",
    "wire.py",
    "publish/adapter.py",
    "publish/control.py",
    "generation.py",
]

NAMES = {
    "vllm.config": {"set_current_vllm_config"},
    "vllm.distributed.weight_transfer.base": {
        "WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo",
    },
    "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory"},
    "vllm.lora.lora_model": {"LoRAModel"},
    "vllm.lora.model_manager": {"LoRAModelManager"},
    "vllm.lora.peft_helper": {"PEFTHelper"},
    "vllm.lora.request": {"LoRARequest"},
    "vllm.lora.utils": {"parse_fine_tuned_lora_name"},
    "vllm.model_executor.layers.attention": {"Attention", "MLAAttention"},
    "vllm.model_executor.layers.vocab_parallel_embedding": {"ParallelLMHead", "VocabParallelEmbedding"},
    "vllm.model_executor.model_loader.reload": {"finalize_layerwise_reload", "initialize_layerwise_reload"},
    "vllm.model_executor.model_loader.reload.layerwise": {
        "_layerwise_process", "_place_kernel_tensors", "get_layerwise_info",
    },
    "vllm.model_executor.model_loader.reload.meta": {"SKIP_TENSORS", "materialize_layer"},
    "vllm.model_executor.model_loader.reload.utils": {"get_layer_size", "get_layer_tensors"},
    "vllm.sampling_params": {"SamplingParams"},
    "vllm.tokenizers": {"cached_tokenizer_from_config"},
    "vllm.v1.sample.logits_processor": {"AdapterLogitsProcessor"},
    "vllm.version": {"__version__"},
}  # fmt: skip
"""Every name that Ludic imports; all of them are in vLLM 0.26.0 and in 0.32.0."""

PATHS = {
    "/health", "/v1/models", "/v1/completions", "/inference/v1/generate", "/collective_rpc", "/get_world_size", "/pause", "/resume",
    "/abort_requests", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/is_sleeping", "/sleep", "/wake_up",
}  # fmt: skip
"""Paths that Ludic calls and every listed release serves."""
NEW_PATHS = {"/weight_info", "/update_weight_version"}
"""Those of releases with weight versions; `WeightVersions` serves them before an older one."""

MEMBERS = {
    "lora/worker_manager.py": {"_load_adapter", "_adapter_manager", "add_adapter", "remove_adapter", "list_adapters"},
    "lora/model_manager.py": {"lora_index_to_id", "get_adapter", "packed_modules", "modules", "model"},
    "lora/lora_weights.py": {"lora_a", "lora_b"},
    "lora/peft_helper.py": {"from_local_dir", "vllm_lora_scaling_factor"},
    "lora/request.py": {"load_inplace"},
    "model_executor/model_loader/reload/types.py": {"can_load", "kernel_tensors", "load_numel", "loaded_weights", "reset"},
    "v1/worker/gpu_worker.py": {"weight_transfer_engine", "_weight_update_active", "model_runner"},
    "v1/worker/lora_model_runner_mixin.py": {"lora_manager"},
    "config/parallel.py": {"data_parallel_index", "world_size", "rank"},
    "config/lora.py": {"max_lora_rank"},
    "entrypoints/openai/completion/protocol.py": {"return_token_ids", "vllm_xargs", "include_stop_str_in_output"},
    "engine/arg_utils.py": {
        "--generation-config", "--logprobs-mode", "--worker-extension-cls", "--weight-transfer-config", "--logits-processors",
        "--kv-cache-memory-bytes", "--enable-lora", "--max-lora-rank", "--max-model-len", "--gpu-memory-utilization",
        "--enable-sleep-mode",
    },
}  # fmt: skip
"""Attributes, fields and flags, by the file that has them in every listed release."""


def installed() -> list[Path]:
    made = [path.parent for path in (ROOT / ".venv-vllm").glob("lib/python*/site-packages/vllm/version.py")]
    return made + [Path(place) for place in filter(None, os.environ.get("LUDIC_VLLM_SOURCES", "").split(os.pathsep))]


@pytest.fixture(params=installed() or [None], ids=str)
def sources(request) -> Path:
    if request.param is None:
        pytest.skip("no vLLM here: `make vllm` installs one")
    return request.param


def release_in(sources: Path) -> Release:
    return release_of(re.findall(r"__version__ = version = '(.+)'", (sources / "_version.py").read_text())[0])


def file_of(sources: Path, module: str) -> Path:
    place = sources.parent.joinpath(*module.split("."))
    return place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"


def defined(file: Path) -> set[str]:
    """Names at any level of a module: definitions, imports, assignments, fields, attributes of self."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Attribute(attr=name) | ast.Name(id=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
            case ast.Constant(value=str(text)):
                found.add(text)
    return found


def routes(sources: Path) -> set[str]:
    texts = (path.read_text() for path in (sources / "entrypoints").rglob("*.py"))
    return {path for text in texts for path in re.findall(r"router\.(?:get|post)\(\s*\"(/[^\"]*)\"", text)}


def imports_of(file: Path) -> dict[str, set[str]]:
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return {
        str(node.module): {alias.name for alias in node.names} for node in nodes if str(node.module).startswith("vllm.")
    }


def test_the_list_has_every_name_that_ludic_imports_from_vllm():
    used: dict[str, set[str]] = {}
    for file in INSIDE_VLLM:
        for module, names in imports_of(PACKAGE / file).items():
            used[module] = used.get(module, set()) | names
    assert used == NAMES, "look the name up in the sources of every listed release, then list it here"


def test_the_list_has_every_path_that_ludic_calls():
    texts = {
        node.value
        for file in CALLERS
        for node in ast.walk(ast.parse((PACKAGE / file).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    called = {text for text in texts if re.fullmatch(r"(/\w+)+", text) and text not in ("/proc", "/stat", "/v1")}
    assert called == PATHS | NEW_PATHS, "look the path up in the sources of every listed release, then list it here"


def test_vllm_has_every_name_that_is_used(sources):
    for module, names in NAMES.items():
        assert names <= defined(file_of(sources, module)), f"{module} of {sources}"
    for file, names in MEMBERS.items():
        assert names <= defined(sources / file), f"{file} of {sources}"


def test_vllm_serves_every_path_that_is_called(sources):
    release = release_in(sources)
    assert routes(sources) >= PATHS
    assert (routes(sources) & NEW_PATHS == NEW_PATHS) is release.has_weight_versions


def test_the_row_of_a_release_is_what_its_sources_say(sources):
    release = release_in(sources)
    assert file_of(sources, release.entry_point).exists()
    assert release.rename_mapper in defined(sources / "model_executor/models/utils.py")
    assert ("get_rank_and_scaling" in defined(sources / "lora/peft_helper.py")) is release.reads_lora_patterns
    newer = "vllm.v1.worker.gpu.sample.logits_processor.interface"
    assert release.batch_processor == (newer if file_of(sources, newer).exists() else None)
    flags = {text for path in (sources / "entrypoints").rglob("*.py") for text in re.findall(r"\w+", path.read_text())}
    assert ("enable_scale_out" in flags) is (release.generate_flag == "--enable-scale-out")
    answer = (sources / "entrypoints/scale_out/token_in_token_out/protocol.py").read_text()
    assert ("weight_versions" in answer) is release.has_weight_versions
    updates = (
        (sources / "v1/worker/gpu_worker.py").read_text().split("def update_weights(", 1)[1].split("\n    def ")[0]
    )
    assert ("set_current_vllm_config" in updates) is release.configures_updates


def test_abstract_methods_of_a_transfer_engine_are_all_defined(sources):
    """A missing one would end the server when it makes the engine."""
    (base,) = (
        node
        for node in ast.parse((sources / "distributed/weight_transfer/base.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "WeightTransferEngine"
    )
    wanted = {
        method.name
        for method in base.body
        if isinstance(method, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "abstractmethod" for d in method.decorator_list)
    }
    ours = ast.parse((PACKAGE / "inside/worker.py").read_text())
    (engine,) = (node for node in ours.body if isinstance(node, ast.ClassDef) and node.name == "LudicTransfer")
    assert wanted <= {node.name for node in engine.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("version", "first", "listed"),
    [
        ("0.26.0", (0, 26), True),
        ("0.26.1+cu129", (0, 26), True),
        ("0.31.9", (0, 26), False),
        ("0.32.0", (0, 32), True),
        ("0.33.0", (0, 32), False),
        ("1.0", (0, 32), False),
        ("0.9.2", (0, 26), False),
    ],
)
def test_a_version_gets_the_row_of_its_release_or_of_the_one_before(version, first, listed):
    assert release_of(version).first == first and is_listed(version) is listed


# --- what the switch does ---


def command_for(version: str, folder: Path):
    install = VLLMInstall(python=Path("/usr/bin/python3"), version=version, is_cpu=False)
    return server_command(install, "m", host="127.0.0.1", port=1, flags=[], run_folder=folder), install


def test_an_older_vllm_is_started_by_its_entry_point_with_flags_it_knows(tmp_path):
    command, install = command_for("0.26.0", tmp_path)
    assert command.arguments[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    assert "--enable-scale-out" not in default_flags(install, [])
    middlewares = [
        after for flag, after in zip(command.arguments, command.arguments[1:], strict=False) if flag == "--middleware"
    ]
    assert [name.rpartition(".")[2] for name in middlewares] == ["WeightVersions", "ControlGuard"]


def test_a_vllm_with_weight_versions_keeps_its_own(tmp_path):
    command, install = command_for("0.32.0", tmp_path)
    assert command.arguments[1:3] == ("-m", "vllm.entrypoints.launchers.api_server.entry")
    assert "--enable-scale-out" in default_flags(install, [])
    assert not any("WeightVersions" in argument for argument in command.arguments)


class OlderVLLM:
    """An ASGI application that answers `status` to all requests, and keeps what it saw."""

    def __init__(self) -> None:
        self.status = 200
        self.seen: list[tuple[str, bytes]] = []

    async def __call__(self, scope, receive, send) -> None:
        self.seen.append((scope["path"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def ask(app, method: str, path: str, *parts: bytes) -> tuple[int, dict]:
    incoming = [{"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)]
    sent: list[dict] = []

    async def receive():
        return incoming.pop(0) if incoming else {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    asyncio.run(app({"type": "http", "method": method, "path": path}, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_versions_begin_with_a_finished_update_and_survive_a_failed_one():
    inner = OlderVLLM()
    app = WeightVersions(inner)
    assert ask(app, "GET", "/weight_info") == (200, {"weight_version": "default"})
    assert ask(app, "POST", "/finish_weight_update", b'{"weight_', b'version": "7"}')[0] == 200
    assert inner.seen == [("/finish_weight_update", b'{"weight_version": "7"}')], "vLLM gets the whole body"
    assert ask(app, "GET", "/weight_info") == (200, {"weight_version": "7"})
    inner.status = 500
    assert ask(app, "POST", "/finish_weight_update", b'{"weight_version": "8"}')[0] == 500
    assert ask(app, "GET", "/weight_info")[1] == {"weight_version": "7"}


def test_a_version_can_be_set_alone_and_other_requests_pass():
    inner = OlderVLLM()
    app = WeightVersions(inner)
    answered = ask(app, "POST", "/update_weight_version", b'{"new_version": "3"}')
    assert answered == (200, {"success": True, "new_version": "3"}) and inner.seen == []
    assert ask(app, "POST", "/update_weight_version", b"[1]")[0] == 400
    assert ask(app, "GET", "/weight_info")[1] == {"weight_version": "3"}
    assert ask(app, "POST", "/v1/completions", b"x") == (200, {}) and inner.seen == [("/v1/completions", b"x")]
