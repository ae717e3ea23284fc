"""`check_env`: the environment contract, executable (contract.py, tools.py), and what it measures on the way (report.py)."""

from ludic.envs.check.contract import Env, check_env, require_env
from ludic.envs.check.report import EnvCheckFailed, EnvReport

__all__ = ["Env", "EnvCheckFailed", "EnvReport", "check_env", "require_env"]
