"""Draws top.svg for the docs: `frameshard top` beside a game that takes VRAM back during an answer.

python .assets/top.py top.svg       needs frameshard and rich; any browser turns the SVG into a PNG
"""

import io
import pathlib
import re
import sys

import trio
from rich.console import Console

import frameshard
from frameshard.cli import top
from frameshard.models import resolve
from frameshard.simulation import player, trace

PICTURE_AT_S = 6.5  # the second streaming cell is loaded, and an answer is being generated


async def main() -> top.View:
    async with frameshard.launch(resolve("smollm2-135m"), device="emulated:2") as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(player.play, client, trace.load("streaming_cell"))
            view = top.View(await client.model_info())
            with trio.move_on_after(PICTURE_AT_S):
                while True:
                    await view.look(client)
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
    return view


paper = Console(record=True, width=96, file=io.StringIO(), color_system="truecolor")
paper.print(top.page(trio.run(main)))
svg = re.sub("@font-face {.*?}", "", paper.export_svg(title="frameshard top"), flags=re.DOTALL)  # no web fonts
pathlib.Path(sys.argv[1]).write_text(svg.replace("Fira Code", "DejaVu Sans Mono"))
