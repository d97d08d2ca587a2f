"""The rooms of the package import one way, and every public name has one home."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import frameshard

PACKAGE = Path(frameshard.__file__).parent

# What each room may import, besides itself. Errors, the model store and the way to start a program are everyone's.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "models": set(),
    "program": set(),
    "frame": set(),
    "wire": set(),
    "transport": {"wire"},
    "broker": {"wire", "transport", "frame"},
    "images": {"wire"},
    "options": {"wire", "images"},
    "client": {"wire", "transport", "frame", "images", "options"},
    "sync": {"wire", "client", "frame", "options"},
    "testing": {"wire"},
    "cpu": set(),
    "native": {"cpu"},
    "plan": {"native"},
    "engine": {"cpu", "native", "plan", "wire"},
    "simulation": {"wire", "client", "frame", "__init__"},
    "cli": {"wire", "transport", "broker", "client", "sync", "cpu", "native", "plan", "engine", "simulation"},
    "__main__": {"cli"},
    "__init__": {"client", "images", "wire"},
}
EVERYONES = {"errors", "models", "program"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Rooms that a module imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["frameshard", *path.relative_to(PACKAGE).parts[: -node.level]] if node.level else []
            home = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{home}.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "frameshard" and rest:
                found.add(rest.split(".")[0])
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = room(path)
    assert here in ALLOWED, f"{here} needs a row in this test's table"
    rooms = {name for name in imports(path) if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()}
    assert rooms - {here} <= ALLOWED[here] | EVERYONES


def test_the_table_has_no_circle() -> None:
    done: set[str] = set(EVERYONES)
    while left := {name for name in ALLOWED if name not in done}:
        ready = {name for name in left if ALLOWED[name] <= done}
        assert ready, left
        done |= ready


def test_the_protocol_core_does_no_io() -> None:
    """Its time and its frames are parameters."""
    forbidden = {"socket", "zmq", "trio", "time", "threading", "asyncio", "select", "subprocess"}
    for path in (PACKAGE / "wire").glob("*.py"):
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not names & forbidden, path


def test_every_public_name_has_one_home() -> None:
    homes: dict[str, str] = {}
    for module in ("frameshard", "frameshard.sync", "frameshard.testing", "frameshard.broker"):
        for name in importlib.import_module(module).__all__:
            assert name not in homes, f"{name} is in {homes[name]} and in {module}"
            homes[name] = module
            assert getattr(importlib.import_module(module), name).__doc__ or name == "Event"
    assert frameshard.__all__ == sorted(frameshard.__all__)


def test_every_public_name_of_the_package_can_be_had() -> None:
    assert set(frameshard.__all__) <= set(dir(frameshard))
    with pytest.raises(AttributeError):
        _ = frameshard.nonsense  # type: ignore[attr-defined]
