"""``make packages``: packages of engines in build/packages, with CONTENTS.txt, which has the hash of every file.

    python bindings/packages [--out DIR] [--native DIR]

With ``--native`` nothing is built: DIR has the libraries, as libraries.py describes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import archive
import layouts
import libraries


def main() -> int:
    options = argparse.ArgumentParser(description="make the packages of engines")
    build = layouts.ROOT / "build"
    options.add_argument("--out", type=Path, default=build / "packages", metavar="DIR")
    options.add_argument("--native", type=Path, metavar="DIR", help="libraries that are built already")
    args = options.parse_args()
    skipped = [] if args.native else libraries.build(build / "packages-native", build)
    native = args.native or build / "packages-native"
    if not any(native.glob("*-x86_64/*")):
        print(*(f"skipped: {sentence}" for sentence in skipped), "Nothing could be built.", sep="\n", file=sys.stderr)
        return 1
    contents = []
    for name, files in layouts.packages(native).items():
        path = args.out / name
        archive.write(path, files)
        packed = path.read_bytes()
        contents.append(layouts.listing(name, files, archive.sha256(packed), len(packed)))
        print(contents[-1].splitlines()[0])
    (args.out / "CONTENTS.txt").write_text("\n".join(contents))
    print(f"What is in them: {args.out / 'CONTENTS.txt'}")
    for sentence in skipped:
        print(f"skipped: {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
