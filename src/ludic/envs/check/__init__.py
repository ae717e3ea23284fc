"""`check_env`: the environment contract, executable (contract.py), and what it measures on the way (report.py)."""

from ludic.envs.check.contract import Env, EnvCheckFailed, check_env, require_env
from ludic.envs.check.report import EnvReport

__all__ = ["Env", "EnvCheckFailed", "EnvReport", "check_env", "require_env"]
