"""Write the hash-locked requirement files: main.txt, build.txt, pip.txt, uv.txt and vllm.txt in requirements/ (`make lock`).

main.txt is everything that `make test` installs, for Python 3.11 to 3.13 on Linux and macOS, with the SHA-256 of every file
that PyPI has of each version. build.txt is what builds Ludic and the few packages that have no wheel, so that no build fetches
anything. uv.txt is the uv that installs both (scripts/install_locked.py). pip.txt is the pip of `make train`: Python's own may be
years old and take twice as long. vllm.txt has the versions of vllm.in. `make test LOCKED=1` installs with `--require-hashes`.
torch is not resolved here: see requirements/torch.txt.

    pip install uv && python scripts/lock.py [--upgrade]
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
EXTRAS = (
    *("hf", "local", "train", "lora", "math", "serve", "smollm2", "tensorboard", "wandb", "plot", "pipeline", "ray"),
    *("dev", "search", "datasets", "tinker", "cookbook", "others", "agents", "browser"),
)
ENVIRONMENTS = sorted((ROOT / "environments").glob("*/pyproject.toml"))
FROM_TORCH = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
"""torch and what only its CUDA build needs."""
WITH_TORCH = "-r torch.txt\n"
BUILDERS = "setuptools\nhatchling\neditables\n"


def compiled(uv: str, *args: str) -> str:
    """The output of `uv pip compile`: one block per package, `name==version ; marker` and its hashes."""
    command = [uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate", "--no-header", *args]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}.")
    return done.stdout


def blocks(text: str) -> list[str]:
    """The packages, with their hashes, without torch's CUDA packages."""
    found = re.split(r"\n(?=\S)", text.strip())
    return [block for block in found if not FROM_TORCH.match(block)]


def of_environments() -> list[str]:
    """What the packages in environments/ need, Ludic itself excepted."""
    projects = [tomllib.loads(file.read_text())["project"] for file in ENVIRONMENTS]
    return [line for project in projects for line in project["dependencies"] if not line.startswith("ludic-rl")]


def write(name: str, packages: list[str], includes: str = "") -> None:
    header = "# Written by scripts/lock.py (`make lock`), for pip install --no-deps --require-hashes; do not edit.\n"
    (REQUIREMENTS / name).write_text(header + includes + "\n".join(sorted(packages)) + "\n")
    sys.stdout.write(f"requirements/{name}: {len(packages)} packages\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="newest versions, not those that main.txt has")
    upgrade = parser.parse_args().upgrade
    uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    if uv is None:
        sys.exit("scripts/lock.py needs uv, which resolves for several platforms at once: pip install uv")
    everywhere = ["--universal", "--python-version", "3.11"]
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    with tempfile.TemporaryDirectory() as folder:
        kept, builders = Path(folder, "kept.txt"), Path(folder, "builders.in")
        kept.write_text("" if upgrade else (REQUIREMENTS / "main.txt").read_text().replace(WITH_TORCH, ""))
        builders.write_text(BUILDERS)
        more = Path(folder, "environments.in")
        more.write_text("\n".join(of_environments()))
        constraints = ["--constraint", "constraints.txt", "--constraint", str(kept)]
        packages = blocks(compiled(uv, *everywhere, *constraints, *extras, "pyproject.toml", str(more)))
        kept.write_text("\n".join(packages))
        build = blocks(compiled(uv, *everywhere, "--constraint", str(kept), str(builders)))
        installers = {}
        for name in ("pip", "uv"):
            builders.write_text(f"{name}\n" if upgrade else (REQUIREMENTS / f"{name}.txt").read_text())
            installers[name] = blocks(compiled(uv, *everywhere, str(builders)))
    packages += blocks(compiled(uv, *everywhere, "--no-deps", "requirements/no_deps.in"))
    for name, locked in installers.items():
        write(f"{name}.txt", locked)
    write("build.txt", build)
    write("main.txt", packages, WITH_TORCH)
    write("vllm.txt", blocks(compiled(uv, "--python-version", "3.11", "--no-deps", "requirements/vllm.in")), WITH_TORCH)


if __name__ == "__main__":
    main()
