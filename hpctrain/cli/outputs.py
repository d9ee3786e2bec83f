"""Options that name a file to be written: checked before anything is measured, searched or drawn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpctrain.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")


class Output(click.ParamType):  # type: ignore[type-arg]  # generic in later versions of click alone
    """A file in a folder that is there.

    Args:
        key: what a sentence calls the option.
        suffixes: of which its name has one; () for any name.
    """

    name = "file"

    def __init__(self, key: str, suffixes: tuple[str, ...] = ()) -> None:
        self.key, self.suffixes = key, suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path.

        Raises:
            ConfigError: it is a folder, its folder is not there, or its name is not that of such a file.
        """
        path = Path(value)
        if self.suffixes and path.suffix.lower() not in self.suffixes:
            allowed = f"a picture's name ends in {', '.join(self.suffixes[:-1])} or {self.suffixes[-1]}"
            raise ConfigError(self.key, str(path), allowed, f"for example {path.with_suffix(self.suffixes[0])}")
        check_output(self.key, path)
        return path


def check_output(key: str, path: Path) -> None:
    """Refuse a file that cannot be written where it is named.

    Raises:
        ConfigError: it is a folder, its folder is not there, or the system refuses to have it written.
    """
    if path.is_dir():
        raise ConfigError(key, str(path), "it is a folder", "name a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(key, str(path), "its folder must be there", f"make {path.parent}, or use another path")
    try:
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():  # a device or a pipe is as it is
            part = path.with_name(f".{path.name}.{os.getpid()}.part")
            part.touch()
            part.unlink()
    except OSError as error:
        raise ConfigError(key, str(path), f"it cannot be written ({error.strerror})", "use another path") from None


def make_folder(key: str, path: Path) -> None:
    """Make a folder, and those it is in.

    Raises:
        ConfigError: that does not go.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(key, str(path), f"cannot be made: {error.strerror}", "use another path") from None


def picture_file(key: str) -> Output:
    """An option for a picture."""
    return Output(key, PICTURES)
