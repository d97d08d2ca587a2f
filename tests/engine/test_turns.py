"""Which jobs the scheduler runs next, and which sequences they get."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from batcher_driver import N_WORDS, Talk, tale, talk

from frameshard.engine import batch
from frameshard.engine.batch import TURN_DECODES
from frameshard.engine.llama import VramTaken
from frameshard.errors import OutOfMemory
from frameshard.plan.adapter import read_adapter
from frameshard.wire import engine as em
from frameshard.wire.messages import Adapter
from make_adapter import make_adapter


def speakers(events: Sequence[em.JobEvent]) -> list[int]:
    """The jobs of the tokens, in order."""
    return [event.job for event in events if isinstance(event, em.Token)]


def until_token(one: Talk, job: int) -> list[em.JobEvent]:
    """Runs the jobs until this one has a token. Returns its events."""
    events: list[em.JobEvent] = []
    while job not in speakers(events):
        events += one.batcher.step()
    return [event for event in events if event.job == job]


def test_sets_of_adapters_take_turns(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """None waits until another one has nothing more to say. A job uses its adapters also while it waits."""
    model = tiny_model("llama")
    with talk(model, n_parallel=3) as one:
        for seed, name in enumerate("ab", start=1):
            make_adapter(model, tmp_path / name, seed=seed)
            one.runtime.load_adapter(name, read_adapter(tmp_path / name, one.runtime.model_info))
        n_tokens = 5 * TURN_DECODES
        sets = [(), (Adapter("a", 1.0),), (Adapter("b", 0.5),)]
        jobs = [one.start("Once upon", adapters=each, n_answer=n_tokens) for each in sets]
        assert [one.batcher.uses(name) for name in "abc"] == [True, True, False]
        said = speakers(one.events())
        assert [said.count(job) for job in jobs] == [n_tokens] * 3
        together = said[: min(len(said) - said[::-1].index(job) for job in jobs)]
        assert max(len(list(run)) for _, run in itertools.groupby(together)) <= TURN_DECODES
        assert not one.batcher.uses("a")
        # The order in which a job names them does not matter, nor does one with scale 0.
        resolve = one.runtime.adapters.resolve
        a, b = sets[1] + sets[2]
        assert resolve((b, a)) == resolve((a, b)) != resolve((a,)) == resolve((a, Adapter("b", 0.0)))


def test_each_job_waits_for_vram_by_itself(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes when others have waited long does not fail with its first decode."""
    monkeypatch.setattr(batch, "TAKEN_S", 0.1)
    monkeypatch.setattr(batch, "TAKEN_PAUSE_S", 0.01)
    with talk(tiny_model("llama"), n_parallel=2) as one:
        n_decodes = 0

        def taken(*_: object, **__: object) -> list[int]:
            nonlocal n_decodes
            n_decodes += 1
            raise VramTaken("other programs hold it")

        decode = one.runtime.decode
        monkeypatch.setattr(one.runtime, "decode", taken)
        for _ in range(2):
            n_decodes = 0
            job = one.start("Once upon")
            last = one.events()[-1]
            assert isinstance(last, em.Failed)
            assert (last.job, last.error.name, n_decodes > 1) == (job, "out_of_memory", True)
        # Of two jobs that decode together the one that has waited too long ends.
        monkeypatch.setattr(one.runtime, "decode", decode)
        jobs = [one.start("Once upon", n_answer=30) for _ in range(2)]
        until_token(one, jobs[1])
        monkeypatch.setattr(one.runtime, "decode", taken)
        one.batcher._taken_since[jobs[0]] = 0.0
        events = one.batcher.step()
        assert [(event.job, type(event)) for event in events] == [(jobs[0], em.Failed)]
        monkeypatch.setattr(one.runtime, "decode", decode)
        assert isinstance(one.events()[-1], em.Done)


def test_jobs_wait_while_a_more_urgent_one_reads_its_prompt(tiny_model: Callable[[str], Path]) -> None:
    for priority, others_wait in ((1, False), (2, True)):
        with talk(tiny_model("llama"), n_parallel=2, n_ubatch=32) as one:
            talker = one.start("Once upon", n_answer=60)
            until_token(one, talker)
            reader = one.start(tale("fox"), priority=priority)
            events = one.events()
            first = speakers(events).index(reader)
            assert (talker not in speakers(events)[:first]) == others_wait


def test_jobs_of_a_conversation_do_not_overtake_each_other(tiny_model: Callable[[str], Path]) -> None:
    with talk(tiny_model("llama"), n_parallel=3, n_ubatch=32) as one:
        reader = one.start(tale("fox"), priority=1)
        one.batcher.step()
        earlier, later = (one.start("Who goes there?", "inn", priority=priority) for priority in (0, 2))
        said = [job for job in speakers(one.events()) if job != reader]
        assert said == [earlier] * 4 + [later] * 4


