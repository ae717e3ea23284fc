"""Declarations of this plug-in: programming tasks with examples, a tool, a command and a check. Entry points name them."""

from ludic.catalog import Entry, Suggested
from ludic.cli.commands import Command

SANDBOX_SERVER = Command(
    "ludic_sandbox.command:sandbox_server",
    "Run untrusted programs for other machines.",
    "ludic sandbox-server --workers 4",
)

_PROGRAM_SAMPLE = {
    "id": "example",
    "question": "Read a whole number n and then n whole numbers, one per line. Write the largest of them.",
    "tests": [
        {"input": "3\n4\n-1\n2\n", "expected": "4\n"},
        {"input": "1\n-7\n", "expected": "-7\n", "weight": 2.0},
        {"input": "2\n10\n9\n", "expected": "10\n", "timeout_s": 2.0},
    ],
    "solution": "n = int(input())\nprint(max(int(input()) for _ in range(n)))\n",
}

_APPS_SAMPLE = {
    "problem_id": "example",
    "question": "One line holds words. Write how many of them begin with a capital letter.",
    "input_output": '{"inputs": ["Ada met Bob\\n", "none here\\n"], "outputs": ["2\\n", "0\\n"]}',
    "solutions": '["print(sum(word[0].isupper() for word in input().split()))\\n"]',
}

_HUMANEVAL_SAMPLE = {
    "task_id": "example",
    "prompt": 'def without_vowels(text: str) -> str:\n    """The text without a, e, i, o and u, in either case."""\n',
    "entry_point": "without_vowels",
    "canonical_solution": '    return "".join(letter for letter in text if letter.lower() not in "aeiou")\n',
    "test": (
        'def check(candidate):\n    assert candidate("Anna") == "nn"\n    assert candidate("") == ""\n'
        '    assert not candidate("aEiOu")\n'
    ),
}

_MBPP_SAMPLE = {
    "task_id": "example",
    "prompt": "Write a function that gives the sum of the digits of a whole number.",
    "code": "def digit_sum(n):\n    return sum(int(digit) for digit in str(abs(n)))\n",
    "test_imports": [],
    "test_list": ["assert digit_sum(305) == 8", "assert digit_sum(0) == 0", "assert digit_sum(-19) == 10"],
}

_HARBOR_SAMPLE = {
    "id": "example",
    "files": {
        "task.toml": "[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 60.0\n",
        "instruction.md": "Write the names in `/app/names.txt`, sorted by the alphabet, to `/app/sorted.txt`.\n",
        "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY names.txt .\n",
        "environment/names.txt": "mona\nada\nkira\n",
        "tests/test.sh": "#!/bin/bash\nif cmp -s /app/sorted.txt /tests/expected.txt; then reward=1; else reward=0; fi\n"
        "echo $reward > /logs/verifier/reward.txt\n",
        "tests/expected.txt": "ada\nkira\nmona\n",
        "solution/solve.sh": "#!/bin/bash\nsort /app/names.txt > /app/sorted.txt\n",
    },
}

# Reads the last code block of a reply; a reply without one gets the reward of a program that does not compile.
_CODE = Suggested(
    parser="pattern",
    parser_args={"pattern": r"(?s)```(?:python|py)?[ \t]*\n(.*?)```", "error_reward": -0.1},
    max_steps=8,
    max_tokens=512,
    unreadable="stop",
)

CODE_EXEC = Entry("ludic_sandbox.code_exec:ProgrammingEnv", example={"sample": _PROGRAM_SAMPLE}, suggested=_CODE)
APPS = Entry("ludic_sandbox.code_exec:APPSEnv", example={"sample": _APPS_SAMPLE}, suggested=_CODE)
HUMANEVAL = Entry("ludic_sandbox.code_exec:HumanEvalEnv", example={"sample": _HUMANEVAL_SAMPLE}, suggested=_CODE)
MBPP = Entry("ludic_sandbox.code_exec:MBPPEnv", example={"sample": _MBPP_SAMPLE}, suggested=_CODE)
HARBOR = Entry(
    "ludic_sandbox.harbor:HarborEnv",
    example={"task": _HARBOR_SAMPLE},
    suggested=Suggested(agent="react", agent_args={"max_react_steps": 17}, max_steps=32, max_tokens=512),
)
PYTHON = Entry("ludic_sandbox.python_tool:python_tool")


def check_bubblewrap() -> tuple[str, str, str]:
    """For `ludic doctor`: (status, what there is, how to repair it). A sandbox is made: users may make namespaces, or may not."""
    import shutil
    import subprocess
    import sys

    if not sys.platform.startswith("linux"):
        return "missing", "exists for Linux only; docker or podman do instead", ""
    if shutil.which("bwrap") is None:
        return "missing", "not installed; programs of models run in it", "apt-get install bubblewrap"
    from ludic_sandbox.bubblewrap import bubblewrap_problem

    problem = bubblewrap_problem()
    if not problem:
        shown = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
        return "ok", f"{shown.strip().removeprefix('bubblewrap ')}; namespaces work", ""
    engines = [name for name in ("docker", "podman") if shutil.which(name)]
    other = f" (or --sandbox {engines[0]})" if engines else ""
    repair = (
        "sysctl -w kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0; in a container: docker run "
        f"--security-opt seccomp=unconfined --security-opt apparmor=unconfined{other}"
    )
    return "broken", problem.partition(" (Does")[0], repair
