"""A guard who looks: a job gets the rendered frame and names what is in it, while the game changes the budget.

    python samples/scene_reasoning/main.py                            arrows walk, space asks, escape leaves
    python samples/scene_reasoning/main.py --unattended --screenshot shot.png
    python samples/scene_reasoning/main.py --model smolvlm-500m       a model that answers free questions

By default the model is SmolLM2 with a small vision tower, which sprites.py builds. It names one of 36 kinds of sprites
and nothing else, so the guard looks at one spot of the frame at a time. A full vision-language model gets the whole
frame and is asked in words, and for JSON (scene.schema.json). Needs pygame-ce: pip install 'frameshard[samples]'.
The scene runs on the emulated device; `--device auto` takes the best GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

try:
    import pygame
except ModuleNotFoundError:
    sys.exit("pygame is not installed: pip install 'frameshard[samples]'")

import frameshard
from frameshard import models, sync
from frameshard.errors import ConnectionLost, FrameshardError

MIB = 1 << 20
SIZE = WIDTH, HEIGHT = 960, 540
FLOOR, WALL, WOOD, TABLE = (150, 170, 140), (70, 62, 88), (120, 84, 52), (206, 188, 150)
SPOT = 224
"""Pixels on each side of a spot: the input size of the small vision tower."""

TABLE_SPOT = pygame.Rect(120, 250, SPOT, SPOT)
GATE_SPOT = pygame.Rect(620, 250, SPOT, SPOT)
SCHEMA = Path(__file__).with_name("scene.schema.json")

SHARES = (0.5, 0.75, 1.0)
"""The budgets of the questions, between the model's floor (0) and all that it takes (1)."""

SCENES = (("bomb", "box"), ("card", "ladder"), ("flag", "door"))
"""Sprites on the table and in the gate, for each pair of questions."""


@dataclass(frozen=True)
class Prompts:
    """The questions for one kind of model."""

    about: str
    whole_frame: bool
    table: str
    gate: str
    max_tokens: int


WORDS = Prompts(
    "the vision tower names sprites: one spot at a time, and the prompt that works with it",
    False,
    "Which word is repeated above?",
    "Which word is repeated above?",
    16,
)
FREE = Prompts(
    "a full vision-language model: the whole frame, free questions, and an answer as JSON",
    True,
    "You see a frame of a game. What lies on the table at the left? Answer in one short sentence.",
    "You see a frame of a game. A guard wants to walk through the gate at the right. Name the objects, "
    "how they stand to each other, and whether it is safe for him to walk through, and why. Answer as JSON.",
    200,
)


def prompts_for(model: frameshard.ModelInfo) -> Prompts:
    """The questions for this model."""
    return WORDS if "sprites" in model.vision else FREE


@dataclass
class Tally:
    """Counts: frame times in ms beside a job and without one, budgets in MiB that came into force, answers."""

    beside: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    budgets: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def summary(self) -> str:
        def row(times: list[float]) -> str:
            if len(times) < 2:
                return "-"
            late = statistics.quantiles(times, n=100)[98]
            return f"{statistics.median(times):.1f} ms, 99 of 100 within {late:.1f} ms"

        sizes = f" ({min(self.budgets):.0f} to {max(self.budgets):.0f} MiB)" if self.budgets else ""
        return (
            f"{len(self.said)} answers, {len(self.budgets)} changes of the budget{sizes}; "
            f"frames beside a job {row(self.beside)}; without {row(self.alone)}"
        )


class Art:
    """The sprites, by class, at any size."""

    def __init__(self, directory: Path) -> None:
        self.words = sorted(path.name for path in directory.iterdir())
        self._directory = directory
        self._made: dict[tuple[str, int, int], pygame.Surface] = {}

    def get(self, name: str, side: int, n: int = 0) -> pygame.Surface:
        key = name, side, n
        if key not in self._made:
            files = sorted((self._directory / name).glob("*.png"))
            image = pygame.image.load(files[n % len(files)]).convert_alpha()
            scale = side / max(image.get_size())
            size = max(1, round(image.get_width() * scale)), max(1, round(image.get_height() * scale))
            self._made[key] = pygame.transform.smoothscale(image, size)
        return self._made[key]


