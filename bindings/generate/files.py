"""Generated regions of files that are otherwise written by hand.

A region stands between two comments, whatever the language's comments look like::

    /* generated: NAME */
    /* end of NAME */
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BINDINGS = ROOT / "bindings"


def region(content: str, name: str) -> str:
    """What stands in a region."""
    return _find(content, name)[2]


def with_region(content: str, name: str, body: str) -> str:
    """`content` with another body in a region."""
    found = _find(content, name)
    return content[: found.start(2)] + body.rstrip("\n") + "\n" + content[found.end(2) :]


def _find(content: str, name: str) -> re.Match[str]:
    mark = re.escape(name)
    found = re.search(
        rf"^([^\n]*\bgenerated: {mark}(?![\w-])[^\n]*\n)(.*?)^[^\n]*\bend of {mark}(?![\w-])", content, re.M | re.S
    )
    if found is None:
        raise SystemExit(f"there is no region `generated: {name}` ... `end of {name}`")
    return found
