"""Builds the docs site: `python scripts/docs_site.py [--check]`, or `make docs`.

docs/index.md is the table of contents: its four sections become the groups of the site, and llms.txt follows its order. The
script copies the pages to build/docs, adds the API reference of the public packages, and runs Zensical on the copy. `--check`
prepares the pages and stops: it needs no Zensical, and reports pages that the index does not list and links that lead nowhere.
"""

import argparse
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
DOCS, BUILD = ROOT / "docs", ROOT / "build"
PACKAGES = [
    *(f"ludic.{name}" for name in (
        "types", "envs", "tools", "agents", "context", "parsers", "interaction", "inference", "batch_gen", "rewards", "training",
        "distributed", "eval", "run",
    )),
    "ludic_sandbox", "ludic_judges", "ludic_serve.gateway", "ludic_pipeline.queue",
]  # fmt: skip
_ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<path>[^)]+\.md)\): (?P<about>.+)$")
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


class Entry(NamedTuple):
    """One page in the table of contents."""

    group: str
    title: str
    path: str
    about: str


def contents(index: str) -> list[Entry]:
    """The pages that an index lists, in its order."""
    found, group = [], ""
    for line in index.splitlines():
        if line.startswith("## "):
            group = line[3:].strip()
        elif match := _ENTRY.match(line):
            found.append(Entry(group, match["title"], match["path"], match["about"]))
    return found


def problems(docs: Path) -> list[str]:
    """Pages that the index does not list (a folder's README stands for its folder), and links that lead nowhere."""
    listed = {entry.path for entry in contents((docs / "index.md").read_text())}
    folders = {str(Path(path).parent) for path in listed if path.endswith("README.md")}
    found = [f"index.md lists {path}, which is not there" for path in sorted(listed) if not (docs / path).exists()]
    for page in sorted(docs.rglob("*.md")):
        path = page.relative_to(docs)
        if str(path) not in {*listed, "index.md"} and str(path.parent) not in folders:
            found.append(f"index.md does not list {path}")
        for link in _LINK.finditer(_FENCE.sub("", page.read_text())):
            if not _leads_somewhere(page, link["target"]):
                found.append(f"{path} links to {link['target']}, which is not there")
    return found


def _leads_somewhere(page: Path, link: str) -> bool:
    if "://" in link or link.startswith("mailto:"):
        return True
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target.read_text()))


def anchors(text: str) -> set[str]:
    """The names by which GitHub links to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def prepare(docs: Path, target: Path) -> list[Entry]:
    """Copy the pages for the site. What links to files outside docs/ becomes plain text: the site does not have them."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(docs, target)
    for page in target.rglob("*.md"):
        folder = docs / page.relative_to(target).parent

        def inside(link: re.Match[str], folder: Path = folder) -> str:
            path = (folder / link["target"].partition("#")[0]).resolve()
            is_ours = "://" in link["target"] or link["target"].startswith(("#", "mailto:"))
            if is_ours or (path.is_file() and path.is_relative_to(docs.resolve())):
                return link[0]
            if path.is_dir() and path.is_relative_to(docs.resolve()) and (path / "README.md").exists():
                return f"[{link['text']}]({link['target'].rstrip('/')}/README.md)"
            name = os.path.relpath(path, docs.parent)
            return link["text"] if name in link["text"] else f"{link['text']} (`{name}`)"

        page.write_text(_LINK.sub(inside, page.read_text()))
    return contents((docs / "index.md").read_text())


def write_llms(docs: Path, entries: list[Entry], target: Path) -> None:
    """llms.txt (the table of contents) and llms-full.txt (the pages behind each other)."""
    intro = (docs / "index.md").read_text().partition("\n## ")[0].removeprefix("# Ludic documentation").strip()
    lines = ["# Ludic", "", *(f"> {line}" for line in intro.splitlines())]
    for group in dict.fromkeys(entry.group for entry in entries):
        lines += ["", f"## {group}", ""]
        lines += [f"- [{e.title}]({e.path}): {e.about}" for e in entries if e.group == group]
    (target / "llms.txt").write_text("\n".join(lines) + "\n")
    whole = [(docs / path).read_text().strip() for path in _all_pages(docs, entries)]
    (target / "llms-full.txt").write_text("\n\n---\n\n".join(whole) + "\n")


