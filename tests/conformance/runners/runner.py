"""The conformance runner of the Python client. tests/conformance/README.md describes its input and output."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio

import frameshard
from frameshard import errors
from frameshard.frame import FrameBlock

Event = dict[str, Any]
OBSERVED = ("observed_bytes", "host_observed_bytes", "seconds")
MIB = 1 << 20
JOB_OPTIONS = (
    "conversation",
    "system",
    "timeline",
    "window",
    "priority",
    "deadline_ms",
    "sentences",
    "warm_up",
    "thinking",
    "thinking_tokens",
    "template_keywords",
    "local_only",
)
JOB_OPTIONS += ("adapters", "tool_choice")
MODES = ("prioritize_graphics", "balance", "prioritize_compute")


class Session:
    """One client, in a task of its own. It passes events on one by one, so a runner that is not polled reads slowly."""

    def __init__(self, scope: frameshard.ClientScope, nursery: trio.Nursery) -> None:
        self.send, self.events = trio.open_memory_channel[Event](0)
        self.error: frameshard.FrameshardError | None = None
        self._scope = scope
        self._client: frameshard.Client | None = None
        self._tasks: trio.Nursery | None = None
        self._waiting: list[Callable[[], Awaitable[None]]] = []
        self._cancel = trio.CancelScope()
        self._over = trio.Event()
        self._numbers = 0
        self._loads_seen, self._loads = trio.open_memory_channel[frameshard.Loading](math.inf)
        scope.on_loading = self._loads_seen.send_nowait
        self._jobs: dict[int, trio.CancelScope | frameshard.Stream] = {}
        self._given: dict[int, dict[str, Any]] = {}
        self._turns: dict[str, trio.Event] = {}
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        with self._cancel:
            try:
                async with self._scope as client:
                    await self._serve(client)
                    await client.model_info()  # raises the reason of the end
            except frameshard.FrameshardError as error:
                self.error = error
            self.error = self.error or errors.ConnectionLost("the client is closed")
            self._client = None
            async with trio.open_nursery() as self._tasks:
                for task in self._waiting:
                    self._tasks.start_soon(task)
            await self._say("closed", **_why(self.error))
        self._over.set()

    async def _serve(self, client: frameshard.Client) -> None:
        """Runs until the client is lost, and each job and request has ended."""
        changes, notices = client.engine_changes(), client.notices()
        model = await client.model_info()
        with contextlib.suppress(trio.WouldBlock):
            while True:
                await self._say_loading(self._loads.receive_nowait())
        await self._say(
            "ready", detail=dataclasses.asdict(model), floor_bytes=model.floor_bytes, full_bytes=model.full_bytes
        )
        self._client = client
        async with trio.open_nursery() as self._tasks:
            while self._waiting:
                self._tasks.start_soon(self._waiting.pop(0))
            self._tasks.start_soon(self._hear_notices, notices)
            self._tasks.start_soon(self._hear_loads)
            async for change in changes:
                await self._say("engine", state=change.state, restarts=change.restarts)
            self._loads_seen.close()

    def _start(self, task: Callable[[], Awaitable[None]]) -> None:
        if self._tasks is None:
            self._waiting.append(task)
        else:
            self._tasks.start_soon(task)

    async def _hear_notices(self, notices: trio.MemoryReceiveChannel[frameshard.Notice]) -> None:
        async for notice in notices:
            await self._say(
                "notice",
                kind=notice.kind,
                budget_bytes=notice.vram_budget_bytes,
                seconds=notice.seconds,
                text=notice.detail,
                host_budget_bytes=notice.host_budget_bytes,
            )

    async def _hear_loads(self) -> None:
        async for loading in self._loads:
            await self._say_loading(loading)

    async def _say_loading(self, loading: frameshard.Loading) -> None:
        await self._say("loading", stage=loading.stage, done=loading.done, total=loading.total)

    async def _say(self, kind: str, /, **fields: Any) -> None:
        await self.send.send({"type": kind, **fields})

    async def close(self) -> None:
        self._cancel.cancel()
        await self._over.wait()

    def _number(self) -> int:
        if self.error is not None:
            raise self.error
        self._numbers += 1
        return self._numbers

    def client(self) -> frameshard.Client:
        if self._client is None:
            raise self.error or errors.ConnectionLost("there is no client")
        return self._client

    # ---- jobs -------------------------------------------------------------------------------------------------------

    def job(self, options: dict[str, Any], turn: str | None, begin: Callable[..., frameshard.Stream]) -> int:
        sampling = dict(options.get("sampling", {}))
        for name in ("stop", "choices"):
            sampling[name] = tuple(sampling.get(name, ()))
        sampling["logit_bias"] = tuple(frameshard.LogitBias(**bias) for bias in sampling.get("logit_bias", ()))
        given = {name: options[name] for name in JOB_OPTIONS if name in options}
        given["sampling"] = frameshard.Sampling(**sampling)
        given["tools"] = [frameshard.Tool(**tool) for tool in options.get("tools", ())]
        number = self._number()
        before, after = self._turns.get(turn or ""), trio.Event()
        if turn is not None:
            self._turns[turn] = after
        self._jobs[number] = scope = trio.CancelScope()
        self._given[number] = given

        aside, heard = trio.open_memory_channel[Event](math.inf)
        relayed = trio.Event()

        async def relay() -> None:
            async for event in heard:
                await self.send.send({**event, "job": number, "timeline": options.get("timeline", 0)})
            relayed.set()

        async def answer() -> None:
            about = {"job": number, "timeline": options.get("timeline", 0)}
            end: Event = {"type": "cancelled"}
            with scope:
                try:
                    if before is not None:
                        await before.wait()
                    stream = begin(self.client(), **given)
                    stream.begin()
                    self._jobs[number] = stream
                    async with stream:
                        stream.on_paused = lambda paused: aside.send_nowait({"type": "paused" if paused else "resumed"})
                        stream.on_thought = lambda thought: aside.send_nowait(
                            {"type": "thought", "text": thought.text, "tokens": thought.tokens}
                        )
                        stream.on_tool_call = lambda call: aside.send_nowait(
                            {"type": "tool_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
                        )
                        async for delta in stream:
                            marked = {"text": delta.text, "tokens": delta.tokens, "sentence_end": delta.sentence_end}
                            await self._say("text", **marked, **about)
                    assert stream.result is not None
                    end = {"type": "done", **dataclasses.asdict(stream.result)}
                except errors.JobCancelled:
                    pass
                except frameshard.FrameshardError as error:
                    end = {"type": "failed", **_why(error)}
            after.set()
            aside.close()
            await relayed.wait()
            await self.send.send({**end, **about})
            del self._jobs[number], self._given[number]

        self._start(answer)
        self._start(relay)
        return number

    async def cancel(self, job: int) -> None:
        found = self._jobs.get(job)
        if found is None:
            raise errors.UnknownJob(f"no job {job}")
        if isinstance(found, trio.CancelScope):
            found.cancel()
        else:
            await found.cancel()

    def set_priority(self, job: int, priority: int) -> None:
        found = self._jobs.get(job)
        if found is None:
            raise errors.UnknownJob(f"no job {job}")
        if isinstance(found, frameshard.Stream):
            found.set_priority(priority)
        else:
            self._given[job]["priority"] = priority

    def forget(self, conversation: str) -> None:
        before, after = self._turns.get(conversation), trio.Event()
        self._turns[conversation] = after

        async def forget() -> None:
            if before is not None:
                await before.wait()
            self.client().forget(conversation)
            after.set()

        self._start(forget)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def request(self, ask: Callable[[frameshard.Client, int], Awaitable[Event | None]]) -> int:
        number = self._number()

        async def answer() -> None:
            try:
                event = await ask(self.client(), number)
                if event is not None:
                    await self.send.send({"request": number, **event})
            except frameshard.FrameshardError as error:
                await self._say("refused", request=number, **_why(error))

        self._start(answer)
        return number

    def set_lease(self, lease: dict[str, Any]) -> int:
        terms = dict(lease)
        budget_mb, floor_mb = terms.pop("vram_budget_bytes", 0) / MIB, terms.pop("floor_bytes", 0) / MIB
        if "host_budget_bytes" in terms:
            terms["host_budget_mb"] = terms.pop("host_budget_bytes") / MIB
        number = self._number()
        said, heard = trio.open_memory_channel[Event](math.inf)

        def say(kind: str, answer: Any) -> None:
            said.send_nowait({"type": kind, "request": number, **_budget(answer)})

        async def change() -> None:
            with said:
                try:
                    result = await self.client().set_budget(
                        budget_mb,
                        floor_mb=floor_mb,
                        on_lease=lambda grant: say("lease", grant),
                        on_released=lambda result: say("budget_released", result),
                        **terms,
                    )
                    seen = result.observed
                    assert seen is not None
                    observed = {name: getattr(seen, name) for name in OBSERVED}
                    said.send_nowait({"type": "budget_observed", "request": number, **observed})
                except frameshard.FrameshardError as error:
                    said.send_nowait({"type": "refused", "request": number, **_why(error)})

        async def relay() -> None:
            async for event in heard:
                await self.send.send(event)

        self._start(change)
        self._start(relay)
        return number


def _why(error: frameshard.FrameshardError | None) -> Event:
    return {"status": error.name, "detail": dict(error.detail)} if error else {"status": "ok", "detail": {}}


def _told(messages: list[list[Any]]) -> list[frameshard.ChatMessage]:
    told = []
    for role, content, *more in messages:
        (behind,) = more or [""]
        calls, call_id = ((), behind) if isinstance(behind, str) else (behind, "")
        told.append(frameshard.ChatMessage(role, content, tuple(frameshard.ToolCall(*call) for call in calls), call_id))
    return told


def _message(message: frameshard.ChatMessage) -> list[Any]:
    calls = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    behind = calls or message.tool_call_id
    return [message.role, message.content, *([behind] if behind else [])]


def _budget(answer: Any) -> Event:
    return {**dataclasses.asdict(answer), "budget_bytes": answer.vram_budget_bytes}


async def _kv(answer: Awaitable[frameshard.Kv]) -> Event:
    kv = await answer
    return {"type": "kv", "n_tokens": kv.n_tokens, "file_bytes": kv.file_bytes, "text": kv.detail}


def _check(lease: dict[str, Any]) -> None:
    if not 0.001 <= lease.get("timeout_s", 5) <= 60:
        raise errors.BadArgument("timeout_s must be from 0.001 to 60")


class Runner:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        if self._session is None:
            raise errors.ConnectionLost("there is no client")
        return self._session

    async def obey(self, command: dict[str, Any]) -> Event:
        handler = getattr(self, "do_" + command.pop("do"))
        try:
            return {"ok": True, **(await handler(**command) or {})}
        except frameshard.FrameshardError as error:
            return {"ok": False, "error": error.name}

    async def do_launch(self, options: dict[str, Any]) -> None:
        options = dict(options)
        options.pop("python")  # the sidecar runs with this Python
        if "engine" in options:
            options["engine"] = tuple(options["engine"])
        budget_mb = options.pop("vram_budget_bytes", 0) / MIB
        scope = frameshard.launch(options.pop("model"), vram_budget_mb=budget_mb, name="Python runner", **options)
        self._session = Session(scope, self._nursery)

    async def do_connect(self, file: str) -> None:
        self._session = Session(frameshard.connect(file, name="Python runner"), self._nursery)

    async def do_close(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = None

    async def do_ask(self, text: str, options: dict[str, Any] | None = None) -> Event:
        options = options or {}
        turn = options.get("conversation")
        return {"job": self.session.job(options, turn, lambda client, **given: client.ask(text, **given))}

    async def do_tool_results(self, results: list[list[str]], options: dict[str, Any]) -> Event:
        turn = options.get("conversation")
        told = dict(results)
        return {"job": self.session.job(options, turn, lambda client, **given: client.tool_results(told, **given))}

    async def do_chat(self, messages: list[list[Any]], options: dict[str, Any] | None = None) -> Event:
        told = _told(messages)
        return {"job": self.session.job(options or {}, None, lambda client, **given: client.chat(told, **given))}

    async def do_complete(self, prompt: str, options: dict[str, Any] | None = None) -> Event:
        return {"job": self.session.job(options or {}, None, lambda client, **given: client.complete(prompt, **given))}

    async def do_cancel(self, job: int) -> None:
        await self.session.cancel(job)

    async def do_set_priority(self, job: int, priority: int) -> None:
        self.session.set_priority(job, priority)

    async def do_forget(self, conversation: str) -> None:
        self.session.forget(conversation)

    async def do_history(self, conversation: str) -> Event:
        history = self.session.client().history(conversation)
        return {"messages": [_message(message) for message in history]}

    async def do_get_http(self) -> Event:
        client = self.session.client()
        return {"data": [client.http_url, client.http_key]}

    async def do_save(self, conversation: str) -> Event:
        return {"data": self.session.client().save(conversation).hex()}

    async def do_load(self, data: str, conversation: str) -> Event:
        return dataclasses.asdict(self.session.client().load(bytes.fromhex(data), conversation=conversation))

    async def do_save_kv(self, conversation: str, path: str) -> Event:
        return {"request": self.session.request(lambda client, number: _kv(client.save_kv(conversation, path)))}

    async def do_load_kv(self, path: str, conversation: str) -> Event:
        return {
            "request": self.session.request(lambda client, number: _kv(client.load_kv(path, conversation=conversation)))
        }

    async def do_set_lease(self, lease: dict[str, Any]) -> Event:
        _check(lease)
        return {"request": self.session.set_lease(lease)}

    async def do_get_budget(self) -> Event:
        async def ask(client: frameshard.Client, number: int) -> Event:
            return {"type": "budget", **_budget(await client.budget())}

        return {"request": self.session.request(ask)}

    async def do_load_adapter(self, name: str, path: str) -> Event:
        return self._adapters(lambda client: client.adapter_load(name, path))

    async def do_unload_adapter(self, name: str) -> Event:
        return self._adapters(lambda client: client.adapter_unload(name))

    def _adapters(self, change: Callable[[frameshard.Client], Awaitable[frameshard.Adapters]]) -> Event:
        async def ask(client: frameshard.Client, number: int) -> Event:
            answer = dataclasses.asdict(await change(client))
            return {
                "type": "adapters",
                "detail": {"adapters": answer["adapters"]},
                "floor_bytes": answer["floor_bytes"],
            }

        return {"request": self.session.request(ask)}

    async def do_get_stats(self) -> Event:
        async def ask(client: frameshard.Client, number: int) -> Event:
            stats = await client.stats()
            engine = None if stats.engine is None else dict(stats.engine)
            return {"type": "stats", "detail": {"broker": dataclasses.asdict(stats.broker), "engine": engine}}

        return {"request": self.session.request(ask)}

    async def do_get_caps(self) -> Event:
        async def ask(client: frameshard.Client, number: int) -> Event:
            return {"type": "caps", **dataclasses.asdict(await client.caps_and_requirements())}

        return {"request": self.session.request(ask)}

    async def do_get_plan(self, vram_budget_bytes: int, prompt_tokens: int) -> Event:
        async def ask(client: frameshard.Client, number: int) -> Event:
            (row,) = await client.plan([vram_budget_bytes / MIB], prompt_tokens=prompt_tokens)
            return {"type": "plan", **_budget(row)}

        return {"request": self.session.request(ask)}

    async def do_count_tokens(
        self, prompt: str = "", messages: list[list[Any]] | None = None, tools: Sequence[dict[str, str]] = ()
    ) -> Event:
        content = _told(messages) if messages else prompt
        given = [frameshard.Tool(**tool) for tool in tools]

        async def ask(client: frameshard.Client, number: int) -> Event:
            count = await client.count_tokens(content, tools=given)
            return {"type": "token_count", "n_tokens": count.n_tokens, "n_left": count.n_left}

        return {"request": self.session.request(ask)}

    async def do_embed(self, texts: list[str]) -> Event:
        async def ask(client: frameshard.Client, number: int) -> Event:
            found, n_tokens = await client.embed_counted(texts)
            rows = found.astype(float)
            cosines = [float(rows[0] @ row) for row in rows]
            return {"type": "embeddings", "n_dim": rows.shape[1], "n_tokens": n_tokens, "cosines": cosines}

        return {"request": self.session.request(ask)}

    async def do_set_pacing(self, scheduling_mode: str, target_tokens_per_second: float) -> Event:
        if scheduling_mode not in MODES:
            raise errors.BadArgument(f"scheduling_mode must be one of {', '.join(MODES)}")

        async def ask(client: frameshard.Client, number: int) -> None:
            await client.set_pacing(scheduling_mode, target_tokens_per_second=target_tokens_per_second)  # type: ignore[arg-type]

        return {"request": self.session.request(ask)}

    async def do_get_frame_block(self) -> Event:
        async def ask(client: frameshard.Client, number: int) -> Event:
            with await client.frame_block() as block:
                return {"type": "frame_block", "path": block.path}

        return {"request": self.session.request(ask)}

    async def do_draw(self, path: str, frames: int, target_frame_s: float, gpu_busy_s: float) -> None:
        with FrameBlock(path, target_frame_ms=1000 * target_frame_s) as block:
            for _ in range(frames):
                block.begin()
                block.end(gpu_busy_ms=1000 * gpu_busy_s)

    async def do_shutdown(self) -> None:
        async def ask(client: frameshard.Client, number: int) -> None:
            with contextlib.suppress(errors.ConnectionLost):
                await client.shutdown()

        self.session.request(ask)

    async def do_poll(self, limit: int, timeout_s: float) -> Event:
        receive, events = self.session.events, []
        with trio.move_on_after(timeout_s):
            events.append(await receive.receive())
        with contextlib.suppress(trio.WouldBlock):
            while len(events) < limit:
                events.append(receive.receive_nowait())
        return {"events": events}


async def main() -> None:
    async with trio.open_nursery() as nursery:
        runner = Runner(nursery)
        with open(sys.stdin.fileno(), "rb", closefd=False) as raw:
            async for line in trio.wrap_file(raw):
                answer = await runner.obey(json.loads(line))
                sys.stdout.write(json.dumps(answer) + "\n")
                sys.stdout.flush()
        await runner.do_close()
        nursery.cancel_scope.cancel()


trio.run(main)
