"""No file, message or model of a stranger is turned into code: what could do so is listed here, with the reason why it may stay.

A new use of pickle, `eval`, `torch.load` and the like fails until it is in the table, which is a decision for a review.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ludic.models.loading import load_model
from ludic.types import ConfigError
from tests.unit.inference.local.tiny_models import new_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    file
    for pattern in ("src", "plugins/*/ludic_*", "examples", "environments", "scripts")
    for folder in ROOT.glob(pattern)
    for file in folder.rglob("*.py")
)

MODULES = {
    "pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "yaml", "multiprocessing", "ray",
    "torch.multiprocessing", "torch.package", "torch.hub",
}  # fmt: skip
"""Modules that turn bytes into objects, or send objects as such bytes."""
BUILT_IN = {"eval", "exec", "__import__"}
METHODS = {
    "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "send_object_list", "recv_object_list",
    "load_module_from_name", "exec_module", "load_state_dict_from_url",
}  # fmt: skip
LOADERS = {"torch.load", "np.load", "numpy.load", "torch.jit.load", "pd.read_pickle", "pandas.read_pickle"}
WORDS = ("allow_pickle", "trust-remote-code", "INSECURE_SERIALIZATION", "weights_only=False")
WITHOUT_CODE = {"GenerationConfig", "PeftConfig", "PeftModel"}
"""Classes whose `from_pretrained` has no setting for code from the hub, since they never run any."""

RANKS = "ranks of one job exchange objects; a job's ports must be closed to others, as torch.distributed requires"
SANDBOX = "runs inside the sandbox, which is made for programs of strangers"
ARRAYS = "with allow_pickle=False, numpy reads plain arrays and refuses objects"
ALLOWED = {
    (
        "src/ludic/types/interfaces.py",
        "pickle",
    ): "hashes an object of this process to see whether it has changed; nothing is loaded",
    ("scripts/tutorials.py", "exec"): "runs the cells of the repository's tutorials",
    (
        "plugins/sandbox/ludic_sandbox/harbor/task.py",
        "yaml",
    ): "safe_load of a Terminal-Bench task.yaml gives plain data",
    (
        "plugins/pipeline/ludic_pipeline/launch/processes.py",
        "ray",
    ): "a cluster runs what its users send it; its ports must be closed to others",
    ("src/ludic/distributed/fsdp.py", "pickle"): f"rank 0 sends the modules of a model without weights: {RANKS}",
    ("src/ludic/distributed/fsdp.py", "all_gather_object"): RANKS,
    ("src/ludic/distributed/ranks.py", "gather_object"): RANKS,
    ("src/ludic/distributed/ranks.py", "scatter_object_list"): RANKS,
    ("src/ludic/distributed/ranks.py", "broadcast_object_list"): RANKS,
    ("src/ludic/training/checkpoint/manager.py", "all_gather_object"): RANKS,
    (
        "plugins/envs/ludic_envs/adapters/tau2.py",
        "pickle",
    ): "copies an environment of this process; the bytes never leave it",
    ("src/ludic/envs/check/contract.py", "pickle"): "copies an env of this process; the bytes never leave it",
    (
        "plugins/sandbox/ludic_sandbox/code_exec/batch.py",
        "marshal",
    ): "sends Ludic's own compiled code into the sandbox; nothing comes back so",
    (
        "plugins/sandbox/ludic_sandbox/code_exec/plain_data.py",
        "eval",
    ): f"reads a literal that Ludic wrote for it: {SANDBOX}",
    ("plugins/sandbox/ludic_sandbox/code_exec/inside/serve_tests.py", "exec"): SANDBOX,
    ("plugins/sandbox/ludic_sandbox/code_exec/inside/check_program.py", "exec"): SANDBOX,
    ("plugins/vllm/ludic_vllm/wire.py", "np.load"): ARRAYS,
    ("plugins/vllm/ludic_vllm/wire.py", "allow_pickle"): ARRAYS,
    ("src/ludic/registry.py", "exec_module"): "imports the file that a user names as their env: env.py:Class",
    (
        "plugins/sandbox/ludic_sandbox/runner/runner_process.py",
        "marshal",
    ): "starts the supervisor, which is Ludic's own code, and writes its job; nothing is read back so",
    (
        "plugins/sandbox/ludic_sandbox/runner/supervisor.py",
        "marshal",
    ): "reads the job that Ludic wrote, before the program runs",
    ("plugins/sandbox/ludic_sandbox/runner/supervisor.py", "exec"): SANDBOX,
}


def uses(file: Path) -> Iterator[str]:
    """What a file has that could run the code of a stranger."""
    text = file.read_text(encoding="utf-8")
    yield from (word for word in WORDS if word in text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_listed(alias.name))
        elif isinstance(node, ast.ImportFrom):
            if is_listed(node.module or ""):
                yield node.module or ""
            yield from (name for alias in node.names if (name := f"{node.module}.{alias.name}") in MODULES | LOADERS)
        elif isinstance(node, ast.Call):
            yield from called(node)


def is_listed(module: str) -> bool:
    return module in MODULES or module.split(".")[0] in MODULES


def called(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    if name in BUILT_IN | LOADERS or last in METHODS:
        yield last if last in METHODS else name
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if keywords.get("trust_remote_code", "False") != "False":
        yield "trust_remote_code"
    if last == "from_pretrained" and name.split(".")[-2] not in WITHOUT_CODE and "trust_remote_code" not in keywords:
        yield f"{name} without trust_remote_code=False"


def test_nothing_that_runs_the_code_of_a_stranger_is_used_without_a_reason():
    found = {(file.relative_to(ROOT).as_posix(), use) for file in SOURCES for use in uses(file)}
    new = sorted(found - ALLOWED.keys())
    assert not new, (
        f"{new}: read plain data instead (JSON, safetensors, ludic.training.checkpoint.rank_files), or give a reason in ALLOWED"
    )
    assert not sorted(ALLOWED.keys() - found), "these are gone; take them out of ALLOWED"


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import cloudpickle as c", "from torch import multiprocessing",
        "import multiprocessing.connection", "eval(text)", "torch.load(path, weights_only=True)", "from torch import load",
        "dist.recv_object_list(x)", "np.load(path)", "AutoModel.from_pretrained(x)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)", "AutoModel.from_pretrained(x, trust_remote_code=setting)",
        "command = ['--trust-remote-code']",
    ],
)  # fmt: skip
def test_a_new_use_is_noticed(tmp_path: Path, line: str):
    file = tmp_path / "new.py"
    file.write_text(f"def f(x, path, text, setting):\n    {line}\n")
    assert list(uses(file))


def test_a_model_whose_weights_are_a_pickle_is_refused(tmp_path: Path):
    model = new_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="model.safetensors"):
        load_model(tmp_path, tokenizer=object(), dtype=torch.float32, device="cpu")


def test_a_model_that_brings_its_own_code_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    ran = tmp_path / "was_run"
    (tmp_path / "code.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    (tmp_path / "config.json").write_text('{"model_type": "strange", "auto_map": {"AutoConfig": "code.Config"}}')
    with pytest.raises(ConfigError, match="Cannot load the model"):
        load_model(tmp_path, tokenizer=object(), dtype=torch.float32, device="cpu")
    assert not ran.exists()
