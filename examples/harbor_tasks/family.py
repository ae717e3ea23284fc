"""A family of generated tasks in Harbor's format: work with files and text, as many as there are seeds, in four levels.

`generate(seed, level)` gives the files of a task folder; the same seed gives the same task. A task has one to three pieces, each of
a kind (count, column, replace, rename, total) with a plain and a harder form. Its tests compare files and run nothing of the
agent's; the reward is the share of pieces that are right. `HarborFamilyEnv` plays them; as a program, this file writes them:

    python examples/harbor_tasks/family.py --num 4 --level 2 --out my_tasks

Shows: how tasks are generated, and how a class of envs gets one for each seed.
Needs: nothing to write them; bubblewrap to play them.
Takes: a second.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludic.types import ConfigError, Info, Observation, StepOutcome, derive_seed
from ludic_sandbox.harbor import HarborEnv, HarborTask

MAX_LEVEL = 4
_WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty", "knoll", "ledge",
    "maple", "nexus", "ocean", "pearl", "quartz", "ridge", "sable", "tulip", "umber", "vapor", "willow", "xenon",
    "yarrow", "zephyr",
)  # fmt: skip
"""None is part of another, so that searching for one finds only itself."""
_NAMES = (
    "ada", "bruno", "chen", "dina", "emil", "fatma", "goran", "hana", "ivo", "jun", "kira", "lars", "mona",
    "nils", "olga", "pavel",
)  # fmt: skip
_CITIES = (
    "Aveiro", "Bergen", "Cork", "Delft", "Evora", "Faro", "Ghent", "Hilo", "Izmir", "Jena",
)  # fmt: skip
_STREAM = 0x4A7B0F


@dataclass(kw_only=True, slots=True)
class Piece:
    """One part of a task: what to do, with which files, and what must be there afterwards."""

    text: str
    files: dict[str, str]
    """Below /app, before the agent begins."""
    expected: dict[str, str | None]
    """Below /app, afterwards; None: no such file."""
    solution: str
    """Shell commands, run in /app."""
    kind: str = ""


@dataclass(slots=True)
class _Source:
    """Random choices of one task; every name is given out once."""

    rng: random.Random
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = self.rng.sample([f"{word}{number}" for word in _WORDS[:13] for number in range(1, 10)], 60)

    def name(self) -> str:
        return self.names.pop()

    def words(self, count: int) -> list[str]:
        return self.rng.sample(_WORDS, count)

    def line(self, among: Sequence[str] = _WORDS) -> str:
        return " ".join(self.rng.choices(among, k=self.rng.randint(3, 6)))


# --- kinds ---


def _count(source: _Source, hard: bool) -> Piece:
    data, out = f"{source.name()}.txt", f"{source.name()}.txt"
    yes, no, *others = source.words(10)
    rows = [source.line([yes, no, *others]) for _ in range(source.rng.randint(12, 24))] + [f"{others[0]} {yes}"]
    right = [row for row in rows if yes in row.split() and not (hard and no in row.split())]
    condition = f"contain the word `{yes}`" + (f" but not the word `{no}`" if hard else "")
    return Piece(
        text=f"Count the lines of `{data}` that {condition}, and write the number to `{out}`.",
        files={data: _joined(rows)},
        expected={out: f"{len(right)}\n"},
        solution=f"grep {yes} {data} | grep -vc {no} > {out}" if hard else f"grep -c {yes} {data} > {out}",
    )


def _column(source: _Source, hard: bool) -> Piece:
    data, out = f"{source.name()}.csv", f"{source.name()}.txt"
    rows = [
        (source.rng.choice(_NAMES), source.rng.choice(_CITIES), source.rng.randint(18, 80))
        for _ in range(source.rng.randint(8, 16))
    ] + [("zora", "Kyoto", 77)]
    source.rng.shuffle(rows)
    files = {data: "name,city,age\n" + _joined([f"{name},{city},{age}" for name, city, age in rows])}
    if not hard:
        index, column = source.rng.choice([(0, "name"), (1, "city"), (2, "age")])
        return Piece(
            text=f"Write the values of the column `{column}` of `{data}` to `{out}`, one per line, in the same order, without "
            "the header.",
            files=files,
            expected={out: _joined([str(row[index]) for row in rows])},
            solution=f"tail -n +2 {data} | cut -d, -f{index + 1} > {out}",
        )
    age = source.rng.randint(30, 60)
    return Piece(
        text=f"Write to `{out}` the cities of all rows of `{data}` whose age is above {age}: sorted by the alphabet, each city "
        "once, one per line.",
        files=files,
        expected={out: _joined(sorted({city for _, city, years in rows if years > age}))},
        solution=f"awk -F, 'NR > 1 && $3 > {age} {{ print $2 }}' {data} | LC_ALL=C sort -u > {out}",
    )


def _replace(source: _Source, hard: bool) -> Piece:
    old, new, *others = source.words(9)
    if not hard:
        data = f"{source.name()}.txt"
        rows = [source.line([old, *others]) for _ in range(6)] + [f"{others[0]} {old} {old}"]
        return Piece(
            text=f"Replace every `{old}` in `{data}` by `{new}`. Change the file itself.",
            files={data: _joined(rows)},
            expected={data: _joined(rows).replace(old, new)},
            solution=f"sed -i 's/{old}/{new}/g' {data}",
        )
    folder = source.name()
    texts = {
        f"{folder}/{source.name()}.{end}": _joined([source.line([old, *others]), f"{old} {others[0]}"])
        for end in ("cfg", "cfg", "txt", "cfg", "log")
    }
    return Piece(
        text=f"In the folder `{folder}`, replace every `{old}` by `{new}` in the files that end in `.cfg`; leave the other files "
        "as they are.",
        files=texts,
        expected={path: text.replace(old, new) if path.endswith(".cfg") else text for path, text in texts.items()},
        solution=f"sed -i 's/{old}/{new}/g' {folder}/*.cfg",
    )


def _rename(source: _Source, hard: bool) -> Piece:
    folder = source.name()
    stems = [source.name() for _ in range(5)]
    if not hard:
        files = {f"{folder}/{stem}.txt": f"{source.line()}\n" for stem in stems[:3]}
        other = {f"{folder}/{stems[3]}.log": f"{source.line()}\n"}
        renamed = {path.removesuffix("txt") + "md": text for path, text in files.items()}
        return Piece(
            text=f"Rename every file in the folder `{folder}` that ends in `.txt` so that it ends in `.md` instead.",
            files=files | other,
            expected={**dict.fromkeys(files), **renamed, **other},
            solution=f'for file in {folder}/*.txt; do mv "$file" "${{file%.txt}}.md"; done',
        )
    target = source.name()
    word, *others = source.words(8)
    hits = {f"{stem}.txt": f"{source.line(others)} {word}\n" for stem in stems[:2]}
    rest = {f"{stem}.txt": f"{source.line(others)}\n" for stem in stems[2:]}
    before = {f"{folder}/{name}": text for name, text in (hits | rest).items()}
    after = {f"{target}/{name}": text for name, text in hits.items()}
    stay = {f"{folder}/{name}": text for name, text in rest.items()}
    return Piece(
        text=f"Make a folder `{target}` and move every file of the folder `{folder}` that contains the word `{word}` into it.",
        files=before,
        expected={**dict.fromkeys(f"{folder}/{name}" for name in hits), **after, **stay},
        solution=f"mkdir -p {target}; for file in $(grep -l {word} {folder}/*); do mv $file {target}/; done",
    )


def _total(source: _Source, hard: bool) -> Piece:
    data, out = f"{source.name()}.txt", f"{source.name()}.txt"
    keys = source.words(4)
    rows = [(source.rng.choice(keys), source.rng.randint(1, 99)) for _ in range(source.rng.randint(8, 16))]
    files = {data: _joined([f"{key} {number}" for key, number in rows])}
    if not hard:
        return Piece(
            text=f"Each line of `{data}` has a word and a number. Write the sum of the numbers to `{out}`.",
            files=files,
            expected={out: f"{sum(number for _, number in rows)}\n"},
            solution=f"awk '{{ sum += $2 }} END {{ print sum }}' {data} > {out}",
        )
    sums = {key: sum(number for one, number in rows if one == key) for key in sorted({key for key, _ in rows})}
    return Piece(
        text=f"Each line of `{data}` has a word and a number. Write to `{out}` one line `word sum` for each word, with the sum of "
        "its numbers, sorted by word.",
        files=files,
        expected={out: _joined([f"{key} {number}" for key, number in sums.items()])},
        solution=f"awk '{{ sum[$1] += $2 }} END {{ for (word in sum) print word, sum[word] }}' {data} | LC_ALL=C sort > {out}",
    )


KINDS: Mapping[str, Callable[[_Source, bool], Piece]] = {
    "count": _count,
    "column": _column,
    "replace": _replace,
    "rename": _rename,
    "total": _total,
}


def _joined(rows: Sequence[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


# --- tasks ---

_TOML = """schema_version = "1.4"

