"""The asynchronous client."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio

import frameshard
from frameshard import errors, system
from frameshard.conversation import Turn
from frameshard.testing import fake_engine
from frameshard.wire import messages as m
from frameshard.wire import saves
from frameshard.wire.connection import BEAT_S
from sidecars import DEADLINE_S, GREEDY, WORDS, alive, directory_of, freeze, in_both, in_trio, launch, thaw, until_lost


@in_trio
async def test_a_stream_by_events_and_as_a_whole(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        async with client.ask("one two three") as stream:
            texts = [event.text async for event in stream]
        assert "".join(texts) == stream.text == "one two three"
        assert stream.result is not None
        result = await client.ask("one two three").completed()
        assert (result.text, result.reason, result.n_generated) == ("one two three", "stop", 3)
        async with client.ask("four five") as stream:
            await stream.__anext__()
            assert (await stream.completed()).text == "four five"
            assert (await stream.completed()).text == "four five"


@in_trio
async def test_an_answer_tells_its_seed(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        chosen = await client.ask("one").completed()
        async with client.ask("one", sampling=m.Sampling(seed=chosen.seed ^ 1)) as stream:
            await stream.__anext__()
            assert stream.seed == chosen.seed ^ 1
            assert (await stream.completed()).seed == chosen.seed ^ 1


@in_trio
async def test_a_conversation_remembers_what_was_heard(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:

        async def n_prompt(text: str, conversation: str | None = "inn", system: str | None = None) -> int:
            return (await client.ask(text, conversation=conversation, system=system).completed()).n_prompt

        assert await n_prompt("one two", system="be kind always") == 5
        assert await n_prompt("three") == 5 + 2 + 1
        assert await n_prompt("apart", conversation="road") == 1
        assert await n_prompt("apart", conversation=None) == 1
        # The conversation keeps the part of an answer that was read.
        async with client.ask("a b c d", conversation="inn") as stream:
            await stream.__anext__()
            await stream.__anext__()
        assert stream.text == "a b"
        assert await n_prompt("five") == 9 + 4 + 2 + 1
        client.forget("inn")
        assert await n_prompt("six") == 3 + 1


@in_trio
async def test_a_saved_conversation_goes_on_in_another_sidecar() -> None:
    said = m.ChatMessage
    async with launch(engine=fake_engine(delay_s=0.002)) as client:
        await client.ask("one two", conversation="inn", system="be kind").completed()
        save = client.save("inn")
        assert len(save) < 300
        async with client.ask("a b c", conversation="inn") as stream:
            assert client.save("inn") == save  # no text of the answer was read yet
            await stream.__anext__()
            heard = stream.text
            assert client.history("inn")[-2:] == (said("user", "a b c"), said("assistant", heard))
            with pytest.raises(errors.BadArgument):
                client.load(save, conversation="inn")
        with pytest.raises(errors.BadArgument):
            await client.ask("x" * 70_000, conversation="inn", system="is not kept").completed()
        whole = client.history("inn")
        assert [message.content for message in whole] == ["be kind", "one two", "one two", "a b c", heard]
        os.kill((await client.stats()).broker.pid, signal.SIGKILL)
        await until_lost(client)
        late = client.save("inn")
    async with launch() as client:
        assert client.load(late, conversation="inn") == frameshard.LoadResult(same_model=True, same_template=True)
        assert client.history("inn") == whole
        with pytest.raises(errors.BadSave):
            client.load(late[:-1], conversation="inn")
        with pytest.raises(errors.BadArgument):
            client.load(late, conversation="")
        assert client.history("inn") == whole
        n_prompt = sum(len(message.content.split()) for message in whole) + 1
        assert (await client.ask("on", conversation="inn").completed()).n_prompt == n_prompt
    async with frameshard.launch("another model", engine=fake_engine()) as client:
        assert not client.load(save, conversation="inn").same_model


@in_trio
async def test_a_full_conversation_forgets_its_oldest_exchanges() -> None:
    async with launch(engine=fake_engine(n_ctx=12)) as client:
        for index in range(10):
            result = await client.ask(f"{index} is said", conversation="inn", system="short").completed()
            assert result.text == f"{index} is said"
        assert result.n_prompt == 1 + 6 + 3
        whole = client.history("inn")
        with pytest.raises(errors.ContextOverflow):
            await client.ask("much too much " * 10, conversation="inn", system="is not kept").completed()
        assert client.history("inn") == whole, "what is too long by itself takes no room from others"
        assert (await client.ask("again", conversation="inn").completed()).text == "again"


@in_trio
async def test_a_long_save_is_shortened_in_few_steps() -> None:
    """Each step renders the whole prompt anew."""
    words = "so " * 30
    save = saves.write(saves.save_of([saves.Exchange(words, words)] * 300, "", "", "", "python"))
    steps: list[int] = []
    shorten = Turn.shorten

    def counted(turn: Turn, excess: int) -> bool:
        steps.append(excess)
        return shorten(turn, excess)

    async with launch(engine=fake_engine(n_ctx=600)) as client:
        client.load(save, conversation="inn")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Turn, "shorten", counted)
            answer = await client.ask("on " * 60, conversation="inn").completed()
        assert (answer.n_dropped, answer.n_prompt) == (300 - 9, 600), "no more than needed"
        assert 1 < len(steps) < 60


@in_trio
async def test_a_conversation_makes_room_for_the_options_of_a_question() -> None:
    """A frame has 1 MiB, for the history and the options of a job."""
    tools = [frameshard.Tool(f"tool{index}", "d" * 60_000) for index in range(14)]
    async with launch(engine=fake_engine()) as client:
        for index in range(8):
            await client.ask("q" * 55_000 + str(index), conversation="inn").completed()
        whole = client.history("inn")
        for n_tools, n_dropped in ((0, 0), (4, 2), (7, 4), (14, 8)):
            answer = await client.ask("on", conversation="inn", tools=tools[:n_tools]).completed()
            assert (answer.text, answer.n_dropped) == ("on", n_dropped), n_tools
        assert client.history("inn")[: len(whole)] == whole, "they are left out, not forgotten"
        with pytest.raises(errors.BadArgument, match="cannot be sent"):
            await client.ask("on", conversation="inn", tools=[*tools, *tools]).completed()
        with pytest.raises(errors.BadArgument, match="priority"):
            await client.ask("on", conversation="inn", priority=3).completed()
        assert len(client.history("inn")) == len(whole) + 8


@in_trio
async def test_one_answer_at_a_time_in_a_conversation() -> None:
    async with launch(engine=fake_engine(endless=True, delay_s=0.001)) as client:
        async with client.ask("la", conversation="inn", sampling=GREEDY):
            with pytest.raises(errors.BadArgument):
                await client.ask("li", conversation="inn").completed()
            few = frameshard.Sampling(max_tokens=3)
            assert (await client.ask("li", conversation="road", sampling=few).completed()).text == "li li li"
        assert (await client.ask("li", conversation="inn", sampling=few).completed()).text == "li li li"


@in_trio
async def test_a_question_that_is_refused_does_not_block_its_conversation(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        stream = client.ask("one", conversation="inn", priority=7)
        with pytest.raises(errors.BadArgument, match="priority"):
            stream.begin()
        with pytest.raises(errors.BadArgument, match="has ended"):
            await stream.completed()
        assert (await client.ask("two", conversation="inn").completed()).text == "two"


@in_both
async def test_a_stream_that_was_begun_and_not_entered_fails_too() -> None:
    async with launch(engine=fake_engine(endless=True, delay_s=0.001), max_client_jobs=1) as client:
        async with client.complete("la", sampling=GREEDY) as other:
            for _ in range(2):
                stream = client.ask("one", conversation="inn")
                stream.begin()
                with pytest.raises(errors.Overloaded):
                    await stream.completed()
            await other.cancel()
            with pytest.raises(errors.JobCancelled):
                await other.completed()
        stream = client.ask("one", conversation="inn", sampling=frameshard.Sampling(max_tokens=2))
        stream.begin()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await stream.__anext__()
        assert (await stream.completed()).text == "one one"
        async with stream:
            assert stream.result is not None


@in_both
async def test_cancel() -> None:
    async with launch(engine=fake_engine(endless=True, delay_s=0.001)) as client:
        async with client.complete("la", sampling=GREEDY) as stream:
            await stream.__anext__()
            await stream.cancel()
            with pytest.raises(errors.JobCancelled):
                await stream.completed()
            with pytest.raises(errors.JobCancelled):
                await stream.completed()
        with anyio.move_on_after(0.2) as scope:
            await client.complete("la", sampling=GREEDY).completed()
        assert scope.cancelled_caught
        stream = client.complete("la", sampling=GREEDY)
        await stream.__aenter__()
        await stream.aclose()
        with pytest.raises(errors.JobCancelled):
            await stream.completed()
        with anyio.fail_after(60):
            while (await client.stats()).broker.jobs_running:
                await anyio.sleep(0.01)


async def until_refused(stream: frameshard.Stream) -> None:
    """Waits until the sidecar has refused the whole history."""
    assert stream._events is not None
    while not stream._events.statistics().current_buffer_used:
        await anyio.sleep(0.01)


@in_both
async def test_a_question_that_is_being_shortened_is_cancelled() -> None:
    async with launch(engine=fake_engine(n_ctx=12)) as client:
        for index in range(2):
            await client.ask(f"a b {index}", conversation="inn").completed()
        async with client.ask("c d e", conversation="inn") as stream:
            await until_refused(stream)
            await stream.cancel()
            with pytest.raises(errors.JobCancelled):
                await stream.completed()
        assert stream.text == ""
        assert (await client.ask("d", conversation="inn").completed()).text == "d"


@in_both
async def test_a_stream_that_another_task_reads_is_closed() -> None:
    ended: list[Any] = []

    async def iterate(stream: frameshard.Stream) -> None:
        ended.append([event.text async for event in stream])

    async def complete(stream: frameshard.Stream) -> None:
        with pytest.raises(errors.JobCancelled, match="closed"):
            await stream.completed()
        ended.append("completed")

    async with launch(engine=fake_engine(delay_s=3600.0)) as client, anyio.create_task_group() as group:
        for read in (iterate, complete):
            async with client.ask("la") as stream:
                group.start_soon(read, stream)
                await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(DEADLINE_S):
            while len(ended) < 2:
                await anyio.lowlevel.checkpoint()
    assert ended == [[], "completed"]


@in_both
async def test_a_question_that_finds_no_place_when_it_is_shorter_leaves_the_history() -> None:
    async with launch(engine=fake_engine(n_ctx=12), max_jobs=1) as client:
        for index in range(3):
            await client.ask(f"a b {index}", conversation="inn").completed()
        whole = client.history("inn")
        async with client.ask("c d", conversation="inn") as stream:
            await until_refused(stream)
            pid = (await client.stats()).broker.engine_pid
            assert pid is not None
            freeze(pid)
            async with client.complete("la") as other:
                for error in (errors.Overloaded, errors.JobCancelled):
                    with anyio.fail_after(60), pytest.raises(error):
                        await stream.completed()
                thaw(pid)
                await other.completed()
        assert stream.n_dropped == 1
        assert client.history("inn") == whole
        assert (await client.ask("d", conversation="inn").completed()).text == "d"


@in_both
async def test_an_answer_to_a_budget_is_awaited_again_after_a_cancellation() -> None:
    async with launch() as client:
        change = client.change_budget(100)
        for answer in (change.granted, change.released, change.observed):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await answer()
            assert scope.cancelled_caught
            await answer()
        refused, closed = client.change_budget(1), client.change_budget(64)
        with pytest.raises(errors.BudgetBelowFloor):
            await refused.granted()
        closed.close()
        for done in (change, refused, closed):
            with pytest.raises(errors.BadArgument, match="no further answer"):
                await done.released()
        left = client.change_budget(32)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await left.granted()
        del left, scope
        await client.stats()  # the event loop forgets the cancellation
        gc.collect()
        assert not client._answers, "nobody can await them any more"


@in_both
async def test_an_answer_to_a_budget_may_be_left_out(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        change = client.change_budget(100)
        assert (await change.released()).vram_budget_bytes == 100 << 20
        for before in (change.granted, change.released):
            with pytest.raises(errors.BadArgument, match="awaited before"):
                await before()
        assert isinstance(await change.observed(), frameshard.Observed)
        assert isinstance(await client.change_budget(0).observed(), frameshard.Observed)
        with pytest.raises(errors.BudgetBelowFloor):
            await client.change_budget(1).observed()


@in_trio
async def test_the_time_of_a_budget_does_not_run_while_an_engine_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine that starts again takes longer than the deadline of the change and the time for its answer."""
    monkeypatch.setattr(frameshard.client, "ANSWER_S", 0.5)
    slow = tmp_path / "slow"
    wait = f"import os, time\nwhile os.path.exists({str(slow)!r}): time.sleep(0.01)\n"
    engine = "from frameshard import testing\ntesting._main()"
    async with launch(engine=(sys.executable, "-c", wait + engine)) as client:
        slow.touch()
        changes = client.engine_changes()
        engine_pid = (await client.stats()).broker.engine_pid
        assert engine_pid is not None
        system.kill(engine_pid)
        while (await changes.receive()).state != "restarting":
            pass
        async with trio.open_nursery() as nursery:

            async def change() -> None:
                assert (await client.set_budget(100, timeout_s=0.5)).vram_budget_bytes == 100 << 20

            nursery.start_soon(change)
            await trio.sleep(4)
            slow.unlink()