class Room:
    """The game: a room with a table, a gate, the guard, and a person who walks about."""

    def __init__(self, art: Art) -> None:
        self.art = art
        self.on_table: str | None = None
        self.in_gate: str | None = None
        self.walker = 420.0
        self.speech = ""
        self.status = ""
        self._font = pygame.font.Font(None, 28)
        self._small = pygame.font.Font(None, 22)

    def set_scene(self, on_table: str | None, in_gate: str | None) -> None:
        self.on_table, self.in_gate = on_table, in_gate

    def draw(self, screen: pygame.Surface, now: float) -> None:
        """Draw the scene without text; the guard sees this."""
        screen.fill(FLOOR)
        pygame.draw.rect(screen, WALL, (0, 0, WIDTH, 230))
        pygame.draw.rect(screen, WOOD, TABLE_SPOT.inflate(36, 36), border_radius=14)
        pygame.draw.rect(screen, TABLE, TABLE_SPOT.inflate(12, 12), border_radius=8)
        pygame.draw.rect(screen, WOOD, GATE_SPOT.inflate(36, 36))
        pygame.draw.rect(screen, FLOOR, GATE_SPOT.inflate(12, 12))
        for spot, name in ((TABLE_SPOT, self.on_table), (GATE_SPOT, self.in_gate)):
            if name is not None:
                sprite = self.art.get(name, 170)
                screen.blit(sprite, sprite.get_rect(center=spot.center))
        guard = self.art.get("robot", 120, 2)
        screen.blit(guard, guard.get_rect(midbottom=(480, 226)))
        person = self.art.get("person", 96, 5 + int(now * 6) % 4)
        screen.blit(person, person.get_rect(midbottom=(int(self.walker), 530)))

    def draw_words(self, screen: pygame.Surface) -> None:
        """Draw the text over the scene."""
        if self.speech:
            text = self._font.render(self.speech, True, (20, 20, 30))
            bubble = text.get_rect(midtop=(480, 26)).inflate(28, 20)
            bubble.clamp_ip(screen.get_rect())
            pygame.draw.rect(screen, (250, 248, 240), bubble, border_radius=10)
            pygame.draw.polygon(screen, (250, 248, 240), [(470, bubble.bottom), (490, bubble.bottom), (480, 92)])
            screen.blit(text, text.get_rect(center=bubble.center))
        screen.blit(self._small.render(self.status, True, (240, 240, 240)), (10, HEIGHT - 24))


def look(screen: pygame.Surface, spot: pygame.Rect, whole: bool) -> frameshard.Pixels:
    """The frame, or a spot of it, as pixels for a job."""
    seen = screen if whole else screen.subsurface(spot)
    return frameshard.Pixels(pygame.image.tobytes(seen, "RGB"), *seen.get_size())


def budgets_mb(budget: frameshard.Budget) -> list[float]:
    """The budgets of the questions; none on a device without VRAM."""
    room = budget.full_bytes - budget.floor_bytes
    return [(budget.floor_bytes + share * room) / MIB for share in SHARES] if budget.full_bytes else []


def word_in(answer: str, words: list[str]) -> str | None:
    """The sprite that a sentence names, if it names one."""
    heard = answer.lower()
    return next((word for word in sorted(words, key=len, reverse=True) if word in heard), None)


