"""What an installed project holds: an editable install finds every folder, a real one only what is declared."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_package_is_declared_so_that_an_installed_service_can_import_it() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for top in ("shared", "services", "loadgen")
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert set(declared) == found
