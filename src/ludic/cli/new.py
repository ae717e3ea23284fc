"""`ludic new env NAME`: a package with a small working environment, its tests and its page. docs/envs/your_package.md uses it.

The files are in templates/env, where `$package`, `$distribution`, `$class_name` and `$id` stand for the names.
"""

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated, Literal

import tyro

from ludic.cli.args import parse
from ludic.types import ConfigError

_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "init.py": "src/$package/__init__.py",
    "env.py": "src/$package/env.py",
    "test.py": "tests/test_$package.py",
    "page.md": "docs/$package.md",
}
"""Template -> where the package has it."""


@dataclass(frozen=True)
class _NewArgs:
    """Make the package of a new environment: a small game that works, its tests, its page. See docs/envs/your_package.md."""

    kind: tyro.conf.Positional[Literal["env"]]
    """Kind of package."""
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Name of the package and of the env, such as my_env: small letters, digits and _."""
    into: Path = Path()
    """Folder that the package's folder is made in."""


def new(args: list[str]) -> int:
    given = parse(_NewArgs, args, prog="ludic new")
    names = _names_of(given.name)
    folder = _make_package(names, given.into)
    print(f"{folder} has an env that works, its tests and its page. Next:\n")
    print(f"  pip install -e {folder}")
    print(f"  ludic train {names['id']} --model tiny --max-tokens 1 --lr 0.003 --steps 60\n")
    print(f"The game is in {folder / 'src' / given.name / 'env.py'}: replace it with yours.")
    return 0


def _names_of(name: str) -> dict[str, str]:
    """The names in the templates; ConfigError for a name that cannot be a package's."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", name) or "__" in name:
        suggestion = (
            re.sub(r"_+", "_", re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name))).strip("_").lower()
        )
        is_better = re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", suggestion)
        raise ConfigError(
            f"{name!r} cannot be the name of the package: it begins with a small letter, and has small letters, digits and "
            f"single _ between them." + (f" Take {suggestion}?" if is_better else "")
        )
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise ConfigError(
            f"{name!r} is a word or a module of Python; a package of that name would hide it. Take another."
        )
    found = importlib.util.find_spec(name)
    if found is not None and found.origin is not None:  # a plain folder is found as well, without an origin
        raise ConfigError(f"A module {name!r} is installed already, and Python has one module per name. Take another.")
    words = [word.capitalize() for word in name.split("_")]
    distribution = name.replace("_", "-")
    return {
        "package": name,
        "distribution": distribution,
        "class_name": "".join(words if words[-1] == "Env" else [*words, "Env"]),
        "id": f"{distribution}/{name}",
    }


def _make_package(names: dict[str, str], into: Path) -> Path:
    """Write the files; returns the package's folder, which must be new or empty."""
    folder = into / names["package"]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already. Take another name, or --into another folder.")
    templates = resources.files("ludic.cli") / "templates" / "env"
    try:
        for template, place in _FILES.items():
            file = folder / Template(place).substitute(names)
            file.parent.mkdir(parents=True, exist_ok=True)
            text = (templates / f"{template}.template").read_text(encoding="utf-8")
            file.write_text(Template(text).substitute(names), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {error.filename}: {error.strerror}. Give --into a folder of yours.") from error
    return folder
