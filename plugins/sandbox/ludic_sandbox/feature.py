"""The setting `sandbox` of runs and evaluations: where programs of code envs and of the python tool run."""

import os

from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Feature
from ludic.run.given import Parts
from ludic.util.stop import run_sync
from ludic_sandbox.backends import BACKEND_VARIABLE, check_backend, require_server


class Sandbox(Feature):
    """A backend, or a `ludic sandbox-server`, that the user names."""

    name = "sandbox"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return config.env.sandbox is not None

    def check_backend(self, backend: str) -> None:
        """ConfigError for a text that is neither a backend nor an address."""
        check_backend(backend)

    def use(self, backend: str) -> None:
        """Take this backend for all programs of this process and of its children; ConfigError for a server that is away."""
        run_sync(require_server(backend))
        os.environ[BACKEND_VARIABLE] = backend  # env workers, which are other processes, read it too


SANDBOX = Sandbox()
