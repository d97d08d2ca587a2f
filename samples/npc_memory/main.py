"""An innkeeper who remembers what you told her, also tomorrow: her memories are saved beside the game's save.

    python samples/npc_memory/main.py                 talk to her; an empty line goes to bed, "leave" ends
    python samples/npc_memory/main.py --unattended    the lines below are said for you

At night the game saves, the sidecar ends, and what was said is forgotten. The next morning another sidecar starts. For
each line the game looks for the memories that resemble it most, and only these are in the prompt. The sentence encoder
runs on the CPU and takes no VRAM. The exit status of an unattended run is 1 if a wrong memory was found.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import zipfile
from pathlib import Path

import encoder
import numpy as np
import trio

import frameshard
from frameshard import models
from frameshard.errors import BadArgument, ContextOverflow, FrameshardError

MIRA = "You are Mira, the innkeeper of the Gilded Tankard. You answer a guest in one friendly sentence."
EVENING = (
    "My name is Alric. I am looking for my dog, who is called Biscuit.",
    "I must not eat mushrooms, they make me ill.",
    "I have hidden a silver key under the old mill.",
    "The weather was dreadful on the road.",
)
MORNING = {
    "Can I have some of the forest stew?": 1,
    "Where did I leave my key?": 2,
    "Did anybody see my pet?": 0,
}
"""Questions, and the line of the evening that each needs."""

RECALLED = 2
LIKENESS = 0.2
"""At most so many memories are put into a prompt, and none that resembles the line less."""

MOST_TEXTS = 64
"""At most so many texts are in one call of `embed`."""

ANSWER = frameshard.Sampling(max_tokens=40, temperature=0.0)


class Memories:
    """Texts and their embeddings, kept in a file.

    :raises BadArgument: the file has something else, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.encoder = ""
        """Name of the file of the encoder that made the rows."""
        self.texts: list[str] = []
        self.rows: list[np.ndarray] = []
        try:
            with path.open("ab"):  # fails now and not at night
                pass
            if path.stat().st_size:
                self._load()
        except (OSError, ValueError, LookupError, zipfile.BadZipFile) as error:
            raise BadArgument(f"{path} cannot keep her memories: {error}") from None

    def _load(self) -> None:
        with self.path.open("rb") as file:
            saved = np.load(file)
            self.encoder, self.texts, self.rows = str(saved["encoder"]), saved["texts"].tolist(), list(saved["rows"])

    async def use(self, sidecar: frameshard.Client) -> None:
        """Embeds the texts anew if another encoder made the rows: rows of different encoders cannot be compared."""
        encoder = (await sidecar.model_info()).embedder
        if encoder != self.encoder:
            starts = range(0, len(self.texts), MOST_TEXTS)
            parts = [await sidecar.embed(self.texts[start : start + MOST_TEXTS]) for start in starts]
            self.encoder, self.rows = encoder, [row for part in parts for row in part]

    def add(self, text: str, row: np.ndarray) -> None:
        self.texts.append(text)
        self.rows.append(row)

    def recall(self, row: np.ndarray) -> list[tuple[float, str]]:
        """The memories that resemble a text most, with their likeness, the closest first."""
        if not self.rows:
            return []
        likeness = np.stack(self.rows).astype(np.float32) @ row.astype(np.float32)
        closest = np.argsort(-likeness)[:RECALLED]
        return [(float(likeness[i]), self.texts[i]) for i in closest if likeness[i] >= LIKENESS]

    def save(self) -> None:
        texts, rows = np.array(self.texts, str), np.array(self.rows, np.float16)
        with self.path.open("wb") as file:  # np.savez would add .npz to another name
            np.savez(file, encoder=self.encoder, texts=texts, rows=rows)


async def answer(sidecar: frameshard.Client, memories: Memories, line: str) -> list[tuple[float, str]]:
    """Prints Mira's answer to a line, and remembers the line.

    :returns: the memories that she was reminded of.
    """
    (row,) = await sidecar.embed([line])
    recalled = memories.recall(row)
    for likeness, text in recalled:
        print(f"  (she remembers, {likeness:.2f}: {text})")
    known = "".join(f" The guest once said: {text}" for _, text in recalled)
    said = await sidecar.ask(line, system=MIRA + known, sampling=ANSWER).completed()
    print(f"Mira: {said.text.strip()}", flush=True)
    memories.add(line, row)
    return recalled


async def day(args: argparse.Namespace, lines: list[str] | None, path: Path) -> list[list[tuple[float, str]]] | None:
    """One day, with a sidecar of its own.

    :param lines: what the guest says; None: what is typed.
    :returns: for each line, what Mira was reminded of; None if the guest leaves.
    """
    memories = Memories(path)
    options = {"device": args.device, "n_ctx": 1024, "n_parallel": 1, "embedder": models.resolve(args.embedder)}
    async with frameshard.launch(models.resolve(args.model), **options) as sidecar:
        await memories.use(sidecar)
        print(f"--- a new day; Mira remembers {len(memories.texts)} things")
        reminded = []
        said = iter(lines or ())
        try:
            while line := next(said, "") if lines is not None else await typed_line():
                if line == "leave":
                    break
                if lines is not None:
                    print(f"You: {line}")
                try:
                    reminded.append(await answer(sidecar, memories, line))
                except ContextOverflow as error:
                    print(f"  (too much to say at once: {error})", flush=True)
        finally:  # also after Ctrl-C or an error
            memories.save()
        print(f"--- saved {len(memories.texts)} memories in {path.stat().st_size} bytes")
        return None if line == "leave" else reminded


async def typed_line() -> str:
    """Read in a thread, so that the client can answer the sidecar meanwhile. Ctrl-C leaves the thread behind."""
    print("You: ", end="", flush=True)
    return await trio.to_thread.run_sync(read_line, abandon_on_cancel=True)


def read_line() -> str:
    """A line of standard input; "leave" at its end."""
    if sys.stdin is None:  # it was closed before the start
        return "leave"
    # Not through the buffer: a thread that is left behind would hold its lock, without which Python cannot end.
    line = sys.stdin.buffer.raw.readline()
    return line.decode(sys.stdin.encoding, "replace").strip() if line else "leave"


async def play(args: argparse.Namespace) -> int:
    path = Path(args.save) if args.save else Path(tempfile.mkdtemp()) / "mira.npz"
    if not args.unattended:
        while await day(args, None, path) is not None:
            pass
        return 0
    await day(args, list(EVENING), path)
    reminded = await day(args, list(MORNING), path)
    assert reminded is not None
    closest = [found[0][1] if found else "" for found in reminded]
    right = sum(text == EVENING[number] for text, number in zip(closest, MORNING.values(), strict=True))
    print(f"{right} of {len(MORNING)} questions brought the right memory back")
    return 0 if right == len(MORNING) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a known name (smollm2-135m)")
    parser.add_argument("--embedder", default=models.ENCODER, help=f"likewise, a sentence encoder ({models.ENCODER})")
    parser.add_argument("--device", default="auto", help="auto: the best GPU, else the CPU")
    parser.add_argument("--save", metavar="FILE", help="where her memories are kept (a new file)")
    parser.add_argument("--unattended", action="store_true", help="say a few lines on two days and leave")
    args = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for an encoding that lacks letters of the model's answers
    try:
        if args.embedder == models.ENCODER and not models.path_of(models.ENCODER).is_file():
            encoder.build(models.path_of(models.ENCODER))
        return trio.run(play, args)
    except FrameshardError as error:
        print(f"{error.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has ended, as in "main.py | head". Python's flush at exit must not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
