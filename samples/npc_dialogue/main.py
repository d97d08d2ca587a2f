"""A scene in a tavern: Mira, the innkeeper, answers a traveller while the game takes VRAM back and returns it.

    python samples/npc_dialogue/main.py                 you are the traveller
    python samples/npc_dialogue/main.py --unattended    three lines are asked for you

During each answer the "game" enters a heavy area, needs VRAM for its textures, and leaves the area again later. Only
frameshard's public client is used. Without a GPU the scene runs on the emulated device. The exit status of an
unattended run is 1 if an answer is missing or if the budget did not change in both directions during an answer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import trio
from rich.console import Console
from stage import Gauge, LiveStage, PlainStage, Stage

import frameshard
from frameshard.errors import FrameshardError
from frameshard.models import resolve

MIB = 2**20
TITLE = "The Gilded Tankard"
NPC = "Mira"
PERSONA = (
    "You are Mira, the innkeeper of the Gilded Tankard, a warm tavern in a mountain village. You speak to a traveller. "
    "You always answer in character, in the first person, in four or five friendly sentences."
)
LINES = (
    "Good evening! I have walked all day. What is for supper?",
    "Have you heard any stories about the old ruins on the hill?",
    "Then I will need a room for the night. What can you offer me?",
)
TOWN, RUINS = "in the village", "in the Sunken Hall"
ENTER_AT, LEAVE_AT = 16, 48
"""Tokens of an answer after which the game enters and leaves the heavy area."""

SAMPLING = frameshard.Sampling(max_tokens=100, temperature=0.6, top_p=0.9, repeat_penalty=1.1, seed=2)


@dataclass
class Tally:
    """Counts of the scene. `rates` has tokens and seconds of decode by place."""

    answers: int = 0
    shrinks: int = 0
    grows: int = 0
    rates: dict[str, tuple[int, float]] = field(default_factory=lambda: {TOWN: (0, 0.0), RUINS: (0, 0.0)})

    def spoke(self, place: str, tokens: int, seconds: float) -> None:
        before = self.rates[place]
        self.rates[place] = (before[0] + tokens, before[1] + seconds)

    def rate(self, place: str) -> float:
        tokens, seconds = self.rates[place]
        return tokens / seconds if seconds else 0.0


class Game:
    """The host's side: it moves between two places and sets the sidecar's budget for each."""

    def __init__(self, sidecar: frameshard.Client, stage: Stage, budget: frameshard.Budget) -> None:
        self.place = TOWN
        self.tally = Tally()
        self._sidecar = sidecar
        self._stage = stage
        self._budgets = {
            TOWN: budget.full_bytes,
            RUINS: budget.floor_bytes + (budget.full_bytes - budget.floor_bytes) // 4,
        }
        self._full = budget.full_bytes
        self._recent: deque[tuple[int, float]] = deque(maxlen=8)  # tokens and seconds of the latest deltas

    async def move(self, place: str) -> None:
        """Set the place's budget. Counted if an answer is still being computed when the change is done."""
        before, after = self._budgets[self.place], self._budgets[place]
        changed = await self._sidecar.set_budget(after / MIB, observe=False)
        stats = await self._sidecar.stats()
        self.place = place
        if stats.broker.jobs_running:
            self.tally.shrinks += after < before
            self.tally.grows += after > before
        moved = f"{abs(after - before) / MIB:.0f} MiB {'taken back' if after < before else 'given'}"
        self._stage.world(
            f"{place}: {moved} in {changed.seconds * 1e3:.1f} ms, "
            f"the model holds {changed.used_bytes / MIB:.0f} of {changed.vram_budget_bytes / MIB:.0f} MiB"
        )

    async def draw(self) -> None:
        """Show the current figures."""
        engine = (await self._sidecar.stats()).engine or {}
        figures = {name: engine.get(f"{name}_bytes", 0) for name in ("budget", "used", "resident")}
        tokens, seconds = (sum(column) for column in zip((0, 0.0), *self._recent, strict=True))
        rate = tokens / seconds if seconds else 0.0
        self._stage.gauge(Gauge(**figures, full=self._full, tokens_per_s=rate, place=self.place))

    async def answer(self, line: str) -> None:
        """Show one answer, and change places during it."""
        self._stage.npc(NPC)
        tokens, since, drawn = 0, time.monotonic(), 0.0
        async with self._sidecar.ask(line, conversation=NPC, system=PERSONA, sampling=SAMPLING) as stream:
            async for delta in stream:
                now = time.monotonic()
                if tokens:  # the time to the first token is prefill
                    self.tally.spoke(self.place, delta.tokens, now - since)
                    self._recent.append((delta.tokens, now - since))
                tokens, since = tokens + delta.tokens, now
                if delta.text.startswith(" "):
                    if ENTER_AT <= tokens < LEAVE_AT and self.place == TOWN:
                        await self.move(RUINS)
                    elif tokens >= LEAVE_AT and self.place == RUINS:
                        await self.move(TOWN)
                self._stage.says(delta.text)
                if now - drawn > 0.2:
                    await self.draw()
                    drawn = now
        self._stage.falls_silent()
        self.tally.answers += 1
        if self.place == RUINS:  # a short answer
            await self.move(TOWN)
        await self.draw()