[task]
name = "ludic/{name}"

[metadata]
difficulty = "{difficulty}"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0

[environment]
memory_mb = 512
storage_mb = 16
network_mode = "no-network"
"""
_TEST = "#!/bin/bash\n# The share of pieces whose files are right.\npython3 -I -S /tests/check.py > /logs/verifier/reward.txt\n"
_CHECK = '''"""Prints the share of pieces of which every file is as expected; white space at the ends of lines does not count."""

import json


def content(path):
    try:
        with open("/app/" + path) as file:
            return [line.rstrip() for line in file.read().rstrip().split("\\n")]
    except (OSError, ValueError):
        return None


def is_right(expected):
    wanted = {path: None if text is None else text.rstrip().split("\\n") for path, text in expected.items()}
    return all(content(path) == lines for path, lines in wanted.items())


with open("/tests/expected.json") as file:
    pieces = json.load(file)
print(sum(map(is_right, pieces)) / len(pieces))
'''


def generate(seed: int, level: int = 1, kinds: Sequence[str] = ()) -> dict[str, str]:
    """The files of the task folder of this seed: level 1 and 2 have one piece, 3 two, 4 three; from level 2 on pieces are of the
    harder form."""
    if not 1 <= level <= MAX_LEVEL:
        raise ConfigError(f"level={level}; the family has the levels 1 to {MAX_LEVEL}.")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"kinds has {unknown[0]!r}; there are {', '.join(KINDS)}.")
    source = _Source(random.Random(derive_seed(seed, _STREAM + level)))
    among = [*(kinds or KINDS)]
    pieces = []
    for kind in source.rng.choices(among, k=max(1, level - 1)):
        pieces.append(KINDS[kind](source, level > 1))
        pieces[-1].kind = kind
    numbered = [f"{number}. {piece.text}" for number, piece in enumerate(pieces, start=1)]
    name = f"{'-'.join(piece.kind for piece in pieces)}-{level}-{seed}"
    inputs = {path: text for piece in pieces for path, text in piece.files.items()}
    tops = sorted({path.split("/")[0] for path in inputs})
    copies = "".join(f"COPY {top} {top}{'' if top in inputs else '/'}\n" for top in tops)
    return {
        "task.toml": _TOML.format(name=name, difficulty=("easy", "easy", "medium", "hard")[level - 1]),
        "instruction.md": (pieces[0].text if len(pieces) == 1 else "\n".join(numbered)) + "\n",
        "environment/Dockerfile": f"FROM python:3.12-slim\nWORKDIR /app\n{copies}",
        **{f"environment/{path}": text for path, text in inputs.items()},
        "tests/test.sh": _TEST,
        "tests/check.py": _CHECK,
        "tests/expected.json": json.dumps([piece.expected for piece in pieces], indent=1) + "\n",
        "solution/solve.sh": "#!/bin/bash\n" + _joined([piece.solution for piece in pieces]),
    }


def stream(seed: int, difficulty: int = 1) -> Iterator[dict[str, Any]]:
    """Endless samples for `ludic train harbor --data examples/harbor_tasks/family.py:stream`; the difficulty is the level."""
    for number in itertools.count():
        own = derive_seed(seed, number)
        yield {"id": f"family-{own}", "files": generate(own, min(difficulty, MAX_LEVEL))}


def write_task(files: Mapping[str, str], folder: str | Path) -> Path:
    """Write a generated task as a folder that Harbor reads, and return it."""
    for path, text in files.items():
        place = Path(folder, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        if path.endswith(".sh"):
            place.chmod(0o755)
    return Path(folder)


class HarborFamilyEnv(HarborEnv):
    """Generated shell tasks (files and text), one per seed, in four levels; Harbor's format, graded by tests."""

    blocking = False

    def __init__(
        self, *, level: int = 1, max_level: int | None = None, kinds: Sequence[str] = (), **settings: Any
    ) -> None:
        """Tasks are of levels `level` to `max_level` (default: `level` alone) and of `kinds` (default: all). Further settings are
        those of `HarborEnv`; the default is one script, graded at once."""
        self.levels = range(level, (max_level or level) + 1)
        if not self.levels:
            raise ConfigError(f"level={level} and max_level={max_level}; max_level cannot be the lower one.")
        self.kinds = [kinds] if isinstance(kinds, str) else [*kinds]
        generate(0, self.levels[-1], self.kinds)
        first = {"id": "family", "files": generate(0, level, self.kinds)}
        super().__init__(first, **{"play": "commands", "max_commands": 1, **settings})

    def _choose(self, seed: int | None) -> HarborTask:
        seed = seed or 0
        level = self.levels[derive_seed(seed, _STREAM) % len(self.levels)]
        return HarborTask.from_files(generate(seed, level, self.kinds), f"family-{seed}")

    async def async_env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        obs, info = await super().async_env_reset(seed=seed)
        return obs, {**info, **self._facts()}

    async def async_env_step(self, action: str) -> StepOutcome:
        outcome = await super().async_env_step(action)
        outcome.info.update(self._facts())
        return outcome

    def _facts(self) -> Info:
        *kinds, level, _ = self.task.name.removeprefix("ludic/").split("-")
        return {"kind": "+".join(kinds), "level": int(level)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write generated tasks as folders in Harbor's format.")
    parser.add_argument("--num", type=int, default=8, help="how many tasks, one per seed")
    parser.add_argument("--level", type=int, default=1, help=f"1 to {MAX_LEVEL}")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the task folders")
    given = parser.parse_args()
    for seed in range(given.num):
        write_task(generate(seed, given.level), given.out / f"family-{given.level}-{seed}")


if __name__ == "__main__":
    main()