def interpret(prompts: Prompts, what: str, answer: str, words: list[str]) -> str:
    """The guard's sentence for an answer of the model."""
    if prompts.whole_frame and what == "gate":
        try:
            seen = json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
            verdict = "The way is free." if seen["safe"] else "The way is not free:"
            return f"{verdict} {', '.join(each['name'] for each in seen['objects'])}"
        except (ValueError, KeyError, TypeError):
            return f"I am not sure. {answer.strip()}"
    if prompts.whole_frame:
        return answer.strip()
    word = word_in(answer, words)
    if what == "table":
        return f"There is a {word} on the table." if word else "I cannot tell what lies there."
    return f"No, a {word} is in the way." if word else "I see nothing that I know in the gate."


class Play:
    """The loop: frames, questions, budgets."""

    def __init__(self, sidecar: sync.Sidecar, room: Room, screen: pygame.Surface, budgets: list[float] | None) -> None:
        self.sidecar, self.room, self.screen, self.budgets = sidecar, room, screen, budgets
        self.tally = Tally()
        self.prompts: Prompts | None = None
        self.error: FrameshardError | None = None
        self.job: sync.Job | None = None
        self._what = ""
        self._asked = 0
        self._in_force = self._last = 0.0

    @property
    def ready(self) -> bool:
        """Whether a question can be asked now."""
        return self.prompts is not None and self.budgets is not None and self.job is None

    def ask(self, what: str) -> None:
        """Submit a question about the current frame, and change the budget during the job."""
        assert self.prompts is not None
        spot, text = (TABLE_SPOT, self.prompts.table) if what == "table" else (GATE_SPOT, self.prompts.gate)
        form = json.dumps(json.loads(SCHEMA.read_text())) if self.prompts.whole_frame and what == "gate" else ""
        sampling = frameshard.Sampling(max_tokens=self.prompts.max_tokens, temperature=0.0, json_schema=form)
        image = look(self.screen, spot, self.prompts.whole_frame)
        self.job = self.sidecar.ask(text, images=[image], sampling=sampling)
        self._what = what
        self.room.speech = "Let me look..."
        if self.budgets:
            self.sidecar.set_budget(self.budgets[self._asked % len(self.budgets)])
        self._asked += 1

    def poll(self) -> None:
        for event in self.sidecar.poll():
            if isinstance(event, sync.Ready):
                self.prompts = prompts_for(event.model)
                self.sidecar.budget()
                print(f"{event.model.name} with {event.model.vision}: {self.prompts.about}", flush=True)
            elif isinstance(event, sync.BudgetArrived):
                if event.budget is None:
                    self.error = event.error
                elif self.budgets is None:
                    self.budgets = budgets_mb(event.budget)
            elif isinstance(event, sync.Progressed):
                doing = "looking" if event.progress.phase == "encode" else "reading"
                self.room.speech = f"Let me look... ({doing} {event.progress.done}/{event.progress.total})"
            elif isinstance(event, sync.Finished):
                assert self.prompts is not None
                says = interpret(self.prompts, self._what, event.completion.text, self.room.art.words)
                question = "What lies on the table?" if self._what == "table" else "Is the way free?"
                print(f"You:   {question}\nGuard: {says}\n       (the model: {event.completion.text!r})", flush=True)
                self.tally.said.append(says)
                self.room.speech, self.job = says, None
            elif isinstance(event, sync.Failed):
                self.error, self.job = event.error, None
            elif isinstance(event, sync.BudgetReleased):
                self._in_force = event.released.vram_budget_bytes / MIB
                self.tally.budgets.append(self._in_force)
            elif isinstance(event, sync.BudgetRefused):
                self.error = event.error
            elif isinstance(event, sync.Closed):
                self.error = self.error or event.error or ConnectionLost("the sidecar was shut down")

    def frame(self, clock: pygame.time.Clock) -> None:
        """One frame."""
        start = time.perf_counter()
        if self._last:
            (self.tally.beside if self.job else self.tally.alone).append((start - self._last) * 1e3)
        self._last = start
        self.room.walker = 420 + 300 * (0.5 - abs((start / 6) % 1 - 0.5)) * 2 - 150
        lease = f"{self._in_force:.0f} MiB" if self._in_force else "all it wants"
        self.room.status = f"{clock.get_fps():.0f} frames/s   VRAM for the guard: {lease}"
        self.room.draw(self.screen, start)
        self.poll()
        self.room.draw_words(self.screen)
        pygame.display.flip()
        clock.tick(60)


