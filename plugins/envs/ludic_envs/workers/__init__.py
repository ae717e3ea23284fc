"""Envs in other processes: `EnvPool` (pool.py) starts workers or connects to an `EnvServer`. docs/env-workers.md is the guide.

wire.py is the protocol, process.py a worker, supervisor.py what starts and restarts workers, remote.py an env as its user sees it,
server.py the server and its handshake.
"""

from ludic_envs.workers.pool import EnvPool
from ludic_envs.workers.remote import RemoteEnv
from ludic_envs.workers.server import EnvServer

__all__ = ["EnvPool", "EnvServer", "RemoteEnv"]