def test_a_new_conversation_takes_the_sequence_that_was_used_longest_ago(tiny_model: Callable[[str], Path]) -> None:
    with talk(tiny_model("llama"), n_parallel=3, kv_cache_bytes=0) as one:
        for name in ("fox", "owl", "fox", "elk", "bee"):  # the elk gets the empty one, the bee the owl's
            one.say(tale(name), name)
        n_reused = {name: one.say(tale(name, "again"), name)[0] for name in ("fox", "elk", "bee")}
        assert min(n_reused.values()) > N_WORDS, n_reused
        assert one.say(tale("owl", "again"), "owl")[0] < N_WORDS


def test_a_job_that_goes_on_keeps_the_cells_of_the_conversation_in_its_sequence(
    tiny_model: Callable[[str], Path],
) -> None:
    with talk(tiny_model("llama"), mode="stream_only") as one:
        paused = one.start(tale("fox"), n_answer=8)
        started, *said = until_token(one, paused)
        one.batcher.cancel(paused, keep=True)
        assert isinstance(started, em.Started)
        one.say(tale("owl"), "owl")
        resume = tuple(event.id for event in said if isinstance(event, em.Token))
        one.start(tale("fox"), n_answer=8, job=paused, resume=resume, history=started.history)
        assert len(speakers(one.events())) == 8 - len(resume)
        assert one.say(tale("owl", "again"), "owl")[0] > N_WORDS


def test_a_paused_job_whose_conversation_loses_its_sequence_decodes_nothing_again(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with talk(tiny_model("llama"), mode="stream_only") as one:
        paused = one.start(tale("fox"), "fox", n_answer=8)
        started, *said = until_token(one, paused)
        one.batcher.cancel(paused, keep=True)
        assert isinstance(started, em.Started)
        one.say(tale("owl"), "owl")
        resume = tuple(event.id for event in said if isinstance(event, em.Token))
        n_decodes, decode = 0, one.runtime.decode

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal n_decodes
            n_decodes += 1
            return decode(*args, **options)

        monkeypatch.setattr(one.runtime, "decode", counted)
        one.start(tale("fox"), "fox", n_answer=8, job=paused, resume=resume, history=started.history)
        assert len(speakers(one.events())) == n_decodes == 8 - len(resume)
        assert one.say(tale("fox", "again"), "fox")[0] > N_WORDS


def test_a_decode_that_got_no_memory_runs_once_more(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program that held VRAM may have freed it before the engine looks who holds it."""
    with talk(tiny_model("llama")) as one:
        _, expected = one.say(tale("fox"))
        refused, decode = [True], one.runtime.decode

        def refuse(*args: Any, **options: Any) -> Any:
            if refused and refused.pop():
                raise OutOfMemory("memory for a decode was refused")
            return decode(*args, **options)

        monkeypatch.setattr(one.runtime, "decode", refuse)
        for _ in range(2):
            assert one.say(tale("fox"))[1] == expected
            refused.append(True)
        refused.append(True)
        with pytest.raises(OutOfMemory):
            one.say(tale("fox"))


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_a_job_whose_cells_get_no_memory_waits_and_then_fails_alone(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    """Other jobs go on meanwhile. What a conversation has read is kept."""
    monkeypatch.setattr(batch, "TAKEN_S", patience_s)
    monkeypatch.setattr(batch, "TAKEN_PAUSE_S", 0.0)
    with talk(tiny_model("llama"), n_parallel=2, mode="stream_only") as one:
        expected = {name: one.say(tale(name), n_answer=40)[1] for name in ("fox", "owl")}
        one.say(tale("elk"), "elk")
        talking = one.start(tale("fox"), n_answer=40)
        until_token(one, talking)
        left, expect = [20], one.runtime.expect

        def refuse(seq: int, length: int, **options: Any) -> None:
            if left[0] and length > N_WORDS and one.batcher._slots[seq].job not in (None, other):
                left[0] -= 1
                raise OutOfMemory("no memory for a KV cache of this length")
            expect(seq, length, **options)

        (other,) = one.batcher._running()
        monkeypatch.setattr(one.runtime, "expect", refuse)
        owl, elk = one.start(tale("owl"), n_answer=40), one.start(tale("elk", "again " * N_WORDS), "elk")
        events = one.events()
        assert speakers(events).count(talking) == 39
        failed = [event.error.name for event in events if isinstance(event, em.Failed)]
        assert failed == ([] if patience_s else ["out_of_memory"] * 2)
        left[0] = 0
        if patience_s:
            assert [event.id for event in events if isinstance(event, em.Token) and event.job == owl] == expected["owl"]
            (reused,) = (each.n_reused for each in events if isinstance(each, em.Started) and each.job == elk)
        else:
            assert one.say(tale("owl"), n_answer=40)[1] == expected["owl"]
            reused, _ = one.say(tale("elk", "again"), "elk")
        assert reused > N_WORDS
