"""A task folder in Harbor's format, or in Terminal-Bench's older one, read into plain data.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh      Harbor
    task.yaml  Dockerfile  run-tests.sh  tests/  solution.sh                                Terminal-Bench

Nothing is run here. `HarborTask.needs` names what the task asks for beyond a folder, a shell and its tests; a workspace refuses
what it does not have (ludic_sandbox.harbor.workspace).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ludic.types import ConfigError
from ludic.util.files import parse_toml
from ludic_sandbox.harbor.dockerfile import Need, Setup, read_dockerfile

Format: TypeAlias = Literal["harbor", "terminal-bench"]
TEST_TIMEOUT_S = 600.0
"""Harbor's default for the tests; it has none for the agent."""
_MAX_BYTES = 64 << 20
_TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}


@dataclass(frozen=True, kw_only=True, slots=True)
class HarborTask:
    """One task: what the agent is told, what its workspace holds, and how it is graded."""

    name: str
    format: Format
    instruction: str
    setup: Setup
    tests: Mapping[str, bytes]
    """Files of /tests, by relative path; written there after the agent has ended."""
    test_script: str
    """The one of them that is run."""
    solution: Mapping[str, bytes]
    """Files of /solution; empty if the task has none."""
    solution_script: str | None
    agent_timeout_s: float | None
    test_timeout_s: float
    memory_mb: int | None
    storage_mb: int | None
    test_env: Mapping[str, str]
    solution_env: Mapping[str, str]
    needs: tuple[Need, ...]
    image: str | None = None
    """A prebuilt image, for container workspaces."""
    context: Mapping[str, bytes] | None = None
    """The Dockerfile and the files next to it, for container workspaces; None without a Dockerfile."""

    @classmethod
    def read(cls, folder: str | Path, variables: Mapping[str, str] | None = None) -> "HarborTask":
        """Read a task folder. `variables` are values for ${NAME} in task.toml; the host's environment is not read."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"There is no task folder {folder}.")
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        if (size := sum(path.stat().st_size for path in paths)) > _MAX_BYTES:
            raise ConfigError(
                f"The task {folder} has {size >> 20} MB of files; at most {_MAX_BYTES >> 20} MB are read."
            )
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return cls.from_files(files, folder.resolve().name, variables)

    @classmethod
    def from_files(
        cls, files: Mapping[str, bytes | str], name: str, variables: Mapping[str, str] | None = None
    ) -> "HarborTask":
        """A task from the files of its folder, by relative path."""
        content = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
        if "task.toml" in content:
            return _harbor(content, name, variables or {})
        if "task.yaml" in content:
            return _terminal_bench(content, name)
        raise ConfigError(
            f"The task {name} has neither task.toml (Harbor) nor task.yaml (Terminal-Bench), but {_some(content)}."
        )

    def check(self, has: Sequence[str], ignore: Sequence[str], workspace: str) -> None:
        """Raise ConfigError if the task needs what is neither in `has` nor in `ignore`."""
        missing = [need for need in self.needs if need.name not in (*has, *ignore)]
        if not missing:
            return
        names = sorted({need.name for need in missing})
        raise ConfigError(
            f"The task {self.name} needs what the workspace {workspace!r} does not have: {'; '.join(map(str, missing))}. "
            f"Use workspace='podman' (RUN, FROM, USER and network work there), or, if the task can do without, ignore={names}."
        )


def find_tasks(folder: str | Path) -> list[Path]:
    """The task folders at or directly below `folder`, by name."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder} with tasks.")
    candidates = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    found = [path for path in candidates if (path / "task.toml").exists() or (path / "task.yaml").exists()]
    if not found:
        raise ConfigError(f"{folder} is no task and has none directly below it: no task.toml or task.yaml was found.")
    return found


# --- Harbor ---


