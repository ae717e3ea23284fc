"""requirements/*.txt: every package with its version and its hashes, and everything that pyproject.toml asks for.

CI installs from these files with `--require-hashes` (`make test LOCKED=1`), so that they can be installed is seen
there. Here: that they are whole, and not older than pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lock import EXTRAS, of_environments

ROOT = Path(__file__).parents[2]
FILES = ["build.txt", "main.txt", "pip.txt", "torch.txt", "uv.txt", "vllm.txt"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked(name: str) -> list[tuple[Requirement, list[str]]]:
    """Packages of a file, and of the files that it includes, with the hashes of each."""
    found: list[tuple[Requirement, list[str]]] = []
    text = re.sub(r"^#.*\n", "", (ROOT / "requirements" / name).read_text(), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("-r "):
            found += locked(line.removeprefix("-r ").strip())
        else:
            package, *hashes = line.split("--hash=")
            found.append((Requirement(package), [each.strip() for each in hashes]))
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_package_has_one_version_and_its_hashes(name):
    packages = locked(name)
    assert packages
    for requirement, hashes in packages:
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), requirement


@pytest.mark.parametrize("name", ["main.txt", "vllm.txt"])
def test_no_package_of_cuda_is_locked_beside_the_cpu_build_of_torch(name):
    names = {canonicalize_name(requirement.name) for requirement, _ in locked(name)}
    assert "torch" in names and not {each for each in names if each.startswith(("nvidia-", "cuda-", "triton"))}


def wanted() -> list[Requirement]:
    """What the locked environment is for: Ludic, its extras of `make test`, environments/, and the pins of constraints.txt."""
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *of_environments()]
    todo = list(EXTRAS)
    while todo:
        for text in extras[todo.pop()]:
            requirement = Requirement(text)
            if requirement.name == PROJECT["project"]["name"]:
                todo += sorted(requirement.extras)
            else:
                asked.append(text)
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "requirements" / "no_deps.in").read_text()
    asked += [line for line in pins.splitlines() if line and not line.startswith("#")]
    return [Requirement(text) for text in asked]


def versions(name: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for requirement, _ in locked(name):
        version = str(requirement.specifier).removeprefix("==")
        found.setdefault(canonicalize_name(requirement.name), set()).add(version)
    return found


def test_the_locked_versions_are_what_the_project_asks_for():
    there = versions("main.txt")
    for requirement in wanted():
        found = there.get(canonicalize_name(requirement.name))
        assert found, f"{requirement} is not in requirements/main.txt: run `make lock`"
        assert all(requirement.specifier.contains(version, prereleases=True) for version in found), (requirement, found)


def test_what_builds_is_locked_in_the_versions_that_run():
    there, builders = versions("main.txt"), versions("build.txt")
    for text in PROJECT["build-system"]["requires"]:
        requirement = Requirement(text)
        assert all(requirement.specifier.contains(version) for version in builders[canonicalize_name(requirement.name)])
    assert {name: found for name, found in builders.items() if name in there and there[name] != found} == {}


def test_every_pin_of_the_vllm_environment_is_locked():
    lines = (ROOT / "requirements" / "vllm.in").read_text().splitlines()
    pins = {line for line in lines if line and not line.startswith("#")}
    there = {f"{name}=={version}" for name, found in versions("vllm.txt").items() for version in found}
    assert {f"{canonicalize_name(p.split('==')[0])}=={p.split('==')[1]}" for p in pins} == there - {
        "torch==2.13.0+cpu", "torch==2.13.0",
    }  # fmt: skip


def test_make_installs_from_the_locks_when_asked_and_ci_asks():
    makefile = (ROOT / "Makefile").read_text()
    assert "make test LOCKED=1" in (ROOT / ".ci" / "run").read_text()
    assert "$(HASHED) -r requirements/pip.txt" in makefile and "$(HASHED) -r requirements/uv.txt" in makefile
    assert "--require-hashes" in makefile and "$(HASHED) -r requirements/main.txt" in makefile
    assert "$(HASHED) -r requirements/vllm.txt" in makefile
    assert "--no-deps --no-build-isolation -e . $(ENVIRONMENTS)" in makefile


def test_every_extra_ends_at_the_torch_that_is_tested_and_the_pages_install_its_cpu_build_first():
    (tested,) = re.findall(r"^torch==(\d+)\.(\d+)\.\d+$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    major, minor = map(int, tested)
    extras = [Requirement(text) for texts in PROJECT["project"]["optional-dependencies"].values() for text in texts]
    asked = [requirement for requirement in extras if requirement.name == "torch"]
    assert asked
    for requirement in asked:
        assert requirement.specifier.contains(f"{major}.{minor}.9"), requirement
        assert not requirement.specifier.contains(f"{major}.{minor + 1}.0"), requirement
    for page in (ROOT / "README.md", ROOT / "docs" / "install.md"):
        text = page.read_text()
        cpu = re.search(
            rf"pip install torch=={major}\.{minor}\.\d+ --index-url https://download.pytorch.org/whl/cpu", text
        )
        assert cpu and cpu.start() < text.index("ludic-rl[train] @ git+"), page
