"""The files that the documents name exist."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
DOCUMENTS = [
    REPO / "README.md",
    *(path for folder in ("docs", "profiles", "bindings", "samples") for path in sorted((REPO / folder).rglob("*.md"))),
]
MAP = REPO / "docs" / "architecture.md"
FOLDERS = {
    "sdk/frameshard": "sdk/frameshard",
    **{name: f"sdk/frameshard/{name}" for name in ("wire", "broker", "http", "engine", "plan")},
    "native/src": "native/src",
}


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), f"{document.name} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{document.name} links to {target}"


def test_paths_in_backticks_exist() -> None:
    for document in DOCUMENTS:
        for path in re.findall(r"`((?:sdk|native|bindings|tests|profiles|samples)/[\w./*-]+)`", document.read_text()):
            assert list(REPO.glob(path)), f"{document.name} names {path}"


def mapped() -> dict[str, list[str]]:
    """The modules that the map names, by the heading of their table: names, or patterns such as `ring.*`."""
    tables = re.findall(r"^\*\*([\w/]+)\*\* .*\n\n((?:\|.*\n)+)", MAP.read_text(), flags=re.MULTILINE)
    return {
        name: re.findall(r"`(\w+\.(?:py|cpp|h|\*))`", "".join(row.split("|")[1] for row in table.splitlines()))
        for name, table in tables
    }


@pytest.mark.parametrize("name", FOLDERS)
def test_the_map_and_the_modules_match(name: str) -> None:
    folder, modules = REPO / FOLDERS[name], mapped()[name]
    assert len(modules) == len(set(modules))
    for module in modules:
        assert list(folder.glob(module)), f"the map of {name} has {module}"
    files = {path.name for path in folder.iterdir() if path.suffix in (".py", ".cpp", ".h")} - {
        "__init__.py",
        "__main__.py",
    }
    missing = {file for file in files if not any(fnmatch.fnmatch(file, module) for module in modules)}
    assert not missing, f"the map of {name} lacks {missing}"


def test_the_readme_stays_short() -> None:
    assert len((REPO / "README.md").read_text().splitlines()) < 180
    assert (REPO / ".assets" / "film.gif").stat().st_size <= 3 << 20
