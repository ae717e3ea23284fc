"""`ludic doctor` on machines of several kinds, made of fake programs and packages."""

import json
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from ludic import plugins
from ludic.types.errors import DISTRIBUTION
from ludic.util import packages
from ludic_ops import doctor as machine
from ludic_ops.doctor import ABILITIES, Answer, Finding, ability_finding, all_checks, ask_all
from tests.unit.cli.runner import invoke

ROOT = Path(__file__).parents[3]
SMI = """#!/bin/sh
case "$1" in
  --query*) echo "NVIDIA H200, 143771, 570.86.15"; echo "NVIDIA H200, 143771, 570.86.15" ;;
  *) echo "| NVIDIA-SMI 570.86.15   Driver Version: 570.86.15   CUDA Version: 12.8 |" ;;
esac
"""


def program(folder: Path, name: str, text: str, monkeypatch) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def ability(name: str, **statuses: str) -> Finding:
    """What is said of an ability on a machine where all is well but for `statuses`."""
    found = {check: Finding(name=check, status="ok", says="") for check in all_checks()}
    for check, status in statuses.items():
        name_of_check = check.replace("_", " ")
        found[name_of_check] = Finding(name=name_of_check, status=status, says="why", repair="do this")  # type: ignore[arg-type]
    return ability_finding(next(one for one in ABILITIES if one.name.startswith(name)), found)


def test_json_has_every_check_and_ability_and_the_exit_code_is_0_where_the_base_works():
    shown = invoke(["doctor", "--json", "--wait-s", "300"])
    found = json.loads(shown.output)
    assert shown.exit_code == 0 and found["ok"] is True
    assert [one["name"] for one in found["machine"]] == list(all_checks())
    assert [one["name"] for one in found["abilities"]] == [one.name for one in ABILITIES]
    assert {one["status"] for one in found["machine"]} <= {"ok", "missing", "doubtful", "broken"}
    assert not any("cannot be checked" in one["says"] for one in found["machine"])
    assert found["abilities"][0]["status"] == "ok"