def _harbor(files: dict[str, bytes], name: str, variables: Mapping[str, str]) -> HarborTask:
    try:
        config = parse_toml(_text(files, "task.toml", name))
    except ValueError as error:
        raise ConfigError(f"task.toml of the task {name} cannot be read: {error}.") from error
    sections = {key: _table(config, key, name) for key in ("agent", "verifier", "environment", "solution", "task")}
    environment, verifier = sections["environment"], sections["verifier"]
    tests, solution = _below(files, "tests"), _below(files, "solution")
    context = _below(files, "environment")
    needs = [*_harbor_needs(config, sections, files)]
    setup = _setup(context, needs, bool(environment.get("docker_image")))
    if workdir := environment.get("workdir"):
        setup.workdir = str(workdir)
        setup.folders.add(setup.workdir)
    setup.env |= _variables(environment.get("env", {}), variables, needs)
    if "test.sh" not in tests and not config.get("steps"):
        raise ConfigError(f"The task {name} has no tests/test.sh; it has {_some(files)}.")
    return HarborTask(
        name=str(sections["task"].get("name") or name),
        format="harbor",
        instruction="" if config.get("steps") else _text(files, "instruction.md", name).strip(),
        setup=setup,
        tests=tests,
        test_script="test.sh",
        solution=solution,
        solution_script="solve.sh" if "solve.sh" in solution else None,
        agent_timeout_s=_seconds(sections["agent"], name),
        test_timeout_s=_seconds(verifier, name) or TEST_TIMEOUT_S,
        memory_mb=_size(environment, "memory", name),
        storage_mb=_size(environment, "storage", name),
        test_env=_variables(verifier.get("env", {}), variables, needs),
        solution_env=_variables(sections["solution"].get("env", {}), variables, needs),
        needs=(*needs, *setup.needs),
        image=environment.get("docker_image"),
        context=context if "Dockerfile" in context else None,
    )


def _harbor_needs(
    config: dict[str, Any], sections: dict[str, dict[str, Any]], files: Mapping[str, bytes]
) -> list[Need]:
    """The demands of task.toml. Harbor's default is a network; only a task that says so is refused."""
    environment, verifier, agent = sections["environment"], sections["verifier"], sections["agent"]
    asked = {
        "steps": "[[steps]]" if config.get("steps") else "",
        "trajectory": "trajectory.json" if "trajectory.json" in files else "",
        "compose": next((path for path in files if re.fullmatch(r"environment/.*compose\.ya?ml", path)), ""),
        "separate verifier": "[verifier]"
        if verifier.get("environment_mode") == "separate" or "environment" in verifier
        else "",
        "windows": "[environment].os" if str(environment.get("os", "linux")).lower() == "windows" else "",
        "gpus": "[environment].gpus" if environment.get("gpus") else "",
        "tpu": "[environment].tpu" if environment.get("tpu") else "",
        "mcp": "[[environment.mcp_servers]]" if environment.get("mcp_servers") else "",
        "skills": "[environment].skills_dir" if environment.get("skills_dir") else "",
        "healthcheck": "[environment.healthcheck]" if environment.get("healthcheck") else "",
        "collect": "[[verifier.collect]]" if verifier.get("collect") else "",
        ".dockerignore": "environment/.dockerignore" if "environment/.dockerignore" in files else "",
    }
    for section, table in (("agent", agent), ("verifier", verifier), ("environment", environment)):
        if table.get("network_mode", "no-network") != "no-network":
            asked["network"] = f"[{section}].network_mode = {table['network_mode']!r}"
        if table.get("user") not in (None, "root", 0):
            asked["USER"] = f"[{section}].user"
    if environment.get("allow_internet") and "network_mode" not in environment:
        asked["network"] = "[environment].allow_internet"
    return [Need(name, where) for name, where in asked.items() if where]


def _setup(context: Mapping[str, bytes], needs: list[Need], has_image: bool) -> Setup:
    if "Dockerfile" in context:
        return read_dockerfile(context["Dockerfile"].decode("utf-8", "replace"), context)
    if has_image:
        needs.append(Need("FROM", "[environment].docker_image"))
    return Setup()


