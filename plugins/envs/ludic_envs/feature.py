"""Envs in other processes as a feature of runs and evaluations: the settings env_workers and env_server."""

from typing import Any

from ludic import registry
from ludic.interaction.base import AnyEnv
from ludic.run.config.env_and_agent import EnvSettings
from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Feature
from ludic.run.given import EnvFactory, Parts
from ludic.util.stop import run_sync
from ludic_envs.workers import EnvPool
from ludic_envs.workers.server import ServerAddress, connect, suggested_by


class _EnvWorkers(Feature):
    """Worker processes of this machine, or an env server on another."""

    name = "env_workers"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.env.env_workers) or config.env.env_server is not None

    def pool(self, env: EnvSettings, factory: EnvFactory) -> EnvPool:
        """The pool that holds the envs. Workers are started by the first episode."""
        if env.env_server is not None:
            return EnvPool(env.id, server=env.env_server)
        return EnvPool(
            factory.id if factory.id in registry.envs else factory.factory,
            workers=env.env_workers,
            timeout_s=env.env_timeout or None,
            memory_mb=env.env_memory_mb,
        )

    def served(self, id: str, server: str) -> EnvFactory:
        """The env of an env server; `make` there makes it and closes it at once, for what can be asked of it."""

        async def made_and_closed(**arguments: Any) -> AnyEnv:
            async with EnvPool(id, server=server) as pool:
                env = await pool.make(**arguments)
                await env.async_close()
                return env

        _, info = run_sync(connect(ServerAddress.parse(server), worker=None))
        served = info.envs[info.require(id)]
        return EnvFactory(
            id=id,
            factory=lambda **arguments: run_sync(made_and_closed(**arguments)),
            takes_sample=served.takes_sample,
            example=served.example,
            suggested=suggested_by(served),
        )


ENV_WORKERS = _EnvWorkers()
