"""``make generate``: rewrites bindings/generated-manifest.json and what mirrors it.

With ``--check`` nothing is written; files that are not up to date are named and the exit status is 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import for_c
import for_csharp
import for_document
import for_godot
import for_lua
import for_python
import for_unreal
import manifest
from files import BINDINGS, ROOT

# Each makes files of the manifest and of the files that those before it have made.
GENERATORS = (for_document, for_c, for_lua, for_csharp, for_python, for_unreal, for_godot)


def files() -> dict[Path, str]:
    """Every generated file with the content that it should have."""
    made = manifest.make()
    contents = {BINDINGS / "generated-manifest.json": manifest.text(made)}
    for generator in GENERATORS:
        contents |= generator.generate(made, contents)
    return contents


def stale() -> list[Path]:
    """Files whose content differs from what would be generated."""
    return [path for path, content in files().items() if not path.exists() or path.read_text() != content]


def main() -> None:
    changed = stale()
    if "--check" not in sys.argv[1:]:
        for path, content in files().items():
            if path in changed:
                path.write_text(content)
    for path in changed:
        print(path.relative_to(ROOT))
    sys.exit(1 if changed and "--check" in sys.argv[1:] else 0)


if __name__ == "__main__":
    main()
