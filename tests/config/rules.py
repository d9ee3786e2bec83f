"""How a rule between settings is judged."""

from __future__ import annotations

import pytest

from hpctrain.config.load import load
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError


def refuses(overrides: str, world: int, path: str, words: str, mend: str, recipe: str = "llama-tiny") -> None:
    """A recipe with these overrides is refused on so many ranks, for that setting, and with the mend it is not."""
    config = load(recipe, overrides.split())
    with pytest.raises(ConfigError) as caught:
        validate(config, world)
    assert caught.value.path == path
    assert words in str(caught.value)
    validate(load(recipe, [*overrides.split(), *mend.split()]), world)
