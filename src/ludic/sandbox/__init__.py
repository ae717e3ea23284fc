"""Running programs that nobody trusts: sandboxes, pools of them, and what a run tells. See docs/sandbox.md."""

from ludic.sandbox.backends import (
    SandboxBackend,
    create_sandbox_pool,
    detect_available_backend,
    get_backend_info,
    is_bubblewrap_available,
    is_docker_available,
    is_podman_available,
    is_podman_hpc_available,
)
from ludic.sandbox.bubblewrap import BubblewrapConfig, BubblewrapSandboxPool
from ludic.sandbox.cache import LRUCache
from ludic.sandbox.containers import DockerSandboxConfig, DockerSandboxPool, PodmanConfig, PodmanSandboxPool
from ludic.sandbox.interface import (
    Bind,
    CommandSandbox,
    Sandbox,
    SandboxError,
    SandboxPool,
    SandboxPoolExhaustedError,
)
from ludic.sandbox.limits import SandboxLimits
from ludic.sandbox.plain import SubprocessConfig, SubprocessSandboxPool
from ludic.sandbox.pool import BaseSandboxPool
from ludic.sandbox.results import CommandResult, CompileResult, CompileStatus, ExecutionResult, RunStatus
from ludic.sandbox.shared import shared_pool

__all__ = [
    "CompileStatus", "RunStatus", "CompileResult", "ExecutionResult", "CommandResult", "SandboxLimits",
    "Sandbox", "CommandSandbox", "SandboxPool", "Bind", "SandboxError", "SandboxPoolExhaustedError",
    "create_sandbox_pool", "shared_pool", "detect_available_backend", "get_backend_info", "SandboxBackend",
    "is_bubblewrap_available", "is_docker_available", "is_podman_available", "is_podman_hpc_available",
    "BaseSandboxPool", "LRUCache",
    "BubblewrapSandboxPool", "BubblewrapConfig", "DockerSandboxPool", "DockerSandboxConfig",
    "PodmanSandboxPool", "PodmanConfig", "SubprocessSandboxPool", "SubprocessConfig",
]  # fmt: skip
