"""A village of twelve characters, who talk among themselves and to a traveller while the game takes VRAM back.

    python samples/npc_dialogue/main.py                 you are the traveller: "Bram, can you mend my sword?"
    python samples/npc_dialogue/main.py --unattended    the lines below are said for you

The lore that all share is read once, before anybody speaks. Remarks of the villagers are computed in the background
(priority 0), and the player's question goes first (priority 2). "save" and "load" keep and restore all conversations.
Joss speaks with a LoRA adapter of his own, which fits SmolLM2-135M; with another model he speaks like the others.
During each answer the "game" enters a heavy area, needs VRAM for its textures, and leaves the area again later. Only
frameshard's public client is used. Without a GPU the scene runs on the emulated device. The exit status of an
unattended run is 1 if an answer is missing or if the budget did not change in both directions during an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import trio
from rich.console import Console
from stage import Gauge, LiveStage, PlainStage, Stage
from village import ACCENTS, LORE, TOPICS, VILLAGERS, about, addressed

import frameshard
from frameshard.errors import BadModel, FrameshardError, Unsupported, causes
from frameshard.models import resolve

MIB = 2**20
TITLE = "Hollowmere"
LINES = (
    "Mira, good evening! I have walked all day. What is for supper?",
    "save",
    "Bram, a blind goat could make better swords than you!",
    "load",
    "Mira, have you heard any stories about the ruin on the hill?",
    "Joss, what lives in the lake?",
)
QUESTIONS = [line for line in LINES if addressed(line)]
TOWN, RUINS = "in the village", "in the Sunken Hall"
ENTER_AT, LEAVE_AT = 12, 36
"""Tokens of an answer after which the game enters and leaves the heavy area."""

OVERHEARD = 3
"""Remarks of villagers that the traveller hears on arrival and after each answer."""

BACKGROUND, URGENT = 0, 2
ANSWER = frameshard.Sampling(max_tokens=64, temperature=0.6, top_p=0.9, repeat_penalty=1.1, seed=2)
REMARK = frameshard.Sampling(max_tokens=20, temperature=0.6, top_p=0.9, repeat_penalty=1.1, seed=2, stop=("\n",))


@dataclass
class Tally:
    """Counts of the scene."""

    moves: Counter[str] = field(default_factory=Counter)
    """How often an answer went on in another place than before, by that place."""
    rates: dict[str, tuple[int, float]] = field(default_factory=lambda: {TOWN: (0, 0.0), RUINS: (0, 0.0)})
    """Tokens and seconds of decode by place."""
    first_words_s: list[float] = field(default_factory=list)
    """Time to the first token of each answer."""
    n_read: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that were read for the latest remark of each villager. Those of the lore were reused."""

    def spoke(self, place: str, tokens: int, seconds: float) -> None:
        before = self.rates[place]
        self.rates[place] = (before[0] + tokens, before[1] + seconds)

    def rate(self, place: str) -> float:
        tokens, seconds = self.rates[place]
        return tokens / seconds if seconds else 0.0

    def summary(self) -> str:
        read, first = self.n_read.values(), self.first_words_s
        return (
            f"{len(first)} answers; {self.moves[RUINS]} shrinks and {self.moves[TOWN]} grows during them; "
            f"{self.rate(TOWN):.0f} tokens/s {TOWN}, {self.rate(RUINS):.0f} {RUINS}\n"
            f"first words after {min(first, default=0):.2f} to {max(first, default=0):.2f} s, while remarks waited; "
            f"{len(read)} villagers made remarks and read {min(read, default=0)} to {max(read, default=0)} tokens each"
        )