def test_doctor_runs_without_any_package_and_says_what_to_install(tmp_path):
    """A Python that finds Ludic and no other package: no traceback, exit code 1."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "ludic_rl-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ludic-rl\nVersion: 0\n")
    groups = {group: project["entry-points"][group] for group in ("ludic.commands", "ludic.checks")}
    lines = [
        f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in group_of.items())
        for group, group_of in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    places = [str(ROOT / "src"), str(ROOT / "plugins" / "ops"), str(ROOT / "plugins" / "sandbox"), str(tmp_path)]
    code = (
        f"import sys; sys.path[:0] = {places!r}; sys.argv = ['ludic', 'doctor', '--wait-s', '300']\n"
        "from ludic.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    assert "not installed: numpy, msgspec, rich, tyro" in done.stdout and "The base install is broken." in done.stdout
    assert "missing   vLLM           the plug-in ludic_vllm is not installed" in done.stdout
    assert f"pip install -e {ROOT}\n" in done.stdout and f"install -e '{ROOT}[train]'" in done.stdout


def test_doctor_does_not_import_torch():
    code = "import sys; from ludic.cli.main import find_command; find_command(['doctor'])(['--json']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("build", "status", "says"),
    [
        ("cuda 12.8", "ok", "2 × NVIDIA H200, 140 GiB; driver 570.86.15, for CUDA 12.8 and earlier"),
        ("cpu", "broken", "torch is a build for CPUs"),
        ("cuda 13.0", "broken", "torch is built for CUDA 13.0, which this driver cannot run"),
        ("", "ok", "driver 570.86.15"),
    ],
)
def test_a_gpu_is_compared_with_the_build_of_torch(build, status, says, tmp_path, monkeypatch):
    program(tmp_path, "nvidia-smi", SMI, monkeypatch)
    monkeypatch.setattr(machine, "torch_build", lambda: build)
    found = machine.gpu()
    assert found.status == status and says in found.says
    assert ("whl/cu128" in found.repair) == (status == "broken")


def test_a_driver_that_does_not_answer_is_no_gpu(tmp_path, monkeypatch):
    program(tmp_path, "nvidia-smi", "#!/bin/sh\nexit 9\n", monkeypatch)
    monkeypatch.setattr(machine, "torch_build", lambda: "cpu")
    assert machine.gpu().status in ("missing", "broken")


def test_a_redis_that_does_not_start_is_broken(tmp_path, monkeypatch):
    program(tmp_path, "redis-server", "#!/bin/sh\nexit 1\n", monkeypatch)
    assert machine.redis().status == "broken"
    program(tmp_path, "redis-server", "#!/bin/sh\necho 'Redis server v=7.2.4 sha=0 bits=64'\n", monkeypatch)
    assert machine.redis() == Answer("ok", "7.2.4")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert machine.redis().status == "missing" and "install redis" in machine.redis().repair


def test_torch_version_file_says_for_what_torch_is_built(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('nothing imports torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for line, build in (
        ("cuda: Optional[str] = '12.8'", "cuda 12.8"),
        ("hip = '6.4.1'", "rocm 6.4.1"),
        ("cuda = None", "cpu"),
    ):
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.9.0'\n{line}\n")
        machine.torch_build.cache_clear()
        assert machine.torch_build() == build
    machine.torch_build.cache_clear()


def test_a_check_that_hangs_or_raises_does_not_keep_the_others():
    free = threading.Event()

    def hang() -> Answer:
        free.wait()
        return Answer("ok", "")

    def fail() -> Answer:
        raise OSError("no such thing")

    checks = {"hangs": hang, "fails": fail, "works": lambda: Answer("ok", "fine")}
    try:
        found = ask_all(checks, wait_s=0.0)
        assert [one.name for one in found] == ["hangs", "fails", "works"]
        assert found[0].status == "doubtful" and "no answer within 0 s" in found[0].says
        found = ask_all({name: checks[name] for name in ("fails", "works")}, wait_s=300)
        assert found[0].says == "cannot be checked: OSError: no such thing" and found[1].says == "fine"
    finally:
        free.set()


def test_abilities_follow_from_checks_and_packages(monkeypatch):
    monkeypatch.setattr("ludic_ops.doctor.problems", lambda extras: [])
    monkeypatch.setattr("ludic_ops.doctor.version_of", lambda package: "1")
    assert ability("launch").status == "ok"
    broken = ability("code envs", bubblewrap="broken")
    assert (broken.status, broken.says, broken.repair) == ("broken", "bubblewrap: why", "do this")
    assert ability("--engine vllm", shared_memory="doubtful").status == "doubtful"
    monkeypatch.setattr("ludic_ops.doctor.problems", lambda extras: [f"not installed: {','.join(extras)}"])
    lacking = ability("launch")
    assert lacking.status == "missing" and "train,pipeline" in lacking.repair and "not installed" in lacking.says


def test_a_check_of_a_plug_in_that_is_gone_is_missing_and_so_is_what_needs_it(monkeypatch):
    gone = plugins.Point("ludic.checks", "vLLM", "ludic_nowhere.checks:vllm", DISTRIBUTION)
    monkeypatch.setattr(plugins, "points", lambda group: [gone])
    found = {name: check() for name, check in all_checks().items() if name in ("vLLM", "python")}
    assert (found["vLLM"].status, found["vLLM"].says) == ("missing", "the plug-in ludic_nowhere is not installed")
    assert "[nowhere]" in found["vLLM"].repair and "bubblewrap" not in all_checks()
    code_envs = ability_finding(next(one for one in ABILITIES if one.name.startswith("code envs")), found)
    assert (code_envs.status, code_envs.says) == ("missing", "bubblewrap: no installed plug-in looks for it")


def test_every_extra_and_check_that_an_ability_names_exists():
    for one in ABILITIES:
        assert set(one.extras) <= packages.requirements().keys() and set(one.needs) <= all_checks().keys()
    assert packages.DISTRIBUTION == DISTRIBUTION


@pytest.mark.parametrize(
    ("installed", "needed", "says"),
    [
        ("2.8.0+cpu", "torch>=2.8", []),
        ("2.10", "torch>=2.8", []),
        ("2.7.1", "torch>=2.8", ["torch is 2.7.1, but needed is 2.8 or later"]),
        ("5", "torch>=5.0", []),
        ("2.9.0rc1", "torch>=2.8", []),
        ("", "torch>=2.8", ["not installed: torch"]),
        ("1", "torch", []),
    ],
)
def test_versions_are_compared_as_numbers(installed, needed, says, monkeypatch):
    monkeypatch.setattr(packages, "requirements", lambda: {"train": (needed,)})
    monkeypatch.setattr(packages, "version_of", lambda name: installed)
    assert packages.problems(["train"]) == says


def test_an_environment_without_pip_is_repaired_with_uv(tmp_path, monkeypatch):
    program(tmp_path, "uv", "#!/bin/sh\n", monkeypatch)
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    assert packages.pip_install() == "/nowhere/bin/python -m pip install"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert packages.pip_install() == "uv pip install --python /nowhere/bin/python"
    program(tmp_path, "pip", "#!/bin/sh\n", monkeypatch)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert packages.pip_install() == "pip install"


def test_requirements_come_from_pip_where_there_is_no_clone(monkeypatch):
    monkeypatch.setattr(packages, "_project", lambda: None)
    lines = ["numpy>=1.26", "torch>=2.8; extra == 'train'", 'peft>=0.15; extra == "lora"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    packages.requirements.cache_clear()
    try:
        assert packages.requirements() == {"": ("numpy>=1.26",), "train": ("torch>=2.8",), "lora": ("peft>=0.15",)}
    finally:
        packages.requirements.cache_clear()


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ({"url": "https://host/ludic", "vcs_info": {"vcs": "git", "commit_id": "1"}}, "git+https://host/ludic"),
        ({"url": "file:///home/me/ludic", "dir_info": {}}, "file:///home/me/ludic"),
        ({}, "git+<repository URL>"),
    ],
)
def test_extras_are_installed_from_where_ludic_came(origin, source, monkeypatch):
    monkeypatch.setattr(packages, "_project", lambda: None)
    monkeypatch.setattr(packages, "_origin", lambda: origin)
    assert packages.install(["train", "lora"]).endswith(f" install '{DISTRIBUTION}[train,lora] @ {source}'")