@in_trio
async def test_the_rest_of_a_subtraction_is_no_budget_without_a_limit(shared_sidecar: Path) -> None:
    tiny = 0.1 + 0.2 - 0.3
    assert 0 < tiny < 1e-15
    async with frameshard.connect(shared_sidecar) as client:
        with pytest.raises(errors.BudgetBelowFloor):
            await client.set_budget(tiny)
        with pytest.raises(errors.BudgetBelowFloor):
            await client.set_budget(100, host_budget_mb=tiny)
        assert [row.fits for row in await client.plan([tiny])] == [False]
    with pytest.raises(errors.BudgetBelowFloor):
        async with launch(vram_budget_mb=tiny):
            pass


@in_both
async def test_a_slow_reader_loses_nothing_and_slows_nobody(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        async with client.complete(WORDS) as slow:
            assert (await client.complete(WORDS).completed()).text == WORDS
            while (await client.stats()).broker.jobs_running:
                await anyio.sleep(0.01)
            events = [event async for event in slow]
        assert "".join(event.text for event in events) == WORDS
        assert len(events) < 50
        assert sum(event.tokens for event in events) == 200


@in_both
async def test_many_tasks_that_send_at_once_keep_their_session(shared_sidecar: Path) -> None:
    """Each of them sends before the client reads the first answer. The sidecar must keep the answers."""
    async with frameshard.connect(shared_sidecar) as client:

        async def begin_and_leave() -> None:
            for _ in range(3):
                stream = client.complete("one")
                stream.begin()
                await anyio.lowlevel.checkpoint()
                await stream.aclose()

        async with anyio.create_task_group() as group:
            for _ in range(300):
                group.start_soon(begin_and_leave)
        assert (await client.complete("one").completed()).text == "one"


@in_trio
async def test_events_say_which_past_they_belong_to(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        async with client.ask("one two", timeline=7) as stream:
            events = [event async for event in stream]
        assert {(event.timeline, event.epoch, event.job) for event in events} == {(7, client.info.epoch, 1)}


@in_trio
async def test_bad_arguments(shared_sidecar: Path) -> None:
    with pytest.raises(errors.BadArgument):
        frameshard.launch("x", vram_budget_mb=-1)
    with pytest.raises(errors.BadArgument):
        frameshard.launch("x", colour="red")
    with pytest.raises(errors.BadArgument):
        frameshard.launch("x", n_ctx=0)
    for model, options, field in (
        (None, {}, "model"),
        ("x", {"mmproj": 5}, "mmproj"),
        ("x", {"adapters": {"a": 5}}, "adapters"),
        ("x", {"adapters": {5: "a"}}, "adapters"),
        ("x", {"adapters": {"a=b": "c"}}, "adapters"),
        ("x", {"name": "n" * 65}, "name"),
        ("x", {"name": 5}, "name"),
        ("x", {"name": "caf\udce9"}, "name"),
    ):
        with pytest.raises(errors.BadArgument) as caught:
            frameshard.launch(model, **options)  # type: ignore[arg-type]
        assert caught.value.detail["field"] == field
    with pytest.raises(errors.BadArgument, match=r"name: must be a string of 0 to 64 bytes"):
        frameshard.connect(shared_sidecar, name="n" * 65)
    async with frameshard.connect(shared_sidecar) as client:
        for call, field in ((client.complete("").completed, "prompt"), (lambda: client.embed([]), "texts")):
            with pytest.raises(errors.BadArgument) as caught:
                await call()
            assert caught.value.detail["field"] == field
        for stream in (
            client.complete(""),
            client.complete("x" * 70_000),
            client.complete("x", sampling=frameshard.Sampling(top_p=2.0)),
            client.ask("x", conversation=""),
            client.ask("x", timeline=-1),
            client.ask("caf\udce9"),
            client.ask("x", system="caf\udce9"),
            client.complete("caf\udce9"),
            client.chat([]),
            client.chat([frameshard.ChatMessage("narrator", "x")]),  # type: ignore[arg-type]
            client.ask("x", conversation=["inn"]),  # type: ignore[arg-type]
            client.ask("x", sampling={"temperature": 0.5}),  # type: ignore[arg-type]
            client.ask("x", sampling=frameshard.Sampling(logit_bias=((5, 3.0),))),  # type: ignore[arg-type]
        ):
            with pytest.raises(errors.BadArgument):
                await stream.completed()
        wrong: list[tuple[Callable[..., object], Any]] = [
            (client.chat, 5),
            (client.count_tokens, 5),
            (client.plan, 512),
            (client.tool_results, ["iron"]),
            (client.history, ["inn"]),
            (client.forget, ["inn"]),
            (client.save, ["inn"]),
            (lambda name: client.load(client.save("inn"), conversation=name), 5),
            (lambda data: client.load(data, conversation="inn"), None),
            (lambda tools: client.ask("x", tools=tools), [print]),
            (lambda tools: client.count_tokens("x", tools=tools), None),
        ]
        for method, value in wrong:
            with pytest.raises(errors.BadArgument):
                method(value)
        for question in (5, None):
            with pytest.raises(errors.BadArgument, match="text must be a string"):
                client.ask(question)  # type: ignore[arg-type]
        with pytest.raises(errors.BadArgument, match="system must be a string"):
            client.ask("x", system=5)  # type: ignore[arg-type]
        for embed in (client.embed, client.embed_counted):
            for texts in ("hello", 5):
                with pytest.raises(errors.BadArgument, match="texts must be a list"):
                    embed(texts)  # type: ignore[arg-type]
        with pytest.raises(errors.BadArgument, match="path must be a path"):
            client.save_kv("mira", 5)  # type: ignore[arg-type]
        with pytest.raises(errors.BadArgument, match="temprature: unknown option"):
            client.ask("x", temprature=1)  # type: ignore[call-arg]
        with pytest.raises(errors.BadArgument, match="NUL"):
            await client.save_kv("mira", "a\0b")
        with pytest.raises(errors.BadArgument, match="NUL"):
            await client.load_kv("a\0b", conversation="mira")
        with pytest.raises(errors.BadArgument):
            await client.set_budget(-5)
        with pytest.raises(errors.BadArgument):
            await client.set_budget(5, timeout_s=1e6)
        stream = client.complete("x")
        with pytest.raises(errors.BadArgument):
            await stream.__anext__()
        async with stream:
            with pytest.raises(errors.BadArgument):
                await stream.__aenter__()
            assert (await stream.completed()).text == "x"


def test_a_frozen_program_does_not_start_itself_as_a_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyInstaller and its like set `frozen`. Where Python is embedded, there may be no executable."""
    for name, value in (("frozen", True), ("executable", ""), ("executable", None)):
        with monkeypatch.context() as program:
            program.setattr(sys, name, value, raising=False)
            with pytest.raises(errors.Unsupported, match=r"of a bundle, then connect\(FILE\)"):
                launch()


@in_both
async def test_errors_come_out_of_the_block_as_they_are() -> None:
    with pytest.raises(KeyError):
        async with launch() as client, client.complete("x"):
            raise KeyError("mine")
    with anyio.move_on_after(0.3) as scope:
        async with launch():
            await anyio.sleep_forever()
    assert scope.cancelled_caught


@in_both
async def test_a_connection_in_a_cancelled_scope_ends() -> None:
    async with launch() as client:
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with frameshard.connect(client.info):
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert (await client.ask("hello you").completed()).text == "hello you"


@in_both
async def test_a_launch_that_is_cancelled_leaves_nothing() -> None:
    before = children()
    with anyio.move_on_after(0.5) as scope:
        async with launch(engine=(sys.executable, "-c", "import signal; signal.pause()")):
            pass
    assert scope.cancelled_caught
    assert children() <= before  # a process of an earlier test may have ended meanwhile


def children() -> set[int]:
    pids = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in pids if alive(int(pid))}


@in_trio
async def test_connect() -> None:
    async with launch() as client:
        path = directory_of(client.info) / "connect.json"
        async with frameshard.connect(path, name="second") as second:
            assert (await second.ask("hello you").completed()).text == "hello you"
            assert await second.model_info() == await client.model_info()
        # The end of a connected client does not end the sidecar.
        assert (await client.ask("hello").completed()).text == "hello"
        info = client.info
    with pytest.raises(errors.ConnectionLost):
        frameshard.connect(path)
    with pytest.raises(errors.ConnectionLost):
        async with frameshard.connect(info):
            pass


@in_trio
async def test_a_connect_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "npc.json"
    async with launch(connect_file=str(path)):
        assert path.stat().st_mode & 0o777 == 0o600
        async with frameshard.connect(path) as client:
            assert (await client.ask("hello").completed()).text == "hello"
    assert not path.exists()
    for content in ('{"endpoint": 3}', "[" * 60_000):
        path.write_text(content)
        with pytest.raises(errors.BadArgument, match="is no connect file"):
            frameshard.connect(path)
    os.mkfifo(tmp_path / "fifo")
    for odd in (tmp_path / "fifo", "/dev/zero", "a\0b", None, 5):
        with pytest.raises(errors.BadArgument):
            frameshard.connect(odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@in_trio
async def test_the_connect_file_of_a_killed_sidecar_is_known_at_once(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launch(connect_file=str(tmp_path / "npc.json"), transport=transport) as client:
        scope = frameshard.connect(tmp_path / "npc.json")
        with monkeypatch.context() as patch:  # its process is in another namespace
            patch.setattr(system, "may_run", lambda pid: False)
            async with scope as other:
                await other.budget()
        os.kill(client.info.pid, signal.SIGKILL)
        await until_lost(client)
    with pytest.raises(errors.ConnectionLost, match="the sidecar of this connect file has ended"):
        async with frameshard.connect(tmp_path / "npc.json"):
            pass


@in_both
async def test_what_a_callback_raises_at_a_later_load_leaves_the_block_as_it_is() -> None:
    def fail(_loading: frameshard.Loading) -> None:
        raise ZeroDivisionError("a progress bar")

    async def play() -> None:
        async with launch(engine=fake_engine(loading=3)) as client:
            client.on_loading = fail
            engine_pid = (await client.stats()).broker.engine_pid
            assert engine_pid is not None
            os.kill(engine_pid, signal.SIGKILL)
            await anyio.sleep(DEADLINE_S)

    with pytest.raises(ZeroDivisionError, match="a progress bar"):
        await play()


@in_trio
async def test_what_nobody_listens_to_is_not_kept(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        kept = client.notices(), client.engine_changes()
        for _ in range(10):
            client.notices()
            client.engine_changes()
        gc.collect()
        assert [*client._listeners, *client._watchers] == [*kept]


@in_both
async def test_streams_of_a_lost_sidecar_fail() -> None:
    async with launch(engine=fake_engine(endless=True, delay_s=0.01)) as client:
        async with client.complete("la", sampling=GREEDY) as stream:
            os.kill((await client.stats()).broker.pid, 9)
            with pytest.raises(errors.ConnectionLost):
                await stream.completed()
        with pytest.raises(errors.ConnectionLost):
            await client.ask("x").completed()


@in_both
async def test_a_client_whose_block_has_ended_is_lost() -> None:
    begun = anyio.Event()

    async def speak(client: frameshard.Client) -> None:
        async with client.ask(WORDS) as stream:
            await stream.__anext__()
            begun.set()
            with pytest.raises(errors.ConnectionLost):
                await stream.completed()

    async with anyio.create_task_group() as group:
        async with launch(engine=fake_engine(endless=True, delay_s=0.001)) as client:
            group.start_soon(speak, client)
            await begun.wait()
            stream = client.complete(WORDS)
            await stream.__aenter__()
    for call in (
        client.budget,
        client.shutdown,
        client.ask("x").completed,
        stream.completed,
        lambda: client.set_budget(5),
        lambda: client.embed(["x"]),
    ):
        with pytest.raises(errors.ConnectionLost):
            await call()
    await stream.cancel()
    stream.set_priority(1)
    await stream.aclose()
    assert [notice async for notice in client.notices()] == []


@in_both
async def test_a_sidecar_that_has_ended_as_it_was_asked_is_not_lost() -> None:
    """Also if its end is noticed before its answer is read."""
    async with launch() as client:
        client._core.receive = lambda frame: []  # type: ignore[method-assign]
        await client.shutdown()
        with pytest.raises(errors.ConnectionLost):
            await client.budget()


@in_both
async def test_a_sidecar_that_is_killed_has_not_ended_as_it_was_asked() -> None:
    async with launch() as client:
        pid = (await client.stats()).broker.pid
        freeze(pid)
        asked = client.shutdown()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(errors.ConnectionLost):
            await asked


@in_both
async def test_the_time_of_a_request_counts_from_when_it_is_sent(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        core, request, answers = client._core, 10**6, []
        core.waits = lambda request_id: True  # type: ignore[method-assign]
        client._expect(request)

        async def ask() -> None:
            answers.append(await client._answer(request, timeout_s=BEAT_S))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            beats = core.heard_beats
            while core.heard_beats < beats + 3:
                await anyio.sleep(0.01)
            client._answers[request].put(m.Ok(request, client.info.epoch))
        assert answers == [m.Ok(request, client.info.epoch)]


@in_both
async def test_the_errors_of_a_lost_sidecar_do_not_grow() -> None:
    async with launch() as client:
        os.kill((await client.stats()).broker.pid, 9)
        await until_lost(client)

        async def length() -> int:
            with pytest.raises(errors.ConnectionLost) as caught:
                await client.budget()
            return len(caught.traceback)

        assert await length() == await length()


@in_both
async def test_many_clients_of_one_program() -> None:
    async with launch() as one, launch() as two:
        assert one.info.endpoint != two.info.endpoint
        async with anyio.create_task_group() as group:
            for client in (one, two) * 5:
                group.start_soon(client.complete(WORDS).completed)


def test_each_conversation_has_as_many_tokens_as_were_asked_for(shallow_model: Path) -> None:
    async def main() -> None:
        options = {"n_parallel": 3, "n_ctx": 512, "n_threads": 1}
        async with frameshard.launch(shallow_model, device="emulated", **options) as client:
            assert (await client.model_info()).n_ctx == 512

            async def fill() -> None:
                full = await client.complete(" castle" * 496, sampling=frameshard.Sampling(max_tokens=16)).completed()
                assert full.n_prompt == 496

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(fill)
            with pytest.raises(errors.ContextOverflow, match=r"launch with n_ctx=513 "):
                await client.complete(" castle" * 497, sampling=frameshard.Sampling(max_tokens=16)).completed()

    trio.run(main)


def test_the_real_engine(model_path: Path) -> None:
    """Uses the real engine once: a chat, a change of the budget during the answer, figures."""

    async def main() -> None:
        options = {"n_parallel": 2, "n_ctx": 512, "n_threads": 1}
        async with frameshard.launch(model_path, device="emulated", vram_budget_mb=100, **options) as client:
            info = await client.model_info()
            assert (info.arch, info.n_layer, info.n_ctx, info.chat) == ("llama", 30, 512, True)
            assert 0 < info.floor_bytes < 100 << 20 < info.full_bytes
            sampling = frameshard.Sampling(max_tokens=40, temperature=0.0)
            async with client.ask("Who keeps the inn?", conversation="inn", sampling=sampling) as stream:
                await stream.__anext__()
                shrunk = await client.set_budget(info.floor_bytes / (1 << 20) + 1, timeout_s=60)
                assert shrunk.used_bytes <= shrunk.vram_budget_bytes
                await stream.__anext__()
                grown = await client.set_budget(200, timeout_s=60)
                assert grown.vram_budget_bytes == 200 << 20
                assert len((await stream.completed()).text) > 20
            with pytest.raises(errors.BudgetBelowFloor) as refused:
                await client.set_budget(1)
            assert refused.value.detail["floor_bytes"] == (await client.budget()).floor_bytes
            stats = await client.stats()
            assert stats.engine is not None
            assert stats.engine["peak_bytes"] <= 200 << 20
            with pytest.raises(errors.ContextOverflow):
                await client.ask("word " * 2000).completed()

    async def bounded() -> None:
        with trio.fail_after(200):
            await main()

    trio.run(bounded)


def test_errors_of_real_models(model_path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model_path.read_bytes()[:1_000_000])
    (tmp_path / "text.gguf").write_text("no model at all")

    async def main() -> None:
        for path, device, budget, error in [
            (tmp_path / "missing.gguf", "cpu", 0, errors.ModelNotFound),
            (cut, "cpu", 0, errors.BadModel),
            (tmp_path / "text.gguf", "cpu", 0, errors.BadModel),
            (model_path, "CUDA77", 0, errors.UnknownDevice),
            (model_path, "emulated", 1, errors.BudgetBelowFloor),
        ]:
            with trio.fail_after(100), pytest.raises(error):
                async with frameshard.launch(path, device=device, vram_budget_mb=budget):
                    pass

    trio.run(main)


INTERRUPTED = """
import os, signal, sys
import frameshard, trio

def interrupt(loading):
    print("loading", flush=True)
    signal.raise_signal(signal.SIGINT)

async def main():
    at_launch = interrupt if sys.argv[2] == "load" else None
    async with frameshard.launch(sys.argv[1], device="cpu", n_ctx=256, on_loading=at_launch) as client:
        client.on_loading = interrupt
        os.kill((await client.stats()).broker.engine_pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        await trio.sleep_forever()

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    trio.run(main)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("when", ["load", "restart"])
def test_ctrl_c_in_a_task_of_the_client_is_no_group(when: str, model_path: Path) -> None:
    """The callback runs in the launching task during the first load, and in a task of the client later."""
    program = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(model_path), when], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert program.returncode == 0, program.stderr
    assert {*program.stdout.split()} == {"loading", "interrupted"}
