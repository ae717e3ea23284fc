"""Examples and scripts as modules of this process: torch is loaded once for all of them. Where nothing hinders it, a test imports a
script as `from scripts import …`."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(path: Path) -> ModuleType:
    """The file as a new module. Its name is no other module's."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_program", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
