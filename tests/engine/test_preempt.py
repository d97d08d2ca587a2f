"""A decode gives way to a more urgent job, and runs again later. The scheduler with real models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forks import run_script

SCRIPT = """
import json, sys
from frameshard.engine.batch import Batcher
from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import Runtime
from frameshard.wire import engine as em
from frameshard.wire.messages import Sampling

def run(when=lambda n: None, beside=lambda batcher: None):
    '''Runs two background jobs. Before each decode, on the CPU in the middle of it, calls when(number of the decode).
    Preempts with the priority that it returns, or adds the job that it returns and preempts with its priority.
    Calls beside(the batcher) before all.

    :returns: the tokens of each job, the number of decodes that began, and the job of each event in order.
    '''
    batcher, reader, begun, nodes = Batcher(runtime), RequestReader(runtime), [], [0]

    def disturb():
        wanted = when(len(begun))
        if isinstance(wanted, em.Submit):
            batcher.add(reader.read(wanted))
            wanted = wanted.priority
        if wanted is not None:
            batcher.preempt(wanted)

    def counted():
        begun.append(None)
        nodes[0] = 0
        if device != "cpu":
            disturb()
        decode()

    def at_node():
        nodes[0] += 1
        if nodes[0] == 20:
            disturb()
        return on_node()

    runtime.llama.decode, runtime.on_node = counted, at_node
    beside(batcher)
    for number in (1, 2):
        batcher.add(reader.read(ask(number, "the keeper counts the gulls " * 12 * number, 0)))
    events = []
    while batcher.busy:
        events += batcher.step()
    assert sum(isinstance(event, em.Done) for event in events) == len({event.job for event in events}), events
    tokens = {event.job: [] for event in events}
    for event in events:
        if isinstance(event, em.Token):
            tokens[event.job].append(event.id)
    return tokens, len(begun), [event.job for event in events]

def ask(number, prompt, priority):
    sampling = Sampling(temperature=0.9, seed=number, max_tokens=12)
    return em.Submit(number, "completion", sampling, prompt=prompt, priority=priority)

path, device = sys.argv[1:]
config = em.EngineConfig(path, device=device, n_ctx=1024, n_parallel=3, n_threads=1, mode="stream_only")
runtime = Runtime.load(config, measure=False)
decode, on_node = runtime.llama.decode, runtime.on_node
"""

EACH_DECODE = """
undisturbed, n_decodes, _ = run()
given_up, n_begun, _ = run(lambda n: 2)
equal, n_equal, _ = run(lambda n: 0)
print(json.dumps([given_up == undisturbed, equal == undisturbed, n_begun / n_decodes, n_equal / n_decodes]))
"""

NO_ROOM = """
from frameshard.errors import OutOfMemory

def refuses(batcher):
    def refused():
        runtime.llama.decode = regular
        batcher.preempt(2)
        raise OutOfMemory("no room")
    regular, runtime.llama.decode = runtime.llama.decode, refused

undisturbed, n_decodes, _ = run()
refused, n_begun, _ = run(beside=refuses)
print(json.dumps([refused == undisturbed, n_begun == n_decodes]))
"""

ABORTED = """
def aborts(n):
    if n in (2, 9, 25):
        runtime.abort()

undisturbed, n_decodes, _ = run()
disturbed, n_begun, _ = run(aborts)
print(json.dumps([disturbed == undisturbed, n_begun > n_decodes]))
"""

ANY_MOMENT = """
import threading
stop = threading.Event()

def preempt_often(batcher):
    def often():
        while not stop.is_set():
            batcher.preempt(2)
    threading.Thread(target=often, daemon=True).start()

undisturbed, n_decodes, _ = run()
disturbed, n_begun, _ = run(beside=preempt_often)
stop.set()
print(json.dumps([disturbed == undisturbed, n_decodes < n_begun <= 2 * n_decodes]))
"""

URGENT = """
question = ask(3, "who goes there?", 2)
tokens, _, order = run(lambda n: question if n == 1 else None)
print(json.dumps([order[:3], [len(tokens[number]) for number in (1, 2, 3)]]))
"""


def results(script: str, model: Path, device: str) -> object:
    run = run_script(SCRIPT + script, model, device)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_each_decode_gives_way_once(tiny_model: Callable[[str], Path], device: str) -> None:
    """So jobs get on, however many urgent ones come. Their text is that of an undisturbed run."""
    assert results(EACH_DECODE, tiny_model("llama"), device) == [True, True, 2.0, 1.0]


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_decode_may_give_way_at_any_moment(tiny_model: Callable[[str], Path], device: str) -> None:
    """Another thread preempts without a pause, also between decodes."""
    assert results(ANY_MOMENT, tiny_model("llama"), device) == [True, True]


def test_a_decode_that_gives_way_may_have_no_room(tiny_model: Callable[[str], Path]) -> None:
    """What it lacks shows when it runs again."""
    assert results(NO_ROOM, tiny_model("llama"), "emulated") == [True, True]


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("name", ["llama", "falcon-h1", "mamba2"])
def test_a_decode_that_was_aborted_runs_again(tiny_model: Callable[[str], Path], name: str, device: str) -> None:
    """As a budget does that falls. A recurrent state is lost with it: its text is read again, also in mid-answer."""
    assert results(ABORTED, tiny_model(name), device) == [True, True]


def test_a_recurrent_state_cannot_be_decoded_again(tiny_model: Callable[[str], Path]) -> None:
    assert results(EACH_DECODE, tiny_model("mamba2"), "cpu") == [True, True, 1.0, 1.0]


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_an_urgent_job_does_not_wait_for_the_step_of_a_prompt(tiny_model: Callable[[str], Path], device: str) -> None:
    """It comes while the first prompt is read. Its start and its first token are the next events."""
    assert results(URGENT, tiny_model("llama"), device) == [[1, 3, 3], [12, 12, 12]]
