"""The `__getattr__` of modules whose names are imported on first use: lighter, and a missing plug-in is named."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ludic.util.errors import MissingPlugin


def forward(shim: str, package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose names are in a plug-in."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {shim!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            if not is_plugin(error.name):
                raise
            raise missing(str(error.name), f"{shim}.{name}") from error
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(f"module {shim!r} has no attribute {name!r}") from None

    return __getattr__


def lazy(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports each module on first use. `names`: module -> names in it."""
    homes = {name: module for module, inside in names.items() for name in inside.split()}
    own = vars(sys.modules[package])
    own["__dir__"] = lambda: sorted({*own, *homes})

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}.")
        home = homes[name] if homes[name].startswith("ludic") else f"{package}.{homes[name]}"
        try:
            found = getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as error:
            if not is_plugin(error.name):
                raise
            raise missing(str(error.name), f"{package}.{name}") from error
        setattr(sys.modules[package], name, found)
        return found

    return __getattr__


def is_plugin(absent: str | None) -> bool:
    """True if a module that could not be imported is a plug-in as a whole: the one that has the name, or one that it imports."""
    return absent is not None and absent.startswith("ludic_") and "." not in absent


def missing(package: str, what: str) -> Exception:
    """The error for a plug-in of Ludic that is not installed."""
    return MissingPlugin(package, what)
