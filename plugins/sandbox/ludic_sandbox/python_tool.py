"""`python`: a tool that runs a program in the sandbox and returns its output."""

from ludic.tools.tool import Tool, ToolResult
from ludic.types.errors import ConfigError
from ludic_sandbox import ExecutionResult, RunStatus, SandboxPool, shared_pool
from ludic_sandbox.interface import explain_failure

_MAX_SHOWN = 4000  # characters of each stream in the prompt
_WAITING_S = 60.0  # for a free sandbox


async def python(code: str) -> ToolResult:
    """Run a Python program and return what it prints. Nothing is kept between two calls.

    Args:
        code: A whole program, with its imports. Print what you want to see.
    """
    return await _run(code, pool=None, timeout_s=10.0, memory_limit_mb=256)


def python_tool(
    *, pool: SandboxPool | None = None, timeout_s: float = 10.0, memory_limit_mb: int = 256, name: str = "python"
) -> Tool:
    """The tool `python` with other limits or another pool."""
    if timeout_s <= 0 or memory_limit_mb <= 0:
        raise ConfigError(
            f"python_tool(timeout_s={timeout_s}, memory_limit_mb={memory_limit_mb}): both must be above 0."
        )

    async def run(code: str) -> ToolResult:
        return await _run(code, pool=pool, timeout_s=timeout_s, memory_limit_mb=memory_limit_mb)

    run.__doc__ = python.__doc__
    return Tool.from_callable(run, name=name, timeout_s=timeout_s + _WAITING_S)


async def _run(code: str, *, pool: SandboxPool | None, timeout_s: float, memory_limit_mb: int) -> ToolResult:
    pool = pool if pool is not None else await shared_pool()
    sandbox = await pool.checkout(_WAITING_S)
    try:
        result = await sandbox.execute(code, timeout_s=timeout_s, memory_limit_mb=memory_limit_mb)
    finally:
        await pool.release(sandbox)
    return ToolResult(_text(result), is_error=not result.succeeded)


def _text(result: ExecutionResult) -> str:
    """The program's output, and the error if it failed."""
    problem = explain_failure(result, "the program")
    detail = result.detail if result.run_status in (RunStatus.KILLED, RunStatus.SANDBOX_ERROR) else ""
    error = f"Error: {problem} {detail}".strip() if problem else ""
    parts = [_middle_cut(result.stdout.strip("\n")), _middle_cut(result.stderr.strip("\n")), error]
    return "\n".join(part for part in parts if part) or "The program printed nothing. Print what you want to see."


def _middle_cut(text: str) -> str:
    """Cut the middle: the beginning and the end of an output tell most."""
    half = _MAX_SHOWN // 2
    cut = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return text if len(text) <= _MAX_SHOWN else cut
