"""The public modules say which of their names are public."""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module

import pytest

import nostall

MODULES = [
    "nostall",
    *(
        module.name
        for module in pkgutil.walk_packages(nostall.__path__, "nostall.")
        if "._" not in module.name
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_module_lists_its_names(name: str) -> None:
    """``__all__`` is there, and each name in it exists and stands in it once."""
    try:
        module = import_module(name)
    except ModuleNotFoundError as missing:  # an adapter without its framework says so in one line
        if re.fullmatch(r"nostall\.integrations\.\w+ needs .+: pip install .+", str(missing)):
            return
        raise
    listed = module.__all__
    assert len(set(listed)) == len(listed)
    assert [each for each in listed if not hasattr(module, each)] == []


def test_what_the_package_offers_is_public_in_its_module() -> None:
    """A name of ``nostall`` whose home is a public module stands in that module's ``__all__``."""
    for name, home in nostall._HOME.items():
        if not home.startswith("_"):
            assert name in import_module(f"nostall.{home}").__all__
