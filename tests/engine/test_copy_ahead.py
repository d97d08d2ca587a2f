"""Conversations are copied to the KV store ahead of time: by the scheduler with a real model, and by a real engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from batcher_driver import N_WORDS, tale, talk
from engine_driver import EngineProcess, engine, ids

from frameshard.engine import idle
from frameshard.engine.kvstore import Blob, KvStore
from frameshard.wire import engine as em


def size_of_copy(path: Path, names: Sequence[str]) -> int:
    """The bytes of the largest copy of one of these conversations."""
    with talk(path) as one:
        sizes = []
        for name in names:
            one.say(tale(name), name)
            blob = one.batcher.reuse.copy_of(name)
            assert blob is not None
            sizes.append(blob.data.nbytes)
    return max(sizes)


def test_a_switch_copies_nothing_out_that_was_copied_ahead(tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model("llama")
    with talk(path) as one, talk(path, n_parallel=4) as roomy:

        def both(name: str, *more: str) -> int:
            here, there = (each.say(tale(name, *more), name) for each in (one, roomy))
            assert here[1] == there[1]
            assert here[0] == there[0] or not more
            return here[0]

        both("fox")
        assert one.copy_ahead() == 0  # one conversation needs no copy
        both("owl")
        assert one.n_saved == 1
        assert [one.copy_ahead(), one.copy_ahead()] == [1, 0]
        for name, other in (("fox", "owl"), ("owl", "fox")) * 2:
            before = one.n_saved
            assert both(name, *["rain"] * one.n_saved) > N_WORDS
            assert one.n_saved == before  # the other one's copy is there
            assert one.batcher.reuse.copy_of(other) is not None
            assert one.n_saved == before
            assert [one.copy_ahead(), one.copy_ahead()] == [1, 0]
        assert roomy.n_saved == roomy.copy_ahead() == 0


def test_a_conversation_that_goes_on_drops_its_copy_and_gets_another(tiny_model: Callable[[str], Path]) -> None:
    with talk(tiny_model("llama")) as one:
        for name in ("fox", "owl"):
            one.say(tale(name), name)
        assert (one.copy_ahead(), one.stat("entries")) == (1, 2)
        one.say(tale("owl", "again"), "owl")
        assert one.stat("entries") == 1
        assert (one.copy_ahead(), one.stat("entries")) == (1, 2)
        before = one.n_saved
        assert one.say(tale("fox", "again"), "fox")[0] > N_WORDS
        assert one.say(tale("owl", "again", "and again"), "owl")[0] > N_WORDS
        assert one.n_saved == before + 1  # of the fox, which was not idle since


def test_a_paused_job_is_not_copied_twice(tiny_model: Callable[[str], Path]) -> None:
    with talk(tiny_model("llama")) as one:
        for name in ("fox", "owl"):
            one.say(tale(name), name)
        job = one.start(tale("owl", "again"), "owl")
        while not any(isinstance(event, em.Token) for event in one.batcher.step()):
            assert one.copy_ahead() == 0  # a job runs
        before = one.n_saved
        one.batcher.cancel(job, keep=True)
        assert (one.n_saved, one.copy_ahead()) == (before + 1, 0)


def test_no_other_copy_is_evicted_for_one_made_ahead(tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model("llama")
    n_bytes = size_of_copy(path, ("fox", "owl"))
    with talk(path, kv_cache_bytes=n_bytes * 3 // 2) as one:
        for name in ("fox", "owl"):
            one.say(tale(name), name)
        assert (one.copy_ahead(), one.stat("entries"), one.stat("evictions")) == (0, 1, 0)


def test_copies_made_ahead_are_evicted_before_others(tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model("llama")
    names = ("fox", "owl", "elk", "bee")
    n_bytes = size_of_copy(path, names)
    with talk(path, kv_cache_bytes=n_bytes * 7 // 2, n_parallel=2) as one:
        for name in names[:3]:
            one.say(tale(name), name)
        assert (one.copy_ahead(), one.stat("entries")) == (2, 3)
        one.say(tale("bee"), warm_up=True)
        assert (one.stat("entries"), one.stat("evictions")) == (3, 0)
        assert int(str(one.stat("bytes"))) <= n_bytes * 7 // 2
        for name in ("fox", "bee"):  # neither has a sequence
            assert one.say(tale(name, "again"), name)[0] > N_WORDS


def test_a_warm_up_keeps_its_text_apart_from_a_copy_made_ahead(tiny_model: Callable[[str], Path]) -> None:
    """That copy would be dropped when its conversation goes on."""
    with talk(tiny_model("llama"), n_parallel=2) as one:
        for name in ("fox", "owl", "elk"):
            one.say(tale(name), name, n_answer=1)
        assert (one.copy_ahead(), one.stat("entries")) == (2, 3)
        ahead = one.batcher.reuse.copy_of("elk")
        assert ahead is not None
        one.say(tale("elk"), warm_up=True)
        assert ahead.tokens in [tokens for conversation, tokens, _ in one.blobs() if conversation is None]


def test_copies_made_ahead_do_not_change_what_is_reused(tiny_model: Callable[[str], Path]) -> None:
    """Whenever they are made. Here conversations share texts, and the store is too small for all of them."""
    path, dice = tiny_model("llama"), random.Random(1)
    n_bytes = size_of_copy(path, ("fox",))
    options = {"n_parallel": 3, "kv_cache_bytes": 4 * n_bytes}
    texts = {
        name: tale("fox")[: 150 + 20 * i] + f"and the {name} "
        for i, name in enumerate(("owl", "elk", "bee", "ant", "cat"))
    }
    n_reused = n_copies = 0
    with talk(path, **options) as one, talk(path, **options) as other:
        for _ in range(60):
            name = dice.choice(list(texts))
            texts[name] += dice.choice(["goes on. ", "rests. "]) * dice.randrange(2)
            if len(texts[name]) > 260:
                texts[name] = texts[name][:150] + f"and a {name} "
            prompt, conversation = texts[name], dice.choice([name, name, None])
            here = one.say(prompt, conversation)
            assert here == other.say(prompt, conversation)
            n_reused += here[0]
            assert one.blobs() == other.blobs()
            for _ in range(dice.randrange(3)):
                n_copies += one.batcher.reuse.copy_ahead()
            assert one.blobs() == other.blobs()
            assert int(str(one.stat("bytes"))) <= options["kv_cache_bytes"]
        assert one.stat("evictions") == other.stat("evictions") != 0
        assert (n_reused > 3000, n_copies > 10, one.n_saved < other.n_saved + n_copies) == (True, True, True)


def test_a_copy_that_was_read_from_a_file_is_not_replaced(tiny_model: Callable[[str], Path]) -> None:
    """The game has loaded a save: the conversation goes on from there, and not from what its sequence has."""
    with talk(tiny_model("llama")) as one:
        one.say(tale("fox", "rain " * 20), "fox")
        saved = one.batcher.reuse.copy_of("fox")
        assert saved is not None
        for name in ("owl", "fox"):
            one.say(tale(name), name)
        assert one.batcher.reuse.add(saved, "fox")
        assert one.copy_ahead() == 0
        assert one.batcher.reuse.copy_of("fox") is not None
        n_reused, _ = one.say(tale("fox", "rain " * 20, "and then?"), "fox")
        assert n_reused > len(saved.tokens) - 10


def test_nothing_is_copied_ahead_of_a_recurrent_model(tiny_model: Callable[[str], Path]) -> None:
    with talk(tiny_model("mamba2")) as one:
        for name in ("fox", "owl"):
            one.say(tale(name), name)
        assert (one.copy_ahead(), one.n_saved) == (0, 0)


def test_the_moment_must_be_idle(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with talk(tiny_model("llama")) as one:
        work = idle.Idle(
            idle.IdleProfile(one.runtime, lambda: None),
            idle.IdleDisk(None, lambda change: change(), lambda: None),
            one.batcher.reuse.copy_ahead,
        )
        assert work.due_in() is None
        for name in ("fox", "owl"):
            one.say(tale(name), name)
            work.disturb()
        before = one.n_saved
        for _ in range(2):
            assert work.due_in() == idle.COPY_QUIET_S
            assert (work.work(), one.n_saved) == (False, before)
            now += idle.COPY_QUIET_S / 2
            work.disturb()
        now += idle.COPY_QUIET_S
        assert work.due_in() == 0.0
        for _ in range(2):
            assert (work.work(), one.n_saved) == (False, before + 1)
        assert work.due_in() is None  # nothing is left


def until_entries(child: EngineProcess, n: int) -> None:
    deadline = time.monotonic() + 60
    while child.stats()["kv_cache_entries"] != n:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_idle_engine_copies_ahead(tiny_model: Callable[[str], Path]) -> None:
    """Jobs that come at any time give the same text as in an engine that has a sequence for each conversation."""
    path = tiny_model("llama")
    few = {"max_tokens": 6}
    names = ("fox", "owl", "elk")
    with engine(path, n_parallel=1) as child, engine(path) as roomy:
        for turn in range(5):
            for name in names:
                here, there = (
                    each.run(tale(name, *["rain"] * turn), conversation=name, params=few) for each in (child, roomy)
                )
                assert ids(here) == ids(there)
                if turn:
                    assert here[0]["n_reused"] == there[0]["n_reused"] > N_WORDS
                if turn in (1, 3):
                    time.sleep(idle.COPY_QUIET_S)  # about when a copy is made
            until_entries(child, len(names))
        stats = child.stats()
        assert (stats["kv_cache_evictions"], roomy.stats()["kv_cache_entries"]) == (0, 0)


def test_the_store_evicts_copies_made_ahead_first() -> None:
    def blob(text: int, *, ahead: bool = False) -> Blob:
        return Blob(tokens=[text], ahead=ahead, data=store.memory(40))

    store = KvStore(100)
    first, second, third = blob(1), blob(2, ahead=True), blob(3)
    for each in (first, second, third):
        assert store.put(each)
    assert list(store) == [third, first]
