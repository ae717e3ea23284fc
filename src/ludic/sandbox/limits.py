"""What a program may use. Every backend enforces these; a run may ask for other time and memory."""

from dataclasses import dataclass

from ludic.types import ConfigError

MB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """The limits of one run."""

    memory_mb: int = 256
    """Of all processes together where there is a memory cgroup, else of each process."""
    max_processes: int = 32
    """Threads count too."""
    max_output_bytes: int = 8 * MB
    """Of stdout and of stderr, each. A program that writes more is killed; what it wrote until then is kept."""
    max_outputs_bytes: int = 64 * MB
    """Of all files that a command's caller asks back."""
    workspace_mb: int = 64
    """Size of the one writable folder."""
    max_open_files: int = 256

    def __post_init__(self) -> None:
        for name in (
            "memory_mb",
            "max_processes",
            "max_output_bytes",
            "max_outputs_bytes",
            "workspace_mb",
            "max_open_files",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"SandboxLimits.{name}={getattr(self, name)}, but it must be at least 1.")
        if self.memory_mb < 16:
            raise ConfigError(f"SandboxLimits.memory_mb={self.memory_mb}, but Python itself needs about 16 MB.")
