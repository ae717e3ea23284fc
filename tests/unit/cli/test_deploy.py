"""The manifests of deploy/: they can be read, every command line in them is one of ours, and the Slurm job runs."""

import os
import re
import shlex
import shutil
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludic.cli.args import parse_run
from ludic.cli.train import TrainArgs
from ludic.training.loggers import read_metrics
from ludic_pipeline.launch.command import ActorArgs, LaunchArgs
from tests import warm_python
from tests.unit.cli.train_parts import ENV

pytestmark = pytest.mark.slow

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[3] / "deploy"
SCRIPTS = sorted([*DEPLOY.rglob("*.sbatch"), *DEPLOY.rglob("*.sh")])
ARGUMENTS = {"train": TrainArgs, "actor": ActorArgs, "launch": LaunchArgs}
COMMAND = re.compile(r"\bludic (train|actor|launch) (.*)")
RUN = """
[env]
id = "letter.py:Letter"
[model]
model = "tiny"
[agent]
max_tokens = 1
[algo]
group_size = 4
[rollouts]
rollouts_per_update = 8
[train]
steps = 3
"""


def documents() -> list[dict]:
    return [each for file in DEPLOY.rglob("*.yaml") for each in yaml.safe_load_all(file.read_text())]


def containers() -> Iterator[dict]:
    for each in documents():
        template = each.get("spec", {}).get("template")
        if template is not None:
            yield from template["spec"]["containers"]


def command_lines() -> list[str]:
    """Everything behind `ludic` in every manifest."""
    found = [
        shlex.join([*c.get("command", []), *c.get("args", [])]) for c in containers() if c["command"][0] == "ludic"
    ]
    texts = [arg for c in containers() if c["command"][0] == "sh" for arg in c["args"]]
    texts += [line for script in SCRIPTS for line in script.read_text().splitlines() if not line.startswith("#")]
    return found + [line for text in texts for line in text.splitlines() if COMMAND.search(line)]


def filled_in(line: str, folder: Path) -> tuple[str, list[str]]:
    """The command's name and its arguments, with what the shell would put in."""
    values = {
        '"${run[@]}"': "--engine pipeline --name run --runs runs",
        '"${resume[@]}"': "--resume",
        '"${@:2}"': "",
        '"$config"': "run.toml",
        '"$index"': "1",
        "/config/run.toml": "run.toml",
        "$resume": "--resume",
    }
    line = re.sub(r'"\$\{1:\?[^"]*\}"', "run.toml", line)
    for variable, value in values.items():
        line = line.replace(variable, value)
    found = COMMAND.search(line)
    assert found is not None and "$" not in found[2], line
    targets = {"run.toml": str(folder / "run.toml"), "runs/run": str(folder / "runs" / "run")}
    return found[1], [targets.get(part, part) for part in shlex.split(found[2].rstrip("& "))]


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_in_deploy_parses(line, tmp_path):
    (tmp_path / "runs" / "run").mkdir(parents=True)
    for file in (tmp_path / "run.toml", tmp_path / "runs" / "run" / "config.toml"):
        file.write_text(RUN)
    name, arguments = filled_in(line, tmp_path)
    _, config = parse_run(ARGUMENTS[name], arguments, prog=name, description="")
    assert config.env.id == "letter.py:Letter"
    assert name == "launch" or config.rollouts.engine == "pipeline", "its run is no pipeline"


def test_learner_and_actors_take_their_settings_from_the_same_file_at_every_start():
    """Not from the run folder: it keeps the old number of steps, and actors with a larger one would not end."""
    lines = [line for line in command_lines() if COMMAND.search(line)[1] in ("train", "actor")]
    targets = {COMMAND.search(line)[2].split()[0] for line in lines}
    assert len(lines) == 4 and targets == {"/config/run.toml", '"$config"'}


def test_pods_can_write_to_the_claim_and_actors_may_restart_without_a_limit():
    (uid,) = re.findall(r"useradd .*--uid (\d+) ", (DEPLOY / "Dockerfile").read_text())
    jobs = {each["metadata"]["name"]: each["spec"] for each in documents() if each["kind"] == "Job"}
    assert {job["template"]["spec"]["securityContext"]["fsGroup"] for job in jobs.values()} == {int(uid)}
    assert jobs["ludic-actor"]["backoffLimit"] == 2**31 - 1  # the largest that Kubernetes accepts


def test_the_dockerfile_copies_files_and_names_extras_that_exist():
    """Building it needs a registry. A build sees only what is copied, so that has to be enough for pyproject.toml."""
    root = DEPLOY.parent
    lines = [line.split() for line in (DEPLOY / "Dockerfile").read_text().splitlines()]
    copied = [name for word, *names in filter(None, lines) if word == "COPY" for name in names[:-1]]
    assert copied and all((root / name).exists() for name in copied)
    project = tomllib.loads((root / "pyproject.toml").read_text())
    needed = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml", "constraints.txt"}
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert needed | {package.split("/")[0] for package in packages} <= set(copied)
    arguments = dict(words[1].split("=", 1) for words in filter(None, lines) if words[0] == "ARG")
    assert set(arguments["EXTRAS"].split(",")) <= project["project"]["optional-dependencies"].keys()
    images = {container["image"] for container in containers()} - {"redis:7"}
    assert images == {"ludic:latest"} and "-t ludic:latest" in (DEPLOY / "Dockerfile").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_pods_find_redis_and_the_shared_disk():
    volumes = {each["metadata"]["name"] for each in documents() if each["kind"] == "PersistentVolumeClaim"}
    services = {each["metadata"]["name"]: each for each in documents() if each["kind"] == "Service"}
    for each in documents():
        if each["kind"] not in ("Job", "Deployment"):
            continue
        spec = each["spec"]["template"]["spec"]
        claims = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
        assert claims and claims <= volumes
        mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        environment = {entry["name"]: entry.get("value") for entry in spec["containers"][0]["env"]}
        host = environment["LUDIC_REDIS_URL"].rpartition("@")[2].partition(":")[0]
        assert host in services
        selected = [e for e in documents() if e["kind"] == "StatefulSet" and e["metadata"]["name"] == host]
        assert selected[0]["spec"]["template"]["metadata"]["labels"] == services[host]["spec"]["selector"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_the_slurm_job_trains_with_everything_on_one_machine(tmp_path):
    """Slurm itself is played by two scripts: every node is this machine."""
    (tmp_path / "letter.py").write_text(ENV)
    (tmp_path / "small.toml").write_text(RUN)
    tools = tmp_path / "tools"
    tools.mkdir()
    programs = {
        "scontrol": "#!/bin/bash\nprintf '127.0.0.1\\nlocalhost\\n'\n",
        "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
        "ludic": f'#!/bin/bash\nexec {warm_python.executable()} -m ludic.cli.main "$@"\n',
    }
    for name, text in programs.items():
        (tools / name).write_text(text)
        (tools / name).chmod((tools / name).stat().st_mode | stat.S_IXUSR)
    job = subprocess.run(
        ["bash", str(DEPLOY / "slurm" / "pipeline.sbatch"), "small.toml"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "nodes",
            "SLURM_JOB_ID": str(os.getpid()),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "runs" / "small" / "metrics.jsonl")] == [1, 2, 3]
    assert "Done after update 3 of 3" in job.stdout and "= 24 acknowledged + " in job.stdout


def test_ray_and_redis_of_the_ray_script_listen_on_different_ports():
    text = (DEPLOY / "ray" / "launch.sh").read_text()
    (redis,), (ray,) = re.findall(r"redis://\S+:(\d+)/", text), re.findall(r"--head --port=(\d+)", text)
    assert redis != ray