class Game:
    """The host's side: it asks for remarks and answers, and sets the sidecar's budget for each of two places."""

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
        self._partner = next(iter(VILLAGERS))
        self._speakers = itertools.cycle(VILLAGERS)
        self._topics = itertools.cycle(TOPICS)
        self._remarks: deque[tuple[str, frameshard.Stream]] = deque()
        self._saved: dict[str, bytes] = {}
        self._adapters: dict[str, dict[str, float]] = {}

    async def wake(self) -> None:
        """Read the lore, and let all villagers begin to talk."""
        since = time.monotonic()
        lore = [frameshard.ChatMessage("system", LORE)]
        n_tokens = await self._sidecar.warm_up(lore)
        self._stage.world(f"the lore that all share has {n_tokens} tokens, read in {time.monotonic() - since:.1f} s")
        for name, file in ACCENTS.items():
            try:
                await self._sidecar.adapter_load(file.stem, file)
            except BadModel:
                self._stage.world(f"{name} speaks like the others: {file.name} is for another model")
                continue
            self._adapters[name] = {file.stem: 1.0}
            await self._sidecar.warm_up(lore, adapters=self._adapters[name])
            self._stage.world(f"{name} speaks with the LoRA adapter {file.name}, and has read the lore with it")
        self._saved = self._conversations()
        self._stage.world(f"here live {', '.join(VILLAGERS)}")
        for _ in VILLAGERS:
            self._remark()
        await self._overhear()

    async def act(self, line: str) -> None:
        """Do what the player has typed: save, load, or ask the villager who is named first, or the last one again."""
        if line == "save":
            self.save()
        elif line == "load":
            self.load()
        else:
            self._partner = addressed(line) or self._partner
            await self._answer(self._partner, line)
            await self._overhear()

    def _conversations(self) -> dict[str, bytes]:
        return {name: self._sidecar.save(name) for name in VILLAGERS}

    def save(self) -> None:
        """Keep all conversations. A game would write these bytes to its own file."""
        self._saved = self._conversations()
        self._stage.world(f"saved: {self._said()} with the traveller, in {sum(map(len, self._saved.values()))} bytes")

    def load(self) -> None:
        before = self._said()
        for name, data in self._saved.items():
            self._sidecar.load(data, conversation=name)
        self._stage.world(f"loaded: {self._said()} with the traveller; before the load there were {before}")

    async def draw(self) -> int:
        """Show the current figures.

        :returns: the bytes that the model holds.
        """
        engine = (await self._sidecar.stats()).engine or {}
        figures = {name: engine.get(f"{name}_bytes", 0) for name in ("budget", "used", "resident")}
        tokens, seconds = (sum(column) for column in zip((0, 0.0), *self._recent, strict=True))
        rate = tokens / seconds if seconds else 0.0
        self._stage.gauge(Gauge(**figures, full=self._full, tokens_per_s=rate, place=self.place))
        return figures["used"]

    def _said(self) -> str:
        return f"{sum(len(self._sidecar.history(name)) for name in VILLAGERS)} messages"

    def _ask(
        self, name: str, line: str, conversation: str, sampling: frameshard.Sampling, priority: int
    ) -> frameshard.Stream:
        return self._sidecar.ask(
            line,
            conversation=conversation,
            system=about(name),
            sampling=sampling,
            priority=priority,
            adapters=self._adapters.get(name, {}),
        )

    def _remark(self) -> None:
        """Begin a remark of the next villager. It is computed while nobody asks anything."""
        name = next(self._speakers)
        question = f"A neighbour walks by. Say one short sentence to them about {next(self._topics)}."
        stream = self._ask(name, question, conversation=f"{name}, nearby", sampling=REMARK, priority=BACKGROUND)
        stream.begin()
        self._remarks.append((name, stream))

    async def _overhear(self) -> None:
        """Show the oldest remarks. Mostly they are there already, because they were computed in the background."""
        for _ in range(OVERHEARD):
            name, stream = self._remarks.popleft()
            async with stream:
                remark = await stream.completed()
            self.tally.n_read[name] = remark.n_prompt - remark.n_reused
            self._stage.remark(name, remark.text.strip() + cut_off(remark), reused(remark))
            self._remark()

    async def _move(self, place: str) -> None:
        before, after = self._budgets[self.place], self._budgets[place]
        changed = await self._sidecar.set_budget(after / MIB, observe=False)
        self.place = place
        moved = f"{abs(after - before) / MIB:.0f} MiB {'less' if after < before else 'more'}"
        budget = f"a budget of {changed.vram_budget_bytes / MIB:.0f} MiB, {moved}"
        self._stage.world(
            f"{place}: {budget}, in {changed.seconds * 1e3:.1f} ms; the model holds {changed.used_bytes / MIB:.0f} MiB"
        )

    async def _answer(self, name: str, line: str) -> None:
        """Show an answer, and change places during it."""
        self._stage.npc(name)
        tokens, since, drawn, place = 0, time.monotonic(), 0.0, self.place
        async with self._ask(name, line, conversation=name, sampling=ANSWER, priority=URGENT) as stream:
            async for delta in stream:
                now = time.monotonic()
                if tokens:
                    self.tally.spoke(self.place, delta.tokens, now - since)
                    self._recent.append((delta.tokens, now - since))
                else:
                    self.tally.first_words_s.append(now - since)
                self.tally.moves[self.place] += self.place != place
                tokens, since, place = tokens + delta.tokens, now, self.place
                if delta.text.startswith(" "):
                    if ENTER_AT <= tokens < LEAVE_AT and self.place == TOWN:
                        await self._move(RUINS)
                    elif tokens >= LEAVE_AT and self.place == RUINS:
                        await self._move(TOWN)
                self._stage.says(delta.text)
                if now - drawn > 0.2:
                    await self.draw()
                    drawn = now
        assert stream.result is not None
        self._stage.says(cut_off(stream.result))
        self._stage.falls_silent()
        self._stage.world(f"first word after {self.tally.first_words_s[-1]:.2f} s; {reused(stream.result)}")
        if self.place == RUINS:  # a short answer
            await self._move(TOWN)
        used, budget = await self.draw(), self._budgets[self.place]
        self._stage.world(
            f"now the model holds {used / MIB:.0f} of {budget / MIB:.0f} MiB: weights come back as it computes"
        )


