"""``frameshard chat``: talks to a model in the terminal, through a sidecar as a game does.

Input is read while an answer streams. So a command such as ``/budget 128`` acts during an answer; a question waits
until the answer is complete. The line at the prompt can be edited if Python has readline. Answers go to standard
output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

from frameshard.cli import common, interrupt, progress
from frameshard.errors import BadArgument, ConnectionLost, EngineDied, FrameshardError, JobCancelled
from frameshard.wire.messages import Sampling

if TYPE_CHECKING:
    import trio

    import frameshard

CONVERSATION = "terminal"
PROMPT = "> "
HELP = """\
/budget SIZE   give the model so much VRAM from now on, also in mid-answer:
               64, 1.5GiB; 0 is no limit
/budget        the budget in force and its bounds
/stats         what is where, and the rate
/forget        begin the conversation anew
/quit          leave; so does Ctrl-D. Ctrl-C ends the answer, or leaves when
               there is none"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal and change its VRAM while it answers",
        description="Starts a sidecar and talks to it. While it answers, /budget 128 takes VRAM\n"
        "away or gives it back.",
        epilog=f"in the conversation:\n{HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common.add_model_args(parser)
    common.add_context_args(parser)
    parser.add_argument(
        "--vram-budget", type=common.size, default=0, metavar="SIZE", help="VRAM for all it does (no limit)"
    )
    parser.add_argument("--system", metavar="TEXT", help="who the model is, such as 'You are a grumpy blacksmith.'")
    of = partial(common.accepted, Sampling)
    parser.add_argument("--max-tokens", type=of("max_tokens", int), default=512, metavar="N", help="of an answer (512)")
    parser.add_argument(
        "--temperature",
        type=of("temperature", float),
        default=0.8,
        metavar="T",
        help="0 always takes the likeliest (0.8)",
    )
    parser.add_argument("--seed", type=of("seed", int), metavar="N", help="the same seed gives the same answers")
    parser.set_defaults(run=run, parallel=1)


