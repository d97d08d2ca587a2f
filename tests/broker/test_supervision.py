"""Deaths: of the engine, of the broker, of the host. Real processes, real signals."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

import frameshard
from frameshard import errors
from frameshard.broker.supervisor import RestartPolicy
from frameshard.testing import fake_engine
from frameshard.wire import states
from sidecars import GREEDY, WORDS, alive, directory_of, freeze, gone_after, host, in_trio, launch, thaw, until_lost

HOST = """
import os, signal, sys, trio, frameshard
from frameshard.testing import fake_engine
engine = {} if sys.argv[1] != "fake" else {"engine": fake_engine(endless=True, delay_s=0.001)}
async def main():
    async with frameshard.launch(sys.argv[1], device="cpu", n_parallel=2, n_threads=1, **engine) as client:
        stats = await client.stats()
        print(stats.broker.pid, stats.broker.engine_pid, client.info.endpoint, flush=True)
        if "leak" in sys.argv and os.fork() == 0:
            signal.pause()  # holds every file descriptor of ours open
        async with client.complete("once upon a time", sampling=frameshard.Sampling(max_tokens=400)) as stream:
            async for delta in stream:
                print("speaking", flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


async def engine_pid(client: frameshard.Client) -> int:
    """Process id of an engine that is ready."""
    with trio.fail_after(60):
        while True:
            broker = (await client.stats()).broker
            if broker.engine == "ready" and broker.engine_pid is not None:
                return broker.engine_pid
            await trio.sleep(0.01)


async def kill_engine_in_mid_stream(client: frameshard.Client, stream: frameshard.Stream, *after: int) -> None:
    """Reads to the end, and kills the engine after each of these numbers of tokens."""
    count = 0
    for number in after:
        while count < number:
            count += (await stream.__anext__()).tokens
        os.kill(await engine_pid(client), signal.SIGKILL)
    await stream.completed()


@in_trio
async def test_an_engine_killed_in_mid_stream_twenty_times() -> None:
    rng = random.Random(20)
    async with launch(engine=fake_engine(delay_s=0.002)) as client:
        for _ in range(20):
            async with client.complete(WORDS) as stream:
                await kill_engine_in_mid_stream(client, stream, rng.randint(1, 150))
            assert stream.text == WORDS
            assert stream.result is not None
            assert stream.result.n_generated == 200
        assert (await client.stats()).broker.engine_restarts == 20


@in_trio
async def test_all_jobs_survive_an_engine() -> None:
    """Those that run, those that wait, and one that is cancelled meanwhile."""
    async with launch(engine=fake_engine(delay_s=0.005), n_parallel=2) as client:
        texts = [f"{index} {WORDS}" for index in range(6)]
        results: dict[int, str] = {}

        async def run(index: int) -> None:
            results[index] = (await client.complete(texts[index]).completed()).text

        changes = client.engine_changes()
        async with trio.open_nursery() as nursery:
            for index in range(6):
                nursery.start_soon(run, index)
            async with client.complete("never mind", sampling=GREEDY) as unwanted:
                pid = await engine_pid(client)
                await trio.sleep(0.1)
                os.kill(pid, signal.SIGKILL)
                await unwanted.cancel()
        assert [results[index] for index in range(6)] == texts
        seen = [changes.receive_nowait() for _ in range(2)]
        assert [(change.state, change.restarts) for change in seen] == [("restarting", 0), ("ready", 1)]


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_real_engine_killed_in_mid_stream(model_path: Path, device: str, temperature: float) -> None:
    """Once in an answer and four times in another, in each of four settings: the text is that of an undisturbed run."""

    async def main() -> None:
        options = {"device": device, "n_parallel": 2, "n_ctx": 512, "n_ubatch": 64, "n_threads": 1}
        rng = random.Random(f"{device}{temperature}")
        async with frameshard.launch(model_path, log=subprocess.DEVNULL, **options) as client:
            sampling = frameshard.Sampling(max_tokens=24, temperature=temperature, seed=5)
            prompt = "Tell me about the old lighthouse at the end of the bay, and who keeps it."

            expected = (await client.ask(prompt, sampling=sampling).completed()).text
            assert len(expected) > 40
            for deaths in (1, 4):
                async with client.ask(prompt, sampling=sampling) as stream:
                    await kill_engine_in_mid_stream(client, stream, *sorted(rng.sample(range(1, 22), deaths)))
                assert stream.text == expected
            assert (await client.stats()).broker.engine_restarts == 5

    async def bounded() -> None:
        with trio.fail_after(300):
            await main()

    trio.run(bounded)


@in_trio
async def test_an_engine_that_dies_at_the_same_place_is_given_up() -> None:
    async with launch(engine=fake_engine(crash_at_token=7)) as client:
        async with client.complete(WORDS) as stream:
            with pytest.raises(errors.EngineDied):
                await stream.completed()
        assert stream.text == " ".join(WORDS.split()[:7])
        stats = await client.stats()
        assert (stats.broker.engine, stats.broker.engine_restarts, stats.engine) == ("off", 3, None)
        with pytest.raises(errors.EngineDied):
            await client.complete("x").completed()
        with pytest.raises(errors.EngineDied):
            await client.set_budget(100)
        assert (await client.budget()).budget_bytes == 0


@in_trio
async def test_an_engine_that_dies_idle_is_given_up() -> None:
    async with launch(engine=fake_engine(crash_when_idle=True), restart_limit=1) as client:
        with trio.fail_after(60):
            while (await client.stats()).broker.engine != "off":
                await trio.sleep(0.01)


@in_trio
async def test_an_engine_that_hangs_at_work_is_replaced_and_given_up() -> None:
    async with launch(engine=fake_engine(hang_at_token=3), hang_busy_s=1.0, restart_limit=1) as client:
        with pytest.raises(errors.EngineDied):
            await client.complete("one two three four five").completed()


@in_trio
async def test_an_engine_that_hangs_idle_is_replaced() -> None:
    async with launch(hang_idle_s=1.0) as client:
        first = await engine_pid(client)
        freeze(first)
        with trio.fail_after(60):
            while await engine_pid(client) == first:
                await trio.sleep(0.05)
        assert (await client.complete(WORDS).completed()).text == WORDS


@in_trio
async def test_a_busy_engine_is_left_in_peace() -> None:
    """It is silent for longer than an idle one may be, and answers then."""
    async with launch(engine=fake_engine(delay_s=0.02), hang_idle_s=1.0) as client:
        async with client.complete(WORDS) as stream:
            await stream.__anext__()
            pid = await engine_pid(client)
            freeze(pid)
            await trio.sleep(2)
            thaw(pid)
            assert (await stream.completed()).text == WORDS
        assert (await client.stats()).broker.engine_restarts == 0


@in_trio
async def test_an_engine_that_talks_nonsense_is_replaced() -> None:
    async with launch(engine=fake_engine(nonsense_at_token=5), restart_limit=2) as client:
        with pytest.raises(errors.EngineDied):
            await client.complete(WORDS).completed()
        assert (await client.stats()).broker.engine_restarts == 2


@pytest.mark.parametrize(
    "name", ["bad_model", "model_not_found", "unknown_device", "version_mismatch", "out_of_memory"]
)
def test_a_model_that_cannot_be_loaded_ends_the_launch(name: str) -> None:
    @in_trio
    async def run() -> None:
        with pytest.raises(errors.BY_NAME[name]):
            async with launch(engine=fake_engine(fatal=name)):
                pass

    run()


@in_trio
async def test_an_engine_that_dies_at_load_ends_the_launch() -> None:
    with pytest.raises(errors.EngineDied, match="signal 9"):
        async with launch(engine=fake_engine(crash_at_load=True)):
            pass
    with pytest.raises(errors.EngineDied, match="exit code 7"):
        async with launch(engine=(sys.executable, "-c", "raise SystemExit(7)")):
            pass
    words = "engine: INFO: hello\n" * 999 + "terminate called\n  what(): no such tensor\n"
    script = f"import os, sys; sys.stderr.write({words!r}); sys.stderr.flush(); os.abort()"
    with pytest.raises(errors.EngineDied, match=r"signal 6.*terminate called; what") as died:
        async with launch(engine=(sys.executable, "-c", script)):
            pass
    assert died.value.detail["last_words"] == "terminate called; what(): no such tensor"


def patched_engine(patch: str) -> tuple[str, ...]:
    """The real engine with a defect: Python that runs before it, with its module as `process`."""
    script = f"from frameshard import native\nfrom frameshard.engine import process\n{patch}\nprocess.main()"
    return (sys.executable, "-c", script)


ABORT = "native._ggml().ggml_abort(b'here.c', 7, b'it cannot be')"


@in_trio
async def test_what_ggml_says_before_it_aborts_ends_the_launch(model_path: Path) -> None:
    engine = patched_engine(f"process.Engine._load = lambda *_: {ABORT}")
    with pytest.raises(errors.EngineDied, match=r"here\.c:7: it cannot be"):
        async with frameshard.launch(model_path, device="cpu", engine=engine):
            pass


@in_trio
async def test_an_exception_while_a_job_is_taken_is_that_jobs_failure(model_path: Path) -> None:
    patch = """
submit = process.Batcher.submit
def broken(self, message):
    if message["prompt"] == "poison":
        return 1 / 0
    return submit(self, message)
process.Batcher.submit = broken"""
    options = {"device": "cpu", "n_ctx": 512, "n_parallel": 2, "n_threads": 1}
    async with frameshard.launch(model_path, engine=patched_engine(patch), **options) as client:
        async with client.complete("Once", sampling=frameshard.Sampling(max_tokens=50)) as stream:
            with pytest.raises(frameshard.FrameshardError, match="ZeroDivisionError") as failed:
                await client.complete("poison").completed()
            assert failed.value.name == "internal"
            assert (await stream.completed()).n_generated > 0
        assert (await client.stats()).broker.engine_restarts == 0


@in_trio
async def test_a_budget_below_the_floor_ends_the_launch() -> None:
    with pytest.raises(errors.BudgetBelowFloor) as refused:
        async with launch(vram_budget_mb=4):
            pass
    assert refused.value.detail["floor_bytes"] == 16 << 20


@in_trio
async def test_the_latest_budget_outlives_the_engine() -> None:
    async with launch(vram_budget_mb=100) as client:
        await client.set_budget(50)
        os.kill(await engine_pid(client), signal.SIGKILL)
        # Asked of no engine at all, and answered by the next.
        result = await client.set_budget(40)
        assert (result.budget_bytes, result.used_bytes) == (40 << 20, 40 << 20)
        os.kill(pid := await engine_pid(client), signal.SIGKILL)
        with trio.fail_after(60):
            while await engine_pid(client) == pid:
                await trio.sleep(0.01)
        assert (await client.budget()).budget_bytes == 40 << 20
        stats = await client.stats()
        assert stats.engine is not None
        assert stats.engine["used_bytes"] == 40 << 20


@in_trio
async def test_a_refused_budget_does_not_keep_the_next_engine_from_loading() -> None:
    async with launch(vram_budget_mb=100) as client:
        os.kill(await engine_pid(client), signal.SIGKILL)
        with pytest.raises(errors.BudgetBelowFloor):
            await client.set_budget(1)
        assert (await client.stats()).broker.engine == "ready"
        assert (await client.budget()).budget_bytes == 100 << 20


def launched(*args: str) -> tuple[subprocess.Popen[str], list[int], Path]:
    """A host in mid-stream, its sidecar's processes and the sidecar's directory."""
    process = host(HOST, *args)
    assert process.stdout is not None
    broker, engine, endpoint = process.stdout.readline().split()
    assert process.stdout.readline() == "speaking\n"
    directory = Path(endpoint.removeprefix("ipc://")).parent
    assert directory.is_dir()
    return process, [int(broker), int(engine)], directory


@pytest.mark.parametrize("round_", range(20))
def test_nothing_outlives_a_killed_host(round_: int) -> None:
    process, pids, directory = launched("fake")
    with process:
        process.kill()
        gone_after(pids)
        assert not directory.exists()


def test_nothing_of_the_real_engine_outlives_a_killed_host(model_path: Path) -> None:
    for _ in range(5):
        process, pids, directory = launched(str(model_path))
        with process:
            process.kill()
            gone_after(pids)
            assert not directory.exists()


def test_nothing_outlives_a_host_whose_pipe_leaked_into_another_child() -> None:
    process, pids, directory = launched("fake", "leak")
    with process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        gone_after(pids)
        assert not directory.exists()
        for child in {int(pid) for pid in children} - set(pids):
            os.kill(child, signal.SIGKILL)


def test_nothing_outlives_a_host_killed_while_the_model_loads() -> None:
    """The engine never becomes ready here."""
    script = HOST.replace(
        "fake_engine(endless=True, delay_s=0.001)", '(sys.executable, "-c", "import signal; signal.pause()")'
    ).replace("async with frameshard.launch", 'print("launching", flush=True)\n    async with frameshard.launch')
    process = host(script, "fake")
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "launching\n"
        deadline = time.monotonic() + 60
        while len(pids := descendants(process.pid)) < 2:
            assert time.monotonic() < deadline
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.01)
        process.kill()
        gone_after(pids)


def descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return children + [below for child in children for below in descendants(child)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_the_broker_in_good_order(number: signal.Signals) -> None:
    @in_trio
    async def run() -> None:
        async with launch(engine=fake_engine(endless=True, delay_s=0.01)) as client:
            broker = (await client.stats()).broker
            assert broker.engine_pid is not None
            directory = directory_of(client.info)
            async with client.complete("la", sampling=GREEDY) as stream:
                os.kill(broker.pid, number)
                with pytest.raises(errors.ConnectionLost):
                    await stream.completed()
            gone_after([broker.pid, broker.engine_pid])
            assert not directory.exists()

    run()


@in_trio
async def test_a_killed_broker_takes_its_engine_with_it_and_the_next_launch_cleans_up() -> None:
    async with launch() as client:
        broker = (await client.stats()).broker
        assert broker.engine_pid is not None
        directory = directory_of(client.info)
        os.kill(broker.pid, signal.SIGKILL)
        gone_after([broker.engine_pid])
        await until_lost(client)
    assert directory.exists()
    async with launch() as client:
        assert not directory.exists()
        assert directory_of(client.info).exists()
    assert not alive(broker.pid)


def test_restart_policy() -> None:
    policy = RestartPolicy(3, 300.0)
    delays = [policy.died(float(at), progress=False) for at in range(4)]
    assert delays == [0.0, 0.25, 0.5, None]
    policy = RestartPolicy(3, 300.0)
    for at in range(100):
        assert policy.died(float(at), progress=True) == 0.0
    policy = RestartPolicy(1, 300.0)
    assert [policy.died(at, progress=False) for at in (0.0, 301.0, 602.0, 700.0)] == [0.0, 0.0, 0.0, None]


def test_off_is_final() -> None:
    assert states.ENGINE[states.Engine.OFF] == {}