def unattended(play: Play, screenshot: str | None) -> int:
    """Asks about each scene; 1 if an answer is missing or a budget did not move."""
    clock = pygame.time.Clock()
    questions = [(what, scene) for scene in SCENES for what in ("table", "gate")]
    deadline = time.monotonic() + 600
    while (questions or play.job) and play.error is None and time.monotonic() < deadline:
        pygame.event.pump()
        if questions and play.ready:
            what, scene = questions.pop(0)
            play.room.set_scene(*scene)
            play.room.draw(play.screen, time.perf_counter())
            play.ask(what)
        play.frame(clock)
        if screenshot and len(play.tally.said) == 2 and play.job is None:
            pygame.image.save(play.screen, screenshot)
            screenshot = None
    for _ in range(30):
        play.frame(clock)
    print(play.tally.summary(), flush=True)
    moved = bool(play.tally.budgets) or not play.budgets
    return int(play.error is not None or len(play.tally.said) != 2 * len(SCENES) or not moved)


def attended(play: Play) -> int:
    clock, scene, what = pygame.time.Clock(), 0, "table"
    play.room.set_scene(*SCENES[scene])
    while play.error is None:
        for event in pygame.event.get():
            if event.type == pygame.QUIT or (event.type == pygame.KEYDOWN and event.key == pygame.K_ESCAPE):
                return 0
            if event.type != pygame.KEYDOWN or not play.ready:
                continue
            if event.key == pygame.K_SPACE:
                play.ask(what)
                what = "gate" if what == "table" else "table"
            elif event.key in (pygame.K_LEFT, pygame.K_RIGHT):
                scene = (scene + (1 if event.key == pygame.K_RIGHT else -1)) % len(SCENES)
                play.room.set_scene(*SCENES[scene])
        play.frame(clock)
    return 1


def megabytes(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def play_scene() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", metavar="PATH|NAME")
    parser.add_argument("--mmproj", metavar="PATH|NAME", help="its vision tower (sprites, or the model's own)")
    parser.add_argument("--device", default="emulated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--budgets", type=megabytes, metavar="MB,MB", help="MiB that the game allows, for each question"
    )
    parser.add_argument("--unattended", action="store_true", help="ask about three scenes and leave")
    parser.add_argument("--screenshot", metavar="FILE", help="of the second answer, when unattended")
    args = parser.parse_args()
    if args.screenshot:
        try:
            open(args.screenshot, "ab").close()  # fails now and not after the answers
        except OSError as error:
            parser.error(f"--screenshot: {error}")
    if args.unattended:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    mmproj = args.mmproj or models.mmproj_of(args.model) or models.SPRITES
    model, tower = models.resolve(args.model), models.resolve(mmproj)
    art = models.sprites_dir() / "art" if mmproj == models.SPRITES else models.resolve(models.SPRITES).parent / "art"
    options = {"device": args.device, "n_ctx": 1024, "n_ubatch": 128, "n_parallel": 1, "n_threads": args.threads}
    pygame.display.init()
    pygame.font.init()
    screen = pygame.display.set_mode(SIZE)
    pygame.display.set_caption("frameshard: a guard who looks")
    with sync.Sidecar.launch(model, mmproj=tower, log=subprocess.DEVNULL, **options) as sidecar:
        play = Play(sidecar, Room(Art(art)), screen, args.budgets)
        code = unattended(play, args.screenshot) if args.unattended else attended(play)
    pygame.quit()
    if play.error is not None:
        raise play.error
    return code


def main() -> int:
    try:
        return play_scene()
    except FrameshardError as error:
        print(f"{error.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
