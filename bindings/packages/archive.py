"""Archives whose bytes depend on their content alone, so that the same sources give the same hashes."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

Files = dict[str, bytes]
"""Content by the path in an archive."""

LIBRARIES = (".so", ".dll")
YEAR_1980 = (1980, 1, 1, 0, 0, 0)


def write(path: Path, files: Files) -> None:
    """Writes a .zip or .tgz, by the name of `path`. Libraries may be executed, as on their systems."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_zip(files) if path.suffix == ".zip" else _tgz(files))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _mode(name: str) -> int:
    return 0o755 if name.endswith(LIBRARIES) else 0o644


def _zip(files: Files) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in sorted(files.items()):
            member = zipfile.ZipInfo(name, YEAR_1980)
            member.external_attr = _mode(name) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, content)
    return made.getvalue()


def _tgz(files: Files) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), _mode(name)
            archive.addfile(member, io.BytesIO(content))
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="wb", mtime=0) as compressed:
        compressed.write(plain.getvalue())
    return made.getvalue()
