"""A client that behaves badly, in a process of its own: ``peers.py vanish|slow CONNECT_FILE``.

``vanish`` submits jobs and reads them until it is killed. ``slow`` submits jobs and never reads an event.
"""

from __future__ import annotations

import sys

import trio

import frameshard

JOBS = 4
LIFE_S = 120.0
"""The process ends after so many seconds even if it is not killed."""


async def vanish(client: frameshard.Client) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(JOBS):
            nursery.start_soon(client.complete(f"vanish {number}").completed)


async def slow(client: frameshard.Client) -> None:
    sampling = frameshard.Sampling(max_tokens=200)
    streams = [client.complete(f"slow {number}", sampling=sampling) for number in range(JOBS)]
    for stream in streams:
        await stream.__aenter__()
    await trio.sleep_forever()


async def main(kind: str, connect_file: str) -> None:
    async with frameshard.connect(connect_file) as client:
        with trio.move_on_after(LIFE_S):
            await {"vanish": vanish, "slow": slow}[kind](client)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