async def player_line(stage: Stage) -> str:
    """Read in a thread, so that the client can answer the sidecar meanwhile."""
    return await trio.to_thread.run_sync(stage.ask_player, abandon_on_cancel=True)


async def play(args: argparse.Namespace, stage: Stage) -> Tally:
    """Play the whole scene; returns its counts."""
    model = resolve(args.model)
    device = args.device
    options: dict[str, object] = {}
    if device == "auto":
        async with frameshard.launch(model, n_ctx=512, n_parallel=1, log=subprocess.DEVNULL) as sidecar:
            found = (await sidecar.model_info()).device
        device = "emulated:2" if found == "cpu" else found
    if device.startswith("emulated"):
        # The emulated device is as fast as the CPU, so a plan would compute on the CPU what does not fit, at no loss.
        # Stream-only over a slow link shows what a budget costs on a real GPU.
        # One thread, because the emulated device computes on the same cores that its copies use.
        options = {"mode": "stream_only", "n_threads": 1}
    log = subprocess.DEVNULL if isinstance(stage, LiveStage) else None
    async with frameshard.launch(model, device=device, n_ctx=2048, n_parallel=1, log=log, **options) as sidecar:
        info = await sidecar.model_info()
        budget = await sidecar.budget()
        game = Game(sidecar, stage, budget)
        changed = await sidecar.set_budget(budget.full_bytes / MIB)
        stage.world(f"{info.name} on {info.device}, which gives it {changed.vram_budget_bytes / MIB:.0f} MiB")
        await game.draw()
        said = iter(LINES)
        while line := next(said, "") if args.unattended else await player_line(stage):
            stage.player(line)
            await game.answer(line)
    return game.tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a known name (smollm2-135m)")
    parser.add_argument("--device", default="auto", help="auto: the first GPU, else emulated:2 (GB/s)")
    parser.add_argument("--unattended", action="store_true", help="ask three lines and leave")
    args = parser.parse_args()
    if not sys.stdin.isatty():
        args.unattended = True
    console = Console()
    stage = LiveStage(console, TITLE) if console.is_terminal else PlainStage()
    try:
        tally = trio.run(play, args, stage)
    except FrameshardError as error:
        stage.close()
        print(f"{error.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        stage.close()
        return 130
    stage.close()
    print(
        f"{tally.answers} answers; {tally.shrinks} shrinks and {tally.grows} grows while she spoke; "
        f"{tally.rate(TOWN):.0f} tokens/s {TOWN}, {tally.rate(RUINS):.0f} {RUINS}"
    )
    complete = tally.answers >= len(LINES) and tally.shrinks and tally.grows
    return 0 if complete or not args.unattended else 1


if __name__ == "__main__":
    sys.exit(main())
