"""The subpackages import in one direction, and every public name has one module."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import frameshard

PACKAGE = Path(frameshard.__file__).parent

# The subpackages and modules that each may import, besides itself. All may import errors, models, program, records
# and system.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "downloads": set(),
    "models": {"downloads"},
    "program": set(),
    "records": set(),
    "confined": set(),
    "system": set(),
    "frame": set(),
    "text": set(),
    "sentences": set(),
    "wire": set(),
    "transport": {"wire"},
    "broker": {"wire", "transport", "confined", "frame", "sentences", "text"},
    "images": {"wire"},
    "tools": {"wire"},
    "options": {"wire", "images", "tools"},
    "conversation": {"wire"},
    "inbox": set(),
    "client": {"wire", "transport", "frame", "images", "inbox", "options", "conversation", "tools"},
    "sync": {"wire", "client", "conversation", "frame", "images", "options", "tools"},
    "arbiter": {"wire"},
    "deal": {"wire", "arbiter", "client", "inbox"},
    "http": {"wire", "client", "tools"},
    "testing": {"wire", "sentences"},
    "cpu": set(),
    "ggml": {"cpu"},
    "native": {"ggml"},
    "plan": {"native"},
    "engine": {"confined", "cpu", "frame", "ggml", "native", "plan", "sentences", "text", "wire"},
    "simulation": {"wire", "client", "frame", "__init__"},
    "cli": {
        "__init__",
        "wire",
        "transport",
        "broker",
        "client",
        "sync",
        "cpu",
        "ggml",
        "native",
        "plan",
        "engine",
        "simulation",
        "http",
    },
    "__main__": {"cli"},
    "__init__": {"arbiter", "client", "conversation", "deal", "images", "tools", "wire"},
}
EVERYONES = {"errors", "models", "program", "records", "system"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[Path]:
    """The modules of the package that a module imports: at its top level, in functions and for type checkers."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["frameshard", *path.relative_to(PACKAGE).parts[: -node.level]] if node.level else []
            home = ".".join([*above, *([node.module] if node.module else [])])
            # A name that is imported from a package is one of its modules, or is in its __init__.
            names = [f"{home}.{alias.name}" if module(f"{home}.{alias.name}") else home for alias in node.names]
        found |= {file for name in names if (file := module(name)) is not None}
    return found - {path}


def module(name: str) -> Path | None:
    """The file of a module of the package."""
    top, *parts = name.split(".")
    place = PACKAGE.joinpath(*parts)
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None) if top == "frameshard" else None


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = room(path)
    assert here in ALLOWED, f"{here} needs a row in this test's table"
    assert {room(other) for other in imported(path)} - {here} <= ALLOWED[here] | EVERYONES


def test_the_table_has_no_circle() -> None:
    done: set[str] = set(EVERYONES)
    while left := {name for name in ALLOWED if name not in done}:
        ready = {name for name in left if ALLOWED[name] <= done}
        assert ready, left
        done |= ready


def test_no_module_imports_itself_through_others() -> None:
    left = {path: imported(path) for path in modules()}
    while left:
        ready = {path for path, others in left.items() if not others & left.keys()}
        circle = sorted(str(path.relative_to(PACKAGE)) for path in left)
        assert ready, f"a circle of imports, in {circle}"
        left = {path: others for path, others in left.items() if path not in ready}


def test_a_start_imports_only_what_it_needs() -> None:
    """Broker and engine start while a game runs, so what few of them use is imported later."""
    code = "import sys, frameshard.broker.__main__, frameshard.engine.process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "frameshard.models" in loaded
    unneeded = {"frameshard.downloads", "urllib.request", "http.client", "email", "zipfile", "llguidance", "jinja2"}
    assert not unneeded & set(loaded)


MOST_LINES, MOST_FIELDS = 80, 25
# Functions and classes over these limits, each with the reason.
EXCEPTIONS = {
    "native.py: Stats": "the fields of fsd_stats, one for one",
    "options.py: LaunchOptions": "the launch options, one for one",
}


def functions_and_classes(path: Path) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield f"{path.relative_to(PACKAGE)}: {node.name}", node


def fields(node: ast.ClassDef) -> set[str]:
    """The fields of a class: names that its body annotates, and names that its methods assign to self."""
    found = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in ast.walk(node):
        stored = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if stored and isinstance(each.value, ast.Name) and each.value.id == "self":
            found.add(each.attr)
    return found


def test_functions_and_classes_are_small() -> None:
    large = {}
    for path in modules():
        for name, node in functions_and_classes(path):
            if isinstance(node, ast.ClassDef):
                if (n := len(fields(node))) > MOST_FIELDS:
                    large[name] = f"{n} fields"
            elif (n := (node.end_lineno or 0) - node.lineno + 1) > MOST_LINES:
                large[name] = f"{n} lines"
    assert {name: size for name, size in large.items() if name not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) <= set(large), "an exception that is not needed any more"


def test_the_protocol_core_does_no_io() -> None:
    """Times and frames are parameters of the core."""
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
