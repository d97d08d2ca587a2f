"""Makes film.gif for the README: a game takes VRAM back while the innkeeper answers.

    python .assets/film.py record .assets/film.json    plays the scene and writes what happened
    python .assets/film.py draw .assets/film.json .assets/film.gif

Needs frameshard, pillow and matplotlib (for its fonts). The scene is a real run on the emulated device: real budgets,
copies and frame times, but the GPU is emulated on the CPU. Recorded are each frame's time, each piece of the answers,
and budget and VRAM twenty times a second.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import matplotlib
import trio
from PIL import Image, ImageDraw, ImageFont

import frameshard
from frameshard.models import resolve

MIB = 1 << 20
FRAME_S, WORK_S, SAMPLE_S = 1 / 60, 0.004, 0.05
PERSONA = "You are Mira, the innkeeper of the Gilded Tankard. You answer a traveller in three friendly sentences."
SCRIPT = (
    (0.3, "ask", "Good evening! What is for supper?"),
    (2.5, "shrink", "The player enters the ruins: textures need VRAM."),
    (5.0, "ask", "Can I have a room for the night?"),
    (8.5, "grow", "Back in the village: the VRAM is free again."),
)
"""Seconds since the start, what happens, and the words for it."""

REST_S = 1.0
"""From the last answer's end to the film's."""


class Scene:
    """The run, and the record of it."""

    def __init__(self, sidecar: frameshard.Client, bounds: frameshard.Budget) -> None:
        self.sidecar = sidecar
        self.full = bounds.full_bytes
        self.small = bounds.floor_bytes + (bounds.full_bytes - bounds.floor_bytes) // 5
        self.budget = self.full
        self.start = time.monotonic()
        self.turn = trio.Lock()  # one answer after the other: it is one conversation
        self.record: dict[str, Any] = {
            "full_mb": self.full / MIB, "frames": [], "text": [], "samples": [], "changes": []
        }  # fmt: skip

    def now(self) -> float:
        return round(time.monotonic() - self.start, 4)

    async def frames(self) -> None:
        """The game's loop: 4 ms of work every 16.7 ms."""
        due = last = time.monotonic()
        while True:
            due = max(due + FRAME_S, time.monotonic())
            await trio.sleep(max(0.0, due - time.monotonic()))
            begin = time.monotonic()
            self.record["frames"].append([self.now(), round((begin - last) * 1e3, 2)])
            last = begin
            while time.monotonic() < begin + WORK_S:
                pass

    async def samples(self) -> None:
        while True:
            engine = (await self.sidecar.stats()).engine or {}
            figures = [engine.get(f"{name}_bytes", 0) / MIB for name in ("used", "resident")]
            self.record["samples"].append([self.now(), round(self.budget / MIB, 1), *(round(mb, 1) for mb in figures)])
            await trio.sleep(SAMPLE_S)

    async def ask(self, words: str) -> None:
        sampling = frameshard.Sampling(max_tokens=100, temperature=0.6, top_p=0.9, repeat_penalty=1.1, seed=2)
        async with self.turn:
            self.record["text"].append([self.now(), "You", words, 0])
            async with self.sidecar.ask(words, conversation="Mira", system=PERSONA, sampling=sampling) as answer:
                async for delta in answer:
                    self.record["text"].append([self.now(), "Mira", delta.text, delta.tokens])

    async def change(self, target: int, words: str) -> None:
        at = self.now()
        if target < self.budget:
            self.budget = target
        result = await self.sidecar.set_budget(target / MIB, observe=False)
        self.budget = target
        self.record["changes"].append([at, words, round(target / MIB, 1), round(result.seconds * 1e3, 2)])

    async def play(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.frames)
            nursery.start_soon(self.samples)
            async with trio.open_nursery() as jobs:
                for at, what, words in SCRIPT:
                    await trio.sleep(max(0.0, at - self.now()))
                    if what == "ask":
                        jobs.start_soon(self.ask, words)
                    else:
                        jobs.start_soon(self.change, self.small if what == "shrink" else self.full, words)
            await trio.sleep(REST_S)
            nursery.cancel_scope.cancel()
        self.record["seconds"] = self.now()


async def record() -> dict[str, Any]:
    # One thread, everything streamed: an emulated GPU is no faster than the CPU, so that only copies show a budget.
    async with frameshard.launch(
        resolve("smollm2-135m"), device="emulated:2", mode="stream_only", n_ctx=1024, n_parallel=1,
        n_threads=1, log=subprocess.DEVNULL,
    ) as sidecar:  # fmt: skip
        bounds = await sidecar.budget()
        await sidecar.set_budget(bounds.full_bytes / MIB)
        await sidecar.complete("warm up", sampling=frameshard.Sampling(max_tokens=4)).completed()
        scene = Scene(sidecar, bounds)
        await scene.play()
        return scene.record


# ---- drawing ---------------------------------------------------------------------------------------------------------

SIZE = WIDTH, HEIGHT = 760, 400
FPS = 10
INK, PAPER, DIM = (28, 30, 38), (250, 249, 245), (150, 150, 158)
GAME, SIDECAR, RESIDENT, FRAME, ALARM = (226, 150, 90), (120, 170, 220), (60, 115, 175), (80, 150, 95), (190, 60, 60)
CHART, STRIP = (20, 62, 400, 236), (20, 286, 400, 366)  # left, top, right, bottom
TEXT_X = 424
ROWS = 14
"""Lines of the conversation that are shown."""


