"""Makes a release: `python scripts/release.py 0.2.0 [--dry-run]`.

It checks that the working tree is clean and that the version is new, moves "Unreleased" of CHANGELOG.md under the version, writes
the version into pyproject.toml, ludic/__init__.py and CITATION.cff, builds sdist and wheel, installs the wheel into an empty
environment, runs `ludic --version` there, commits and tags. With --dry-run it stops before the commit and puts the files back.
Nothing is uploaded: `git push --tags` and `twine upload dist/*` are yours.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
WRITTEN = ("CHANGELOG.md", "pyproject.toml", "src/ludic/__init__.py", "CITATION.cff")
"""Files that a release changes."""


class NotReady(Exception):
    """Why there can be no release now."""


def released(changelog: str, version: str, day: datetime.date) -> str:
    """The changelog with what was unreleased under the version, and an empty "Unreleased" above it."""
    heading = "## Unreleased\n"
    if heading not in changelog:
        raise NotReady("CHANGELOG.md has no section '## Unreleased'.")
    before, _, rest = changelog.partition(heading)
    if not rest.split("\n## ", 1)[0].strip():
        raise NotReady("Nothing is unreleased in CHANGELOG.md.")
    return f"{before}{heading}\n## {version} · {day.isoformat()}\n{rest}"


def with_version(text: str, version: str) -> str:
    """A file with its one line `version = "…"`, `__version__ = "…"` or `version: …` changed."""
    changed, count = re.subn(
        r'^((?:version|__version__) = ")[^"]*(")$|^(version: ).*()$',
        lambda found: f"{found[1] or found[3]}{version}{found[2] or found[4]}",
        text,
        flags=re.MULTILINE,
    )
    if count != 1:
        raise NotReady(f"A version is written {count} times where it should be written once.")
    return changed


def check(version: str, tags: list[str], changes: str) -> None:
    if not VERSION.fullmatch(version):
        raise NotReady(f"{version!r} is no version; it looks like 0.2.0 or 0.2.0rc1.")
    if f"v{version}" in tags:
        raise NotReady(f"There is a tag v{version} already; the last ones are {', '.join(tags[-3:])}.")
    if changes:
        raise NotReady(f"The working tree has changes; commit them first:\n{changes}")


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise NotReady(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def build_and_try(version: str) -> list[Path]:
    """sdist and wheel in dist/, after the wheel has been installed into an empty environment."""
    dist = ROOT / "dist"
    with tempfile.TemporaryDirectory() as folder:
        _run(sys.executable, "-m", "venv", folder)
        python = Path(folder) / "bin" / "python"
        _run(python, "-m", "pip", "install", "-q", "build")
        _run(python, "-m", "build", "--outdir", dist, ROOT)
        made = sorted(dist.glob(f"*{version}*"))
        (wheel,) = (path for path in made if path.suffix == ".whl")
        _run(python, "-m", "pip", "install", "-q", wheel)
        said = _run(Path(folder) / "bin" / "ludic", "--version").strip()
    if version not in said:
        raise NotReady(f"`ludic --version` of the wheel says {said!r}, not {version}.")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true", help="build and try, then put the files back")
    given = parser.parse_args()
    before = {name: (ROOT / name).read_text() for name in WRITTEN}
    try:
        check(given.version, _run("git", "tag").split(), _run("git", "status", "--porcelain").strip())
        changelog = released(before["CHANGELOG.md"], given.version, datetime.datetime.now(datetime.UTC).date())
        after = {
            name: changelog if name == "CHANGELOG.md" else with_version(text, given.version)
            for name, text in before.items()
        }
        for name, text in after.items():
            (ROOT / name).write_text(text)
        made = build_and_try(given.version)
        if not given.dry_run:
            _run("git", "commit", "-q", "-a", "-m", f"Release {given.version}")
            _run("git", "tag", "-a", f"v{given.version}", "-m", f"Ludic {given.version}")
            before = after
    except NotReady as error:
        sys.stderr.write(f"No release: {error}\n")
        return 1
    finally:
        for name, text in before.items():
            (ROOT / name).write_text(text)
    next_step = (
        "nothing was committed"
        if given.dry_run
        else f"next: git push --follow-tags; twine upload dist/*{given.version}*"
    )
    sys.stdout.write(f"{', '.join(path.name for path in made)} built and tried; {next_step}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
