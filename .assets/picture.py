"""Draws npc_dialogue.png for the README: plays the scene and keeps the last moment with a small budget.

python .assets/picture.py scene.svg       needs frameshard and rich; any browser turns the SVG into a PNG
"""

import argparse
import io
import pathlib
import sys

import trio
from rich.console import Console

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "samples" / "npc_dialogue"))
import main as scene
from stage import Gauge, LiveStage


class Camera(LiveStage):
    def gauge(self, gauge: Gauge) -> None:
        super().gauge(gauge)
        if gauge.budget < gauge.full and "Then" in str(self._lines[-2]):
            self.picture = self.page()


def console() -> Console:
    return Console(record=True, width=100, height=32, file=io.StringIO(), color_system="truecolor")


camera = Camera(console(), scene.TITLE)
args = argparse.Namespace(model="smollm2-135m", device="emulated:2", unattended=True)
trio.run(scene.play, args, camera)
camera.close()
paper = console()
paper.print(camera.picture)
paper.save_svg(sys.argv[1], title="make demo")