def _all_pages(docs: Path, entries: list[Entry]) -> list[str]:
    pages = []
    for entry in entries:
        pages.append(entry.path)
        if entry.path.endswith("README.md"):
            folder = docs / Path(entry.path).parent
            pages += sorted(str(p.relative_to(docs)) for p in folder.glob("*.md") if p.name != "README.md")
    return list(dict.fromkeys(pages))


# --- API reference ---


def api_page(package: str) -> str:
    """A page that names every public class and function of a package, for mkdocstrings to fill in."""
    name, module = package, importlib.import_module(package)
    first = (inspect.getdoc(module) or "").partition("\n\n")[0]
    lines = [f"# {name}", "", first, ""]
    for public in sorted(getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])):
        found: Any = getattr(module, public)
        home = getattr(found, "__module__", None)
        is_documented = (inspect.isclass(found) or inspect.isfunction(found)) and f"{home}.".startswith(f"{name}.")
        if is_documented and found.__name__ == public:
            lines += [f"::: {home}.{public}", ""]
    return "\n".join(lines)


def write_api(target: Path) -> list[Entry]:
    (target / "api").mkdir()
    for package in PACKAGES:
        (target / "api" / f"{package}.md").write_text(api_page(package))
    return [Entry("API", package, f"api/{package}.md", "") for package in PACKAGES]


# --- site ---


def site_config(docs: Path, entries: list[Entry], version: str | None) -> str:
    """mkdocs.yml of the repository with the navigation filled in."""
    config = (ROOT / "mkdocs.yml").read_text()
    nav: list[Any] = [{"Home": "index.md"}]
    groups = {
        group: [_branch(docs, e) for e in entries if e.group == group]
        for group in dict.fromkeys(e.group for e in entries)
    }
    groups["Reference"].append({"API": groups.pop("API")})
    nav += [{group: pages} for group, pages in groups.items()]
    site = f"site/{version}" if version else "site"  # relative: Zensical takes no absolute folders
    return f"{config}docs_dir: docs\nsite_dir: {site}\nnav: {json.dumps(nav, ensure_ascii=False)}\n"


def _branch(docs: Path, entry: Entry) -> dict[str, Any]:
    if not entry.path.endswith("README.md"):
        return {entry.title: entry.path}
    pages = _all_pages(docs, [entry])
    titles = [(docs / page).read_text().partition("\n")[0].lstrip("# ").replace("`", "") for page in pages]
    return {entry.title: [{title: page} for title, page in zip(["Overview", *titles[1:]], pages, strict=True)]}


def remember_version(site: Path, version: str) -> None:
    """Add a version to versions.json, which the site's version menu reads, the newest first."""
    path = site / "versions.json"
    known = json.loads(path.read_text()) if path.exists() else []
    others = [entry for entry in known if entry["version"] != version]
    path.write_text(json.dumps([{"version": version, "title": version, "aliases": []}, *others], indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="prepare the pages, report problems, build nothing")
    parser.add_argument("--version", help="build into build/site/VERSION and add it to the site's version menu")
    given = parser.parse_args()
    found = problems(DOCS)
    for problem in found:
        sys.stderr.write(f"{problem}\n")
    entries = prepare(DOCS, BUILD / "docs")
    entries += write_api(BUILD / "docs")
    write_llms(DOCS, [entry for entry in entries if entry.group != "API"], BUILD / "docs")
    if given.check or found:
        return 1 if found else 0
    (BUILD / "mkdocs.yml").write_text(site_config(DOCS, entries, given.version))
    zensical = Path(sys.executable).parent / "zensical"
    if not zensical.exists():
        sys.stderr.write("Zensical is not installed here; `make docs` installs it, or: pip install -e '.[docs]'\n")
        return 1
    done = subprocess.run([zensical, "build", "--clean", "-f", BUILD / "mkdocs.yml"])
    if done.returncode == 0 and given.version:
        remember_version(BUILD / "site", given.version)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