def cut_off(answer: frameshard.Completion) -> str:
    """What shows that an answer ends at its limit of tokens, in the middle of a sentence."""
    return " …" if answer.reason == "length" else ""


def reused(answer: frameshard.Completion) -> str:
    return f"{answer.n_reused} of {answer.n_prompt} tokens reused"


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
    async with frameshard.launch(model, device=device, n_ctx=2048, n_parallel=2, log=log, **options) as sidecar:
        info = await sidecar.model_info()
        budget = await sidecar.budget()
        if not budget.full_bytes:
            raise Unsupported(
                f"{info.device} has no VRAM that the game could take back: --device emulated:2 plays there"
            )
        game = Game(sidecar, stage, budget)
        changed = await sidecar.set_budget(budget.full_bytes / MIB)
        stage.world(f"{info.name} on {info.device}, which gives it {changed.vram_budget_bytes / MIB:.0f} MiB")
        await game.draw()
        await game.wake()
        said = iter(LINES)
        while line := next(said, "") if args.unattended else await player_line(stage):
            stage.player(line)
            await game.act(line)
    return game.tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a known name (smollm2-135m)")
    parser.add_argument("--device", default="auto", help="auto: the best GPU, else emulated:2 (GB/s)")
    parser.add_argument("--unattended", action="store_true", help="say a few lines and leave")
    args = parser.parse_args()
    if sys.stdin is None or not sys.stdin.isatty():
        args.unattended = True
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for an encoding that lacks letters of the model's answers
    console = Console()
    try:
        with contextlib.closing(LiveStage(console, TITLE) if console.is_terminal else PlainStage()) as stage:
            tally = trio.run(play, args, stage)
        print(tally.summary(), flush=True)
    except FrameshardError as error:
        print(f"{error.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        if not all(isinstance(cause, BrokenPipeError) for cause in causes(error)):
            raise
        # The reader of the output has ended, as in "main.py | head". Python's flush at exit must not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    complete = len(tally.first_words_s) >= len(QUESTIONS) and tally.moves[RUINS] and tally.moves[TOWN]
    return 0 if complete or not args.unattended else 1


if __name__ == "__main__":
    sys.exit(main())
