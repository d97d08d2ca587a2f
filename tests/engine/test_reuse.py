"""Jobs start from what other jobs have read: with a real model, in an engine process driven as by the broker."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from batcher_driver import N_WORDS, tale, talk
from engine_driver import Event, engine, ids

import frameshard
import sidecars
from forks import run_script
from frameshard.engine.kvstore import Blob, KvStore
from frameshard.engine.sequences import repeated

LORE = " ".join(
    f"In the year {year} a stranger crossed the old bridge, and nobody in the village spoke of it."
    for year in range(1, 11)
)
FEW = {"max_tokens": 6}
MIB = 1 << 20
N_KV_BYTES = 4 * 3 * 64 * 2 * 2  # of a token of the tiny llama: layers, KV heads, head size, two caches, 16 bits


def npc(number: int, *more: str) -> list[dict[str, str]]:
    """The messages to a character: the lore, a question, and in turn answers and questions."""
    roles = ("user", "assistant")
    words = (f"Villager {number}, who are you?", *more)
    return [
        {"role": "system", "content": LORE},
        *({"role": roles[i % 2], "content": word} for i, word in enumerate(words)),
    ]


def n_read(events: Sequence[Event]) -> int:
    """The tokens of its prompt that a job has read itself."""
    return int(events[0]["n_prompt"]) - int(events[0]["n_reused"])


def test_characters_with_one_lore_read_it_once(talking_model: Path) -> None:
    with engine(talking_model, n_ctx=2048, n_parallel=2) as child:
        jobs = [child.submit(npc(i), conversation=f"npc{i}", params=FEW) for i in range(6)]
        first, *others = child.finish(*jobs).values()
        assert n_read(first) == first[0]["n_prompt"] > 900
        assert all(n_read(events) < 100 for events in others)
        assert child.stats()["kv_cache_evictions"] == 0


def test_more_conversations_than_sequences(tiny_model: Callable[[str], Path]) -> None:
    """A conversation that has lost its sequence goes on from a copy, with the same bits."""
    path = tiny_model("llama")
    with engine(path, n_ctx=1024, n_parallel=1) as child, engine(path, n_ctx=1024) as roomy:
        for turn in range(2):
            for name in ("fox", "owl", "elk"):
                prompt = f"The {name} said: I live in the {name} wood. " * 8 + "And then it rained. " * turn
                here, there = (each.run(prompt, conversation=name, params=FEW) for each in (child, roomy))
                assert ids(here) == ids(there)
                if turn:
                    assert here[0]["n_reused"] == there[0]["n_reused"] > 70
        stats = child.stats()
        assert (stats["kv_cache_hits"], stats["kv_cache_evictions"]) == (3, 0)
        assert stats["kv_cache_entries"] in (2, 3)  # the third is made when the engine is idle
        assert stats["kv_cache_bytes"] > 2 * 300 * N_KV_BYTES


COPY = """
import sys
import numpy as np
import numpy.typing as npt
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig

config = EngineConfig(
    model=sys.argv[1], device="emulated", mode="stream_only", n_ctx=512, n_parallel=3, n_threads=1, kv_type=sys.argv[2]
)
with Runtime.load(config, measure=False) as runtime:
    device = runtime.device
    if len(sys.argv) > 3:
        device.set_budget(device.stats().floor_bytes)
    tokens = [5 + i % 200 for i in range(300)]
    runtime.decode_tokens(0, tokens[:250])
    data = runtime.save(0, lambda n_bytes: np.empty(n_bytes, np.uint8))
    expected = runtime.decode_tokens(0, tokens[250:])
    runtime.decode_tokens(2, tokens[100:])  # what was there before does not matter
    assert runtime.restore(2, data, 250)
    assert np.array_equal(runtime.decode_tokens(2, tokens[250:]), expected)
    if not runtime.llama.window:
        for seq in (0, 2):
            assert runtime.trim(seq, 100) == 100
        assert np.array_equal(*(runtime.decode_tokens(seq, tokens[100:250]) for seq in (0, 2)))
    assert (device.stats().kv_host_bytes > 0) == (len(sys.argv) > 3)
    print(device.stats().used_bytes <= device.stats().budget_bytes)