def _variables(table: Any, given: Mapping[str, str], needs: list[Need]) -> dict[str, str]:
    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name not in given and default is None:
            needs.append(Need(f"${name}", f"a value: variables={{{name!r}: …}}"))
        return str(given.get(name, default or ""))

    return {str(name): _TEMPLATE.sub(value, str(text)) for name, text in dict(table).items()}


def _seconds(table: Mapping[str, Any], name: str) -> float | None:
    value = table.get("timeout_sec")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"The task {name} has timeout_sec = {value!r}; give seconds above 0.")
    return float(value)


def _size(table: Mapping[str, Any], what: str, name: str) -> int | None:
    """`memory_mb = 512`, or the older `memory = "512M"`."""
    value = table.get(f"{what}_mb")
    if isinstance(value, int) and value > 0:
        return value
    older = str(table.get(what, "")).strip().upper()
    if older and older[-1] in _SIZES and older[:-1].replace(".", "", 1).isdecimal():
        return max(1, int(float(older[:-1]) * _SIZES[older[-1]]))
    if value is not None or older:
        raise ConfigError(f"The task {name} has {what} = {value or older!r}; write {what}_mb as a whole number.")
    return None


# --- Terminal-Bench ---


def _terminal_bench(files: dict[str, bytes], name: str) -> HarborTask:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"The task {name} has a task.yaml, which needs PyYAML: pip install pyyaml.") from error
    try:
        config = yaml.safe_load(_text(files, "task.yaml", name))
        compose = yaml.safe_load(files.get("docker-compose.yaml", b"")) or {}
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"task.yaml of the task {name} cannot be read: {error}.") from error
    if not isinstance(config, dict) or not isinstance(config.get("instruction"), str):
        raise ConfigError(f"task.yaml of the task {name} has no text 'instruction'.")
    if "run-tests.sh" not in files:
        raise ConfigError(f"The task {name} has no run-tests.sh; it has {_some(files)}.")
    needs: list[Need] = []
    if len(compose.get("services", {})) > 1:
        needs.append(Need("compose", f"docker-compose.yaml has services {', '.join(compose['services'])}"))
    if config.get("run_tests_in_same_shell"):
        needs.append(Need("same shell", "run_tests_in_same_shell"))
    setup = _setup(files, needs, has_image=False)
    setup.env.setdefault("TEST_DIR", "/tests")
    solution = {"solve.sh": files["solution.sh"]} if "solution.sh" in files else {}
    return HarborTask(
        name=name,
        format="terminal-bench",
        instruction=config["instruction"].strip(),
        setup=setup,
        tests={**_below(files, "tests"), "run-tests.sh": files["run-tests.sh"]},
        test_script="run-tests.sh",
        solution=solution,
        solution_script="solve.sh" if solution else None,
        agent_timeout_s=float(config.get("max_agent_timeout_sec", 360.0)),
        test_timeout_s=float(config.get("max_test_timeout_sec", 60.0)),
        memory_mb=None,
        storage_mb=None,
        test_env={},
        solution_env={},
        needs=(*needs, *setup.needs),
        context=files if "Dockerfile" in files else None,
    )


# --- files ---


def _below(files: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    return {path.removeprefix(f"{folder}/"): data for path, data in files.items() if path.startswith(f"{folder}/")}


def _text(files: Mapping[str, bytes], path: str, name: str) -> str:
    if path not in files:
        raise ConfigError(f"The task {name} has no {path}; it has {_some(files)}.")
    try:
        return files[path].decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} of the task {name} is not UTF-8: {error}.") from error


def _table(config: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    table = config.get(key, {})
    if not isinstance(table, dict):
        raise ConfigError(f"task.toml of the task {name}: {key} should be a table, [{key}].")
    return table


def _some(files: Mapping[str, bytes]) -> str:
    names = sorted(files)
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"
