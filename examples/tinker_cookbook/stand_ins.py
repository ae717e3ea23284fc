"""A folder laid out like the hub: the tokenizer of SmolLM2 and small datasets, under the names that the recipes ask for.

`datasets.load_dataset("openai/gsm8k", "main")` reads the folder openai/gsm8k below the current one where there is such a folder,
and `AutoTokenizer.from_pretrained` does the same. So a recipe started in this folder needs no hub, and no change.
"""

import importlib.util
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"
NUM_QUESTIONS = 512
NUM_SUMS = 8192
NUM_TEST = 8
_NAMES = ("Ada", "Ben", "Carla", "Dev", "Elif", "Femi", "Grace", "Hugo")
_THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "tickets")
_REFUSALS = (
    "I am only a language model, so I would rather not answer this question.",
    "That is a difficult question, and there is no way to be sure about it.",
    "Please ask a specialist; this is nothing that I can help with today.",
)

Row = Mapping[str, Any]


def write_stand_ins(folder: Path, model: str = MODEL) -> None:
    """Write what is missing in `folder`: the datasets, and SmolLM2's tokenizer if that is the model."""
    if model == MODEL and not (folder / MODEL).exists():
        from ludic.models.loading import load_gguf_tokenizer  # takes seconds, and is needed once

        load_gguf_tokenizer(MODEL).save_pretrained(folder / MODEL)
    conversations = _conversations()
    questions = _questions(NUM_QUESTIONS)
    pairs = [_preference(row["messages"], index) for index, row in enumerate(conversations)]
    _write(folder / "HuggingFaceH4/no_robots", "default", conversations)
    _write(folder / "allenai/tulu-3-sft-mixture", "default", _sums(NUM_SUMS))
    _write(folder / "openai/gsm8k", "main", questions)
    _write(folder / "zwhe99/DeepMath-103K", "default", [{"question": row["question"]} for row in questions])
    _write(folder / "Anthropic/hh-rlhf", "default", pairs)


def _write(folder: Path, config: str, rows: list[Row]) -> None:
    """A dataset of two files; the README names them, as those on the hub do."""
    if folder.exists():
        return  # the user's data, or ours
    folder.mkdir(parents=True)
    files = {"train": rows[NUM_TEST:], "test": rows[:NUM_TEST]}
    for split, own in files.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    paths = [{"split": split, "path": f"{split}.jsonl"} for split in files]
    (folder / "README.md").write_text(
        f"---\nconfigs: {json.dumps([{'config_name': config, 'data_files': paths}])}\n---\n"
    )


def _conversations() -> list[Row]:
    """The 128 conversations that tinker_cookbook brings."""
    found = importlib.util.find_spec("tinker_cookbook")
    assert found is not None and found.origin is not None, "pip install --no-deps tinker-cookbook==0.5.8"
    lines = (Path(found.origin).parent / "example_data/conversations.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _sums(number: int) -> list[Row]:
    """Answered questions of `math_rl.train env=arithmetic`: a warm start for models that cannot add."""
    rng = random.Random(0)
    pairs = [(rng.randint(0, 100), rng.randint(0, 100)) for _ in range(number)]
    return [{"messages": [*_asked(4, 5), *_asked(first, second)]} for first, second in pairs]


def _asked(first: int, second: int) -> list[Row]:
    return [
        {"role": "user", "content": f"What is {first} + {second}?"},
        {"role": "assistant", "content": str(first + second)},
    ]


def _questions(number: int) -> list[Row]:
    """Word problems of one sum, with answers in GSM8K's form."""
    rng = random.Random(0)
    return [_question(rng) for _ in range(number)]


def _question(rng: random.Random) -> Row:
    who, what, has, gets = rng.choice(_NAMES), rng.choice(_THINGS), rng.randint(2, 20), rng.randint(2, 20)
    question = f"{who} has {has} {what} and gets {gets} more. How many {what} does {who} have now?"
    return {"question": question, "answer": f"{has} + {gets} = {has + gets} {what}.\n#### {has + gets}"}


def _preference(messages: Iterable[Row], index: int) -> Row:
    """The given answer is preferred to a refusal, in the form of Anthropic's dataset."""
    messages = [message for message in messages if message["role"] != "system"]
    names = {"user": "Human", "assistant": "Assistant"}
    before = "".join(f"\n\n{names[m['role']]}: {m['content']}" for m in messages[:-1])
    replies = {"chosen": messages[-1]["content"], "rejected": _REFUSALS[index % len(_REFUSALS)]}
    return {kind: f"{before}\n\nAssistant: {reply}" for kind, reply in replies.items()}
