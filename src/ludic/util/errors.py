"""The errors that this package raises itself; `ludic.types.errors` holds the others and gives these names too."""


class LudicError(Exception):
    """Base of every error that Ludic raises on purpose."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return Exception.__str__(self)


class ConfigError(LudicError, ValueError):
    """A setting that cannot work."""


DISTRIBUTION = "ludic-rl"
"""The distribution's name. It is on no package index: `ludic` on PyPI is another project."""


class MissingExtra(LudicError, ImportError):
    """An optional part is not installed. `extras`: names of pyproject's optional dependencies, separated by commas."""

    def __init__(self, extras: str, needed_for: str) -> None:
        names = [repr(name) for name in extras.split(",")]
        needed = f"the {names[0]} extra" if len(names) == 1 else f"the extras {' and '.join(names)}"
        super().__init__(f"{needed_for} needs {needed}. {how_to_install(extras)}")
        self.extras = extras


class MissingPlugin(MissingExtra):
    """A plug-in of Ludic is not installed; `package` is its import name."""

    def __init__(self, package: str, needed_for: str) -> None:
        extra = package.removeprefix("ludic_")
        LudicError.__init__(
            self, f"{needed_for} is in the plug-in {package}, which is not installed. {how_to_install(extra)}"
        )
        self.package, self.extras = package, extra


class MissingPackage(LudicError, ImportError):
    """A package that is no extra of Ludic, because it is heavy or pins old versions, is not installed."""

    def __init__(self, package: str, needed_for: str, how: str) -> None:
        super().__init__(f"{needed_for} needs the package {package!r}: {how}.")
        self.package = package


def how_to_install(extras: str) -> str:
    """The pip command, in a clone and elsewhere."""
    return (
        f"In a clone of Ludic: pip install -e '.[{extras}]'; elsewhere: pip install '{DISTRIBUTION}[{extras}] @ "
        "git+<repository URL>'."
    )


def how_to_install_package(name: str) -> str:
    """The pip command for a package in environments/: `ludic-game-boy` is in environments/game_boy."""
    folder = f"environments/{name.removeprefix('ludic-').replace('-', '_')}"
    return (
        f"In a clone of Ludic: pip install -e {folder}; elsewhere: pip install '{name} @ "
        f"git+<repository URL>#subdirectory={folder}'."
    )
