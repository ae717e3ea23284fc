"""`rolo` is read in one sitting, has the modules of its document, and costs little to import."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import rolo
from tests.contract.test_imports import HEAVY, ludic_imports

PACKAGE = Path(__file__).parents[1] / "rolo"


NAMES = {
    "message": "Message ToolCall",
    "rl": "State Action Env EnvBuilder Step Trajectory Reward",
    "rendering": "Renderer RenderedPrompt ToolSpec",
    "generation": "Policy Generator RolloutGenerator CompletionOutput",
    "rewards": "RewardModel",
    "model": "Model TrainingBatch UpdateResult",
    "training": "GRPOTrainer GRPOConfig compute_advantages",
    "data": "DataLoader HuggingFaceDataLoader",
    "logging": "MetricsLogger TensorBoardLogger",
    "tinker_backend": "TinkerModelConfig TinkerRenderer",
    "examples.gsm8k": "main",
    "examples.musique_search": "main",
}
"""What the document names, by module."""


def test_it_is_at_most_1100_lines_with_its_examples():
    lines = {file.name: len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    assert sum(lines.values()) <= 1100, lines


@pytest.mark.parametrize("module", NAMES)
def test_the_modules_have_the_names_of_the_document(module):
    if module == "tinker_backend":
        pytest.importorskip("tinker")
    found = importlib.import_module(f"rolo.{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_what_is_pluggable_is_a_protocol_without_base_classes():
    for name in (
        "Env",
        "EnvBuilder",
        "Renderer",
        "RewardModel",
        "Policy",
        "Model",
        "Generator",
        "DataLoader",
        "MetricsLogger",
    ):
        assert getattr(rolo, name)._is_protocol, name


def test_it_may_import_everything_but_the_command_line():
    assert not [file.name for file in PACKAGE.rglob("*.py") if "cli" in ludic_imports(file)]


def test_nothing_but_the_back_ends_loads_torch_or_the_tinker_sdk():
    modules = ["rolo", "rolo.examples.gsm8k", "rolo.examples.musique_search"]
    probe = f"import sys, {', '.join(modules)}; print({HEAVY | {'tinker'}!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"


def test_envs_know_nothing_of_tokens_and_the_loop_nothing_of_back_ends():
    """Each module imports those before it only."""
    order = [
        "message",
        "rendering",
        "rl",
        "rewards",
        "generation",
        "model",
        "data",
        "logging",
        "training",
        "library",
        "local_backend",
        "tinker_backend",
    ]
    for number, name in enumerate(order):
        lines = (PACKAGE / f"{name}.py").read_text().splitlines()
        used = {line.split()[1].removeprefix("rolo.") for line in lines if line.startswith("from rolo.")}
        assert used <= set(order[:number]), f"{name}.py reaches too far: {used}"
