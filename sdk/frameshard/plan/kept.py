"""Files that the cache keeps of one machine or model: profiles, and what was learnt beside them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from pathlib import Path

from frameshard.models import cache_dir

logger = logging.getLogger(__name__)


def path_of(about: object, prefix: str = "") -> Path:
    """The path of the file that is valid for ``about``, which JSON can hold."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{prefix}{digest}.json"


def write(path: Path, text: str) -> None:
    """Writes a file, atomically.

    :raises OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, "utf-8")
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def try_write(path: Path, content: object, what: str) -> None:
    """Writes a JSON document for the next run. If the cache is read-only, it only warns that ``what`` is not kept."""
    try:
        write(path, json.dumps(content))
    except OSError as error:
        logger.warning("%s not kept: %s", what, error)