def run(args: argparse.Namespace) -> int:
    import frameshard
    from frameshard import models

    sampling = Sampling(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    scope = frameshard.launch(
        models.resolve(args.model),
        vram_budget_mb=args.vram_budget / 2**20,
        device=args.device,
        n_ctx=args.ctx,
        n_parallel=args.parallel,
        n_ubatch=args.ubatch,
        kv_type=args.kv_type,
        n_threads=args.threads,
        name="chat",
        on_loading=progress.loading,
    )

    async def main() -> Chat:
        async with scope as client:
            chat = Chat(client, args.system, sampling, show=not args.json)
            await chat.run()
            return chat

    chat = interrupt.run_async(main)
    if args.json:
        common.emit_json({"answers": chat.answers})
    return 0


class Chat:
    """One conversation. `answers` collects the answers for ``--json``."""

    def __init__(self, client: frameshard.Client, system: str | None, sampling: Sampling, show: bool) -> None:
        self.answers: list[dict[str, object]] = []
        self._client = client
        self._system = system
        self._sampling = sampling
        self._show = show
        self._terminal = show and sys.stdin.isatty()
        self._input = Input(edit=self._terminal)
        self._unanswered = 0
        self._stream: frameshard.Stream | None = None
        self._mid_line = False
        self._error: BaseException | None = None

    async def run(self) -> None:
        """Runs until the input ends, until ``/quit``, or until Ctrl-C while no answer streams.

        :raises FrameshardError: the sidecar or the connection failed.
        """
        import trio

        self._idle = trio.Event()
        self._idle.set()
        info = await self._client.model_info()
        self._note(f"{info.name} on {info.device}, {info.n_ctx} tokens of context\n/help for commands")
        # The channel has no buffer. So the reader passes on a question only when the previous answer is complete, and a
        # command after a question acts during its answer.
        send, receive = trio.open_memory_channel[str](0)
        with self._input, trio.open_signal_receiver(signal.SIGINT) as interrupts:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_interrupts, interrupts, nursery.cancel_scope)
                nursery.start_soon(self._read, send)
                await self._answer_all(receive)
                nursery.cancel_scope.cancel()
        if self._error is not None:
            raise self._error

    async def _watch_interrupts(self, interrupts: AsyncIterator[int], scope: trio.CancelScope) -> None:
        async for _ in interrupts:
            if self._stream is None:
                self._error = KeyboardInterrupt()
                scope.cancel()
                return
            stream, self._stream = self._stream, None  # a second Ctrl-C ends the command
            await stream.cancel()

    async def _read(self, questions: trio.MemorySendChannel[str]) -> None:
        import trio

        async with questions:
            while (line := await self._input.line(self._idle)) is not None:
                if line.split()[:1] == ["/quit"]:
                    return
                if line.startswith("/"):
                    try:
                        await self._command(*line[1:].split())
                    except FrameshardError as error:
                        self._note(error.message)
                elif line:
                    if not self._unanswered:
                        self._idle = trio.Event()
                    self._unanswered += 1
                    await questions.send(line)
                    continue
                if self._stream is None:
                    self._ask_for_input()

    async def _answer_all(self, questions: trio.MemoryReceiveChannel[str]) -> None:
        self._ask_for_input()
        async for question in questions:
            try:
                await self._answer(question)
            except JobCancelled:
                self._note("cancelled")
            except FrameshardError as error:
                if not self._terminal or isinstance(error, (ConnectionLost, EngineDied)):
                    self._error = error
                    return
                self._note(error.message)
            finally:
                self._stream = None
                self._unanswered -= 1
                if not self._unanswered:
                    self._idle.set()
            self._ask_for_input()

    async def _answer(self, question: str) -> None:
        stream = self._client.ask(question, conversation=CONVERSATION, system=self._system, sampling=self._sampling)
        async with stream:
            self._stream = stream
            async for delta in stream:
                if self._show:
                    print(delta.text, end="", flush=True)
                    self._mid_line = not delta.text.endswith("\n")
        result = stream.result
        assert result is not None
        if self._show:
            print(flush=True)
            self._mid_line = False
        rate = result.n_generated / result.decode_s if result.decode_s else 0.0
        self.answers.append(
            {
                "question": question,
                "answer": result.text,
                "reason": result.reason,
                "n_prompt": result.n_prompt,
                "n_generated": result.n_generated,
                "prefill_s": result.prefill_s,
                "decode_tps": rate,
            }
        )
        if self._terminal:
            self._note(f"{result.n_generated} tokens, {rate:.1f} tokens/s")

    async def _command(self, name: str = "", argument: str = "", *rest: str) -> None:
        if name == "budget" and argument:
            size = common.parse_size(" ".join([argument, *rest]))
            changed = await self._client.set_budget(size / 2**20)
            observed = changed.observed.observed_bytes if changed.observed else None
            driver = "" if observed is None else f"; the driver counts {common.format_size(observed)}"
            self._note(
                f"budget {budget_text(changed.vram_budget_bytes)}: {common.format_size(changed.used_bytes)} in use "
                f"after {changed.seconds * 1e3:.1f} ms{driver}"
            )
        elif name == "budget":
            budget = await self._client.budget()
            self._note(
                f"budget {budget_text(budget.vram_budget_bytes)}; "
                f"the floor is {common.format_size(budget.floor_bytes)}, "
                f"from {common.format_size(budget.full_bytes)} on everything is resident"
            )
        elif name == "stats":
            self._note(stats_text(await self._client.stats()))
        elif name == "forget":
            self._client.forget(CONVERSATION)
            self._note("forgotten")
        elif name == "help":
            self._note(HELP)
        else:
            raise BadArgument(f"no command /{name}; /help lists those there are")

    def _ask_for_input(self) -> None:
        if self._terminal and not self._input.edits:
            print(PROMPT, end="", file=sys.stderr, flush=True)

    def _note(self, text: str) -> None:
        lines = (common.wrapped(line, hanging=2) if len(line) > common.WIDTH else line for line in text.splitlines())
        print("\n" * self._mid_line + "\n".join(lines), file=sys.stderr, flush=True)
        self._mid_line = False


