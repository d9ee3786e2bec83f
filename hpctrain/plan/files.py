"""YAML files that users name: clusters and profiles. Each fault of one is a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from hpctrain.config import plain_yaml
from hpctrain.config.schema import Section
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from importlib.abc import Traversable

S = TypeVar("S", bound=Section)


def section(kind: type[S], file: Traversable | Path, key: str, name: str, fix: str) -> S:
    """What a file says.

    Args:
        key, name: of the option that names it, and what it names.
        fix: what to do where there is no such file, or where it is another kind of file.

    Raises:
        ConfigError: it cannot be read, is no YAML, or is not as it should be.
    """
    try:
        tree = plain_yaml.read(file.read_text(encoding="utf-8"))
        return kind.model_validate_json(json.dumps(tree), strict=True)
    except FileNotFoundError:
        raise ConfigError(key, name, "there is no such file", fix) from None
    except OSError as error:
        raise ConfigError(key, name, f"cannot be read: {error.strerror}", fix) from None
    except UnicodeDecodeError:
        raise ConfigError(key, name, "must be a YAML file in UTF-8", fix) from None
    except ValidationError as error:
        raise ConfigError(key, name, _words(error), fix) from None
    except ValueError as error:
        raise ConfigError(key, name, f"must be YAML, but {error}", fix) from None


def _words(error: ValidationError) -> str:
    """The first fault of a file: where, and what of it."""
    first = error.errors(include_url=False, include_context=False)[0]
    where, ours = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    if ours == first["msg"]:
        return f"{where or 'the file'}: {ours.lower()}"
    return f"{where} is {first['input']!r}: {ours}" if where else ours
