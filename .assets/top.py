"""Draws top.svg: `frameshard top` beside a game that shrinks the model while it is asked things.

python .assets/top.py top.svg       needs frameshard and rich; any browser turns the SVG into a PNG
"""

import io
import sys

import trio
from rich.console import Console

import frameshard
from frameshard.cli import top
from frameshard.models import resolve
from frameshard.simulation import player, trace

PICTURE_AT_S = 6.0  # the cut-scene's textures are there and both characters talk


async def main() -> top.View:
    async with frameshard.launch(resolve("smollm2-135m"), device="emulated", link_gbps=2.0) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(player.play, client, trace.load("cut_scene"))
            view = top.View(await client.model_info())
            with trio.move_on_after(PICTURE_AT_S):
                while True:
                    await view.look(client)
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
    return view


paper = Console(record=True, width=112, file=io.StringIO(), color_system="truecolor")
paper.print(top.page(trio.run(main)))
paper.save_svg(sys.argv[1], title="frameshard top")
