"""Where the tasks of a verifiers environment come from: its own loaders, asked once per source."""

import importlib
import json
import sys
from functools import lru_cache
from typing import Any

from ludic.envs.adapters.verifiers_seat import api, refuse_what_is_missing
from ludic.types import ConfigError


@lru_cache(maxsize=16)
def load(taskset: str, taskset_args: str, env: str, env_args: str, num_tasks: int) -> tuple[Any, tuple[Any, ...]]:
    """The program and its tasks; shared by all envs of the same source, since both are only read."""
    loaders = api("utils.loaders")
    config = {**json.loads(env_args), "id": env, "taskset": {**json.loads(taskset_args), "id": _plug_in(taskset)}}
    try:
        program = loaders.load_environment(loaders.resolve_env_config(config))
        tasks = tuple(program.taskset.take(num_tasks))
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"verifiers cannot load the taskset {taskset!r} with {config}: {error}") from error
    if not tasks:
        raise ConfigError(f"The taskset {taskset!r} has no tasks with {taskset_args}.")
    refuse_what_is_missing(tasks[0], program.taskset.toolsets(program.taskset.config))
    return program, tasks


def _plug_in(taskset: str) -> str:
    """verifiers finds plug-ins under the names of top-level modules; one inside a package is made known as one."""
    if "." not in taskset:
        return taskset
    alias = taskset.replace(".", "_").lower()
    try:
        sys.modules.setdefault(alias, importlib.import_module(taskset))
    except ImportError as error:
        raise ConfigError(f"The taskset {taskset!r} cannot be imported: {error}.") from error
    return alias