class Input:
    """Reads lines of standard input. It is a context manager: its end does not wait for the return key, and restores
    the settings of the terminal.

    With ``edit`` readline edits the lines, if Python has it (not on Windows, not in a bundle). It does not while an
    answer streams, because the answer would be written into the line. `edits` is true if readline is used.
    """

    def __init__(self, *, edit: bool) -> None:
        self.edits = edit and sys.stdout.isatty() and _find_readline()
        self._lines: collections.deque[str] = collections.deque()
        self._rest = b""
        self._ended = False

    def __enter__(self) -> Input:
        if sys.platform != "win32" and self.edits:
            import termios

            self._settings = termios.tcgetattr(0)
        return self

    def __exit__(self, *_: object) -> None:
        if sys.platform != "win32" and self.edits:
            import termios

            # A thread may still be in readline, which changes the settings of the terminal.
            termios.tcsetattr(0, termios.TCSADRAIN, self._settings)

    async def line(self, idle: trio.Event) -> str | None:
        """The next line without spaces around it; ``None`` at the end of input.

        :param idle: set while no answer streams.
        """
        import trio

        while not self._lines and not self._ended:
            if self.edits and idle.is_set():
                line = await trio.to_thread.run_sync(_edited_line, abandon_on_cancel=True)
                self._ended = line is None
                if line is not None:
                    self._lines.append(line.strip())
            elif await self._readable(idle):
                self._take(await self._read())
        return self._lines.popleft() if self._lines else None

    async def _readable(self, idle: trio.Event) -> bool:
        """Waits for input, or with readline until no answer streams."""
        import trio

        found = False

        async def wait(scope: trio.CancelScope) -> None:
            nonlocal found
            try:
                await trio.lowlevel.wait_readable(0)
            except OSError:  # a regular file is always ready; on Windows only sockets can be waited for
                await trio.lowlevel.checkpoint()
            found = True
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, nursery.cancel_scope)
            if self.edits:
                await idle.wait()
                nursery.cancel_scope.cancel()
        return found

    async def _read(self) -> bytes:
        import trio

        if sys.platform == "win32":
            return await trio.to_thread.run_sync(os.read, 0, 1 << 16, abandon_on_cancel=True)
        return os.read(0, 1 << 16)

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data:
            self._ended = True
            lines += [self._rest] if self._rest else []
        self._lines += [line.decode(errors="replace").strip() for line in lines]


def _find_readline() -> bool:
    """Imports readline, so that :func:`input` edits lines and the arrow keys bring earlier ones back.

    :returns: whether Python has it.
    """
    try:
        import readline  # noqa: F401
    except ImportError:
        return False
    return True


def _edited_line() -> str | None:
    """Reads a line with readline. Runs in a thread."""
    try:
        return input(PROMPT)
    except EOFError:
        print()
        return None


def budget_text(n_bytes: int) -> str:
    return common.format_size(n_bytes) if n_bytes else "without limit"


def stats_text(stats: frameshard.Stats) -> str:
    """The engine's figures as a few lines of text. Without a shard device there are no figures of VRAM."""
    engine = stats.engine
    if engine is None:
        return f"the engine is {stats.broker.engine}"
    lines = [f"{engine['tokens_per_second']:.1f} tokens/s, {stats.broker.engine_restarts} engine restarts"]
    if "used_bytes" in engine:
        used, peak, resident, streamed, cpu, ring, buffers = (
            common.format_size(engine[f"{name}_bytes"])
            for name in ("used", "peak", "resident", "streamed", "cpu", "ring", "buffers")
        )
        lines += [
            f"budget {budget_text(engine['budget_bytes'])}, in use {used}, at most {peak} so far",
            f"weights: {resident} resident, {streamed} streamed, {cpu} on the CPU",
            f"ring {ring}, KV and compute buffers {buffers}",
        ]
    return "\n".join(lines)