def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)


SMALL, NORMAL, BOLD = font(11), font(13), font(15, bold=True)


class Film:
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.card_mb = data["full_mb"] * 1.25

    def x(self, at: float) -> float:
        left, _, right, _ = CHART
        return left + (right - left) * at / self.data["seconds"]

    def y(self, mb: float) -> float:
        _, top, _, bottom = CHART
        return bottom - (bottom - top) * mb / self.card_mb

    def vram(self, draw: ImageDraw.ImageDraw, now: float) -> None:
        left, top, right, bottom = CHART
        draw.text((left, top - 40), "VRAM", INK, BOLD)
        for i, (name, colour) in enumerate((("game", GAME), ("model", SIDECAR), ("its resident weights", RESIDENT))):
            x = left + 70 + (0, 66, 142)[i]
            draw.rectangle((x, top - 34, x + 10, top - 24), colour)
            draw.text((x + 15, top - 37), name, INK, SMALL)
        draw.rectangle((left, top, right, bottom), (236, 235, 230))
        seen = [row for row in self.data["samples"] if row[0] <= now]
        for (at, budget, used, resident), after in zip(seen, [*seen[1:], [now]], strict=True):
            box = self.x(at), self.x(after[0]) + 1
            draw.rectangle((box[0], top, box[1], self.y(budget)), GAME)
            draw.rectangle((box[0], self.y(used), box[1], bottom), SIDECAR)
            draw.rectangle((box[0], self.y(resident), box[1], bottom), RESIDENT)
            draw.line((box[0], self.y(budget), box[1], self.y(budget)), INK, 2)
        if seen:
            _, budget, used, _ = seen[-1]
            words = f"budget {budget:.0f} MiB, model holds {used:.0f} MiB"
            draw.text((left, bottom + 4), words, INK, SMALL)

    def frames(self, draw: ImageDraw.ImageDraw, now: float) -> None:
        left, top, right, bottom = STRIP
        draw.text((left, top - 24), "Frame times of the game", INK, BOLD)
        draw.rectangle((left, top, right, bottom), (236, 235, 230))
        scale = (bottom - top) / 50
        for at, ms in self.data["frames"]:
            if at <= now:
                colour = FRAME if ms < 25 else ALARM
                draw.line((self.x(at), bottom, self.x(at), bottom - min(ms, 50) * scale), colour)
        y = bottom - 16.7 * scale
        draw.line((left, y, right, y), INK)
        draw.text((left + 4, y - 15), "16.7 ms", INK, SMALL)

    def talk(self, draw: ImageDraw.ImageDraw, now: float) -> None:
        lines: list[tuple[str, str]] = []
        for at, who, words, _ in self.data["text"]:
            if at > now:
                break
            if who == "Mira" and lines and lines[-1][0] == "Mira":
                lines[-1] = "Mira", lines[-1][1] + words
            else:
                lines.append((who, words))
        shown: list[tuple[str, tuple[int, int, int], ImageFont.FreeTypeFont]] = []
        for who, words in lines:
            shown.append((who, DIM if who == "You" else GAME, BOLD))
            shown += [(line, INK, NORMAL) for line in textwrap.wrap(" ".join(words.split()), 42)]
        for row, (line, colour, face) in enumerate(shown[-ROWS:]):
            draw.text((TEXT_X, 58 + 19 * row), line, colour, face)
        recent = [row for row in self.data["text"] if row[1] == "Mira" and now - 1 < row[0] <= now]
        if recent and now - recent[-1][0] < 0.4:  # an answer is being written
            draw.text((TEXT_X, 22), f"{sum(row[3] for row in recent)} tokens/s", INK, BOLD)
        news = [row for row in self.data["changes"] if row[0] <= now]
        if news:
            _, words, mb, ms = news[-1]
            done = f"budget {mb:.0f} MiB, in force after {ms:.1f} ms"
            draw.text((TEXT_X, HEIGHT - 52), words, INK, SMALL)
            draw.text((TEXT_X, HEIGHT - 36), done, ALARM, SMALL)

    def picture(self, now: float) -> Image.Image:
        image = Image.new("RGB", SIZE, PAPER)
        draw = ImageDraw.Draw(image)
        self.vram(draw, now)
        self.frames(draw, now)
        self.talk(draw, now)
        return image


def draw(data: dict[str, Any], path: Path) -> None:
    film = Film(data)
    times = [i / FPS for i in range(1, int(data["seconds"] * FPS) + 1)]
    pictures = [film.picture(at) for at in times]
    palette = pictures[-1].quantize(48)
    frames = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    durations = [1000 // FPS] * (len(frames) - 1) + [4000]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=("record", "draw"))
    parser.add_argument("data", type=Path)
    parser.add_argument("picture", type=Path, nargs="?")
    args = parser.parse_args()
    if args.action == "record":
        commit = subprocess.run(
            ["git", "describe", "--always"], capture_output=True, text=True, check=True
        ).stdout.strip()
        meta = {"commit": commit, "date": datetime.date.today().isoformat(), "command": "python .assets/film.py record"}
        args.data.write_text(json.dumps({"meta": meta, **trio.run(record)}) + "\n")
    elif args.picture is None:
        sys.exit("draw needs the name of the picture")
    else:
        draw(json.loads(args.data.read_text()), args.picture)


if __name__ == "__main__":
    main()
