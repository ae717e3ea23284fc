"""Sandboxes for untrusted programs: bubblewrap, docker, podman, apptainer; pools of them, limits, results. See docs/sandbox.md.

`ludic_envs` and `ludic_serve` import it. Start with interface.py, then pool.py and bubblewrap.py. code_exec/ and harbor/ are tasks
whose answers are programs or commands.
"""

from typing import TYPE_CHECKING

from ludic.plugins import lazy

if TYPE_CHECKING:
    from ludic_sandbox.backends import (
        SandboxBackend,
        SubprocessConfig,
        SubprocessSandboxPool,
        create_sandbox_pool,
        detect_available_backend,
        get_backend_info,
        is_bubblewrap_available,
        is_docker_available,
        is_podman_available,
        is_podman_hpc_available,
        shared_pool,
    )
    from ludic_sandbox.bubblewrap import BubblewrapConfig, BubblewrapSandboxPool
    from ludic_sandbox.containers import (
        ApptainerSandboxPool,
        ContainerConfig,
        DockerSandboxConfig,
        DockerSandboxPool,
        PodmanConfig,
        PodmanSandboxPool,
    )
    from ludic_sandbox.interface import (
        Bind,
        CommandResult,
        CommandSandbox,
        CompileResult,
        CompileStatus,
        ExecutionResult,
        RunStatus,
        Sandbox,
        SandboxError,
        SandboxLimits,
        SandboxPool,
        SandboxPoolExhaustedError,
    )
    from ludic_sandbox.pool import BaseSandboxPool, LRUCache

__all__ = [
    "CompileStatus", "RunStatus", "CompileResult", "ExecutionResult", "CommandResult", "SandboxLimits",
    "Sandbox", "CommandSandbox", "SandboxPool", "Bind", "SandboxError", "SandboxPoolExhaustedError",
    "create_sandbox_pool", "shared_pool", "detect_available_backend", "get_backend_info", "SandboxBackend",
    "is_bubblewrap_available", "is_docker_available", "is_podman_available", "is_podman_hpc_available",
    "BaseSandboxPool", "LRUCache",
    "BubblewrapSandboxPool", "BubblewrapConfig", "DockerSandboxPool", "DockerSandboxConfig",
    "PodmanSandboxPool", "PodmanConfig", "ContainerConfig", "SubprocessSandboxPool", "SubprocessConfig",
    "ApptainerSandboxPool",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "backends": "SandboxBackend SubprocessConfig SubprocessSandboxPool create_sandbox_pool "
        "detect_available_backend get_backend_info is_bubblewrap_available is_docker_available "
        "is_podman_available is_podman_hpc_available shared_pool",
        "bubblewrap": "BubblewrapConfig BubblewrapSandboxPool",
        "containers": "ApptainerSandboxPool ContainerConfig DockerSandboxConfig DockerSandboxPool PodmanConfig "
        "PodmanSandboxPool",
        "interface": "Bind CommandResult CommandSandbox CompileResult CompileStatus ExecutionResult RunStatus Sandbox "
        "SandboxError SandboxLimits SandboxPool SandboxPoolExhaustedError",
        "pool": "BaseSandboxPool LRUCache",
    },
)