"""


@pytest.mark.parametrize(
    ("model", "kv_type", "floor"),
    [("llama", "f16", True), ("llama", "q8_0", False), ("gemma4", "f16", False), ("deepseek2", "f16", False)],
)
def test_copied_cells_give_the_same_bits(
    tiny_model: Callable[[str], Path], model: str, kv_type: str, floor: bool
) -> None:
    """Also at the floor, where most of the KV cache is in host memory."""
    result = run_script(COPY, tiny_model(model), kv_type, *["floor"] * floor)
    assert (result.stdout, result.returncode) == ("True\n", 0), result.stderr


def test_a_copy_from_a_sliding_window_is_used_whole_or_not_at_all(tiny_model: Callable[[str], Path]) -> None:
    """Older cells are not in the copy."""
    path = tiny_model("gemma3")
    with engine(path, n_parallel=1) as child, engine(path, kv_cache_bytes=0) as fresh:
        (_, done) = child.run("the tale " * 24, warm_up=True)
        n_whole = done["n_prompt"]
        assert n_whole > 32  # the window
        for prompt, n_reused in (("the tale " * 24 + "goes on", n_whole), ("the tale " * 20, 0), ("the tale", 13)):
            events = child.run(prompt, conversation=prompt, params=FEW)
            assert ids(events) == ids(fresh.run(prompt, params=FEW))
            assert events[0]["n_reused"] == n_reused


@pytest.mark.parametrize("mode", ["planned", "stream_only"])
def test_a_paused_job_goes_on_where_it_was(deep_model: Path, mode: str) -> None:
    """Also if it was paused in mid-prompt."""
    options: dict[str, Any] = {"mode": mode, "n_parallel": 1, "n_ctx": 2048, "n_ubatch": 128}
    params = {"temperature": 0.8, "seed": 3, "max_tokens": 24}
    lore = LORE[:500]
    with engine(deep_model, **options) as child:
        alone = child.run(lore, params=params)
        assert len(ids(alone)) == 24
        for n_tokens in (0, 7):
            before = child.stats()["prompt_tokens"]
            job = child.submit(lore, params={**params, "max_tokens": 700})
            started = child.wait_for("started", job=job)
            said = [child.wait_for("token", job=job)["id"] for _ in range(n_tokens)]
            while not said:
                child.send(op="stats", seq=0)
                event = child.wait_for("stats", "token")
                if event["ev"] == "token":
                    said.append(event["id"])
                elif event["stats"]["prompt_tokens"] - before >= 128:
                    break
            child.send(op="cancel", job=job, pause=True)
            while (event := child.wait_for("token", "done", "cancelled"))["ev"] == "token":
                said.append(event["id"])
            assert event["ev"] == "cancelled"
            child.run("Who goes there?", params=FEW)
            before = child.stats()["prompt_tokens"]
            history = {"history": started["history"]} if mode == "stream_only" else {}
            params["max_tokens"] = max(24, len(said) + 4)
            child.send(op="submit", job=job, kind="completion", prompt=lore, sampling=params, resume=said, **history)
            events = child.finish(job)[job]
            if mode == "stream_only":
                assert [*said, *ids(events)][:24] == ids(alone)
            read = child.stats()["prompt_tokens"] - before
            if n_tokens:
                assert read == (1 if mode == "planned" else 0)
            else:
                assert read < alone[0]["n_prompt"] - 100


def test_an_answer_that_began_with_another_ones_lore_survives_a_kill(deep_model: Path) -> None:
    """In mode stream_only its text is that of the undisturbed run."""

    async def main() -> None:
        options: dict[str, Any] = {"mode": "stream_only", "device": "emulated", "vram_budget_mb": 20}
        sampling = frameshard.Sampling(max_tokens=40, temperature=0.9, seed=4)
        lore = LORE[:300]
        tale = f"{lore} In the year 11"
        async with frameshard.launch(
            deep_model, n_parallel=2, n_ctx=512, n_threads=1, hang_still_s=60, **options
        ) as client:
            alone = await client.complete(tale, sampling=sampling).completed()
            few = frameshard.Sampling(max_tokens=4)
            await client.complete(f"{lore} Ten years later,", conversation="one", sampling=few).completed()
            # Without a conversation the text does not depend on what was read before.
            assert (await client.complete(tale, sampling=sampling).completed()).text == alone.text
            whole = await client.complete(tale, conversation="two", sampling=sampling).completed()
            assert whole.n_prompt - whole.n_reused < 40
            async with client.complete(tale, conversation="three", sampling=sampling) as answer:
                for _ in range(2):
                    await answer.__anext__()
                pid = (await client.stats()).broker.engine_pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                killed = await answer.completed()
            assert (killed.text, killed.n_reused) == (whole.text, whole.n_reused)
            await sidecars.until_ready(client, 1)
            assert (await client.stats()).broker.engine_restarts == 1

    trio.run(main)


@pytest.mark.parametrize(
    ("shapes", "history", "limit", "n"),
    [
        ([(8, 8), (5, 5)], [(8, 8), (5, 5), (3, 3)], 15, 13),
        ([(8, 8), (5, 5)], [(8, 8), (5, 5)], 12, 8),  # part of a shape is none
        ([(8, 8), (7, 7)], [(8, 8), (5, 7), (3, 3)], 15, 13),  # after a cut they are the same
        ([(8, 8), (5, 7)], [(8, 8), (7, 7)], 15, 8),
        ([(8, 8), (7, 7), (3, 3)], [(8, 8), (5, 7), (3, 3)], 20, 13),
        ([(4, 4)] * 4, [(8, 8), (8, 8)], 15, 0),
        ([], [(8, 8)], 7, 0),
    ],
)
def test_cells_stand_for_an_earlier_decode_only_if_the_shapes_are_equal(
    shapes: list[tuple[int, int]], history: list[tuple[int, int]], limit: int, n: int
) -> None:
    assert repeated(shapes, history, limit) == n


def test_a_warm_up_reads_while_nothing_else_does(shallow_model: Path) -> None:
    lore = [{"role": "system", "content": LORE}]
    with engine(shallow_model, n_ctx=1024, n_parallel=2, n_ubatch=32) as child:
        talker = child.submit("Once upon a time", params={"max_tokens": 30})
        child.wait_for("token", job=talker)
        warm = child.submit(lore, warm_up=True, priority=-1)
        ends = [child.wait_for("done") for _ in range(2)]
        assert [(end["job"], end["n_generated"]) for end in ends] == [(talker, 30), (warm, 0)]
        first = child.run(npc(1), params=FEW)
        n_own = first[0]["n_prompt"] - ends[1]["n_prompt"]
        assert n_read(first) == n_own
        assert n_own < 40
        assert n_read(child.run(lore, warm_up=True)) == 1
        assert child.stats()["kv_cache_entries"] == 1


def test_conversations_with_the_same_text_keep_their_copies(tiny_model: Callable[[str], Path]) -> None:
    """Each can be saved, and goes on from its own."""
    names = ("fox", "owl", "elk")
    with talk(tiny_model("llama")) as one:
        for name in names:
            one.say(tale("bard"), name)
        one.say(tale("smith"), "smith")
        assert all(one.batcher.reuse.copy_of(name) for name in names)
        assert [conversation for conversation, *_ in one.blobs()] == [*reversed(names)]
        assert one.say(tale("bard", "again"), "fox")[0] > N_WORDS
        assert [bool(one.batcher.reuse.copy_of(name)) for name in names] == [True, True, True]


@pytest.mark.parametrize("warm_first", [False, True])
def test_lore_is_kept_though_a_conversation_has_the_same_text(
    tiny_model: Callable[[str], Path], warm_first: bool
) -> None:
    with talk(tiny_model("llama")) as one:
        for warms in (warm_first, not warm_first):
            one.start(tale("bard"), None if warms else "fox", n_answer=1, warm_up=warms)
            one.events()
            one.say(tale("smith"), "smith")
        for prompt in (tale("bard", "and on"), tale("fox")):  # the conversation goes on, and then has another text
            one.say(prompt, "fox")
        one.say(tale("smith", "and on"), "smith")
        assert one.say(tale("bard", "is here"))[0] > N_WORDS


def test_what_cannot_be_warmed_up_is_refused(tiny_model: Callable[[str], Path]) -> None:
    for name, options, named in (
        ("llama", {"kv_cache_bytes": 0}, "bad_argument"),
        ("llama", {"kv_cache_bytes": 100 * N_KV_BYTES}, "bad_argument"),
        ("mamba2", {}, "unsupported"),
    ):
        with engine(tiny_model(name), **options) as child:
            (*_, failed) = child.run("The wind blew over the hills. " * 10, warm_up=True)
            assert failed["error"]["name"] == named
            assert len(ids(child.run("The wind", params=FEW))) == 6


def test_without_a_store_nothing_is_copied(tiny_model: Callable[[str], Path]) -> None:
    with engine(tiny_model("llama"), kv_cache_bytes=0, n_ctx=1024, n_parallel=2) as child:
        jobs = [child.run(LORE[:400] + str(i), conversation=f"npc{i}", params=FEW) for i in range(3)]
        assert [n_read(events) > 300 for events in jobs] == [True, True, False]  # the third one is in the first's place
        assert child.stats()["kv_cache_bytes"] == 0


def blob(n_bytes: int, tokens: Sequence[int] = (), conversation: str | None = None) -> Blob:
    return Blob(tokens=list(tokens), conversation=conversation, data=np.zeros(n_bytes, np.uint8))


def test_the_store_drops_what_was_used_longest_ago() -> None:
    store = KvStore(100)
    first, second, third = (blob(40, [i]) for i in range(3))
    later = blob(10, [7, 8], "talk")
    assert [store.put(each) for each in (first, second)] == [True, True]
    store.use(first)
    assert [store.put(each) for each in (third, blob(101))] == [True, False]
    assert list(store) == [third, first]
    assert [store.put(each) for each in (blob(20, [7], "talk"), later)] == [True, True]
    assert list(store) == [later, third, first]
    figures = {"kv_cache_bytes": 90, "kv_cache_entries": 3, "kv_cache_hits": 1, "kv_cache_evictions": 1}
    assert store.statistics() == figures


def test_the_store_counts_data_once_that_several_blobs_share() -> None:
    store = KvStore(100)
    own = blob(60, [1], "talk")
    prefix, paused = (Blob(tokens=[1], job=job, data=own.data) for job in (0, 7))
    assert [store.put(each) for each in (own, prefix, paused)] == [True] * 3
    assert list(store) == [paused, prefix, own]
    again = Blob(tokens=[1, 2], job=7, data=own.data)
    assert store.put(again)
    assert list(store) == [again, prefix, own]
    assert (store.statistics()["kv_cache_bytes"], store.has_room(40)) == (60, True)
    for each in (own, prefix):
        store.drop(each)
    assert store.statistics()["kv_cache_bytes"] == 60
    store.drop(again)
    assert store.statistics()["kv_cache_bytes"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each copy has new memory")
def test_the_memory_of_a_copy_is_used_again_when_nobody_needs_it() -> None:
    store = KvStore(100 * MIB)

    def put(n_bytes: int, text: int) -> int:
        data = store.memory(n_bytes)
        data[:] = text
        assert store.put(Blob(tokens=[text], data=data))
        return int(data.ctypes.data)

    def drop(text: int) -> Blob:
        dropped = next(each for each in store if each.tokens == [text])
        store.drop(dropped)
        return dropped

    first = put(30 * MIB, 1)
    held = drop(1)  # as by the thread that writes a file
    assert put(30 * MIB, 2) != first
    assert held.data.min() == held.data.max() == 1
    del held
    assert put(40 * MIB, 3) == first  # there is room to grow
    drop(3)
    assert put(10 * MIB, 4) == first
    assert [(each.tokens[0], each.data.min(), each.data.max()) for each in store] == [(4, 4, 4), (2, 2, 2)]


def test_pinned_memory_is_used_where_the_device_has_some() -> None:
    taken: list[int] = []

    def pinned(n_bytes: int) -> npt.NDArray[np.uint8] | None:
        taken.append(n_bytes)
        return np.empty(n_bytes, np.uint8) if len(taken) < 3 else None

    store = KvStore(100 * MIB, pinned)
    first = store.memory(16 * MIB)
    assert store.held_bytes == 18 * MIB  # all of it takes memory, also what is there to grow into
    at = first.ctypes.data
    del first
    assert store.held_bytes == 18 * MIB
    again = store.memory(18 * MIB)
    assert again.ctypes.data == at
    large = store.memory(80 * MIB)  # no room for more than it needs
    assert taken == [18 * MIB, 80 * MIB]
    assert store.held_bytes == 98 * MIB
    other = store.memory(MIB)  # the device has no more
    assert len(taken) == 3
    assert store.held_bytes == 99 * MIB
    del again, large, other


def test_copies_do_not_wait_for_pinned_memory_that_was_taken_ahead_of_time() -> None:
    taken: list[int] = []

    def pinned(n_bytes: int) -> npt.NDArray[np.uint8]:
        taken.append(n_bytes)
        return np.empty(n_bytes, np.uint8)

    store = KvStore(100 * MIB, pinned)
    store.reserve(200 * MIB)  # more than the limit
    assert store.held_bytes == 0
    store.reserve(32 * MIB)
    store.reserve(8 * MIB)  # there is more already
    assert taken == [32 * MIB]
    assert store.held_bytes == 32 * MIB
    first = store.memory(24 * MIB)
    second = store.memory(8 * MIB)
    assert taken == [32 * MIB, 9 * MIB]
    del first, second  # the larger one is kept
    assert store.held_bytes == 32 * MIB
    again = store.memory(32 * MIB)
    assert taken == [32 * MIB, 9 * MIB]
    del again
    store.set_limit(16 * MIB, strict=True)
    assert store.held_bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each copy has new memory")
def test_memory_that_is_kept_for_the_next_copy_is_within_the_limit() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    store = KvStore(100 * MIB)
    before = resident_bytes()
    for text, n_mib in enumerate((60, 90, 30, 60, 20, 50)):  # most of them evict the one before
        data = store.memory(n_mib * MIB)
        data[:] = 1
        store.put(Blob(tokens=[text], data=data))
        del data
        assert resident_bytes() - before < 110 * MIB
    for each in list(store):
        store.drop(each)
    del each
    assert resident_bytes() - before < 110 * MIB
