"""Embeddings by a real sentence encoder in a real process. The engine is a fake one: the encoder does not need it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import llama_cpp.llama
import numpy as np
import pytest
import trio

import frameshard
from frameshard import errors
from frameshard.broker.embedder import Embedder
from frameshard.plan.header import read_header
from frameshard.wire import embedder as wire
from frameshard.wire import messages as m
from frameshard.wire.connection import ServerConnection
from sidecars import alive, children, freeze, gone_after, in_trio, launch, raw_peer, thaw, until, until_lost

PAIRS = {
    ("The weather is lovely today.", "It's so sunny outside!"): 0.6660,
    ("The weather is lovely today.", "He drove to the stadium."): 0.1046,
    ("It's so sunny outside!", "He drove to the stadium."): 0.1411,
    ("The cat sits outside", "The dog plays in the garden"): 0.2838,
    ("A man is playing guitar", "A woman watches TV"): -0.0327,
    ("The movies are awesome", "The new movie is so great"): 0.6571,
}
"""Similarities that the documentation of sentence-transformers and lessons with it show for this model."""

TEXTS = sorted({text for pair in PAIRS for text in pair})
LONG = "The innkeeper remembers who has paid. " * 20


async def embedder_of(client: frameshard.Client) -> int:
    """Waits until the embedder process runs, and returns its id."""
    broker = (await client.stats()).broker.pid
    found: list[int] = []

    def runs() -> bool:
        for pid in children(broker):
            try:
                if b"frameshard.engine.embedder" in Path(f"/proc/{pid}/cmdline").read_bytes() and alive(pid):
                    found.append(pid)
            except FileNotFoundError:
                continue
        return bool(found)

    await until(runs)
    return found[-1]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def kept(results: dict[str, Any], name: str, rows: Any) -> None:
    try:
        results[name] = await rows
    except frameshard.FrameshardError as error:
        results[name] = error


@in_trio
async def test_rows_are_those_of_llama_cpp_and_of_sentence_transformers(encoder_path: Path) -> None:
    texts = [*TEXTS, "größer 猫 🧀\0 end"]
    async with launch(embedder=encoder_path) as client:
        assert (await client.model_info()).embedder == encoder_path.name
        rows, n_tokens = await client.embed_counted(texts)
        alone = await client.embed(texts[3:4])
    assert rows.dtype == np.float16
    assert rows.shape == (len(texts), 384)
    assert alone.tobytes() == rows[3:4].tobytes(), "a row depends on other texts"
    assert np.abs(np.linalg.norm(rows.astype(np.float64), axis=1) - 1).max() < 1e-3
    reference = llama_cpp.llama.Llama(str(encoder_path), embedding=True, verbose=False, n_threads=1)
    assert n_tokens == sum(len(reference.tokenize(text.encode(), add_bos=True, special=False)) for text in texts)
    expected = np.array(reference.embed(texts, normalize=True))
    assert np.abs(rows - expected).max() < 1e-3
    by_text = dict(zip(texts, rows.astype(np.float64), strict=True))
    found = {pair: float(by_text[pair[0]] @ by_text[pair[1]]) for pair in PAIRS}
    assert sorted(found, key=found.__getitem__) == sorted(PAIRS, key=PAIRS.__getitem__)
    assert max(abs(found[pair] - PAIRS[pair]) for pair in PAIRS) < 2e-3


@in_trio
async def test_the_process_is_idle_and_sees_no_gpu_and_ends_with_the_broker(encoder_path: Path) -> None:
    async with launch(embedder=encoder_path) as client:
        broker = (await client.stats()).broker.pid
        before = children(broker)
        await client.embed(["a"])
        pid = await embedder_of(client)
        assert pid not in before, "it is started by the first request"
        assert os.sched_getscheduler(pid) == os.SCHED_IDLE
        autogroup = Path(f"/proc/{pid}/autogroup")
        assert not autogroup.exists() or autogroup.read_text().split()[-1] == "19"
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert {b"CUDA_VISIBLE_DEVICES=-1", b"HIP_VISIBLE_DEVICES=-1", b"GGML_DISABLE_VULKAN=1"} <= set(environment)
        assert "libllama" in Path(f"/proc/{pid}/maps").read_text()
        assert "libframeshard_device" not in Path(f"/proc/{pid}/maps").read_text()
        files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
        assert not [file for file in files if file.startswith(("/dev/nvidia", "/dev/dri", "/dev/kfd"))]
        os.kill(broker, signal.SIGKILL)
        await until_lost(client)
        await trio.to_thread.run_sync(gone_after, [broker, pid])


@in_trio
async def test_a_killed_embedder_costs_no_request_and_no_job(encoder_path: Path) -> None:
    """The process that replaces it encodes the same text. Two deaths fail the request, and nothing else."""
    async with launch(embedder=encoder_path) as client, client.ask("one two") as answer:
        expected = await client.embed(TEXTS[:4])
        results: dict[str, Any] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept, results, "once", client.embed(TEXTS[:4]))
            os.kill(await embedder_of(client), signal.SIGABRT)
        assert results["once"].tobytes() == expected.tobytes()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept, results, "always", client.embed([LONG] * 64))
            while "always" not in results:
                with trio.move_on_after(1):  # there is none once the request has failed
                    pid = await embedder_of(client)
                    if "always" not in results:
                        os.kill(pid, signal.SIGKILL)
                        await until(lambda pid=pid: not alive(pid))  # type: ignore[misc]
        died = results["always"]
        assert isinstance(died, errors.EngineDied)
        assert died.retriable
        assert "signal 9" in died.message
        assert (await client.embed(TEXTS[:4])).tobytes() == expected.tobytes()
        await answer.completed()
        assert answer.text == "one two"
        assert (await client.stats()).broker.engine_restarts == 0


@in_trio
async def test_a_wrong_file_fails_only_the_request(encoder_path: Path, model_path: Path, tmp_path: Path) -> None:
    """After each of them, the sidecar takes a file that was repaired."""
    path, whole = tmp_path / "encoder.gguf", encoder_path.read_bytes()
    async with launch(embedder=path) as client:
        with pytest.raises(errors.ModelNotFound):
            await client.embed(["a"])
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(errors.BadModel, match="truncated"):
            await client.embed(["a"])
        path.unlink()
        path.symlink_to(model_path)
        with pytest.raises(errors.BadModel, match=r"not a sentence encoder: llama\.pooling_type is missing"):
            await client.embed(["a"])
        path.unlink()
        bias = next(tensor for tensor in read_header(encoder_path).tensors if tensor.name == "token_embd_norm.bias")
        nan = np.full(bias.n_weights, np.nan, "<f4").tobytes()
        path.write_bytes(whole[: bias.offset] + nan + whole[bias.offset + len(nan) :])
        with pytest.raises(errors.BadModel, match="NaN or zeros"):
            await client.embed(["a"])
        path.unlink()
        at = whole.index(b"bert.context_length") + len(b"bert.context_length") + 4
        path.write_bytes(whole[:at] + (1024).to_bytes(4, "little") + whole[at + 4 :])
        with pytest.raises(errors.BadModel, match=r"llama\.cpp refuses"):
            await client.embed(["a"])
        shutil.copy(encoder_path, path)
        assert (await client.embed(["word " * 500])).shape == (1, 384)
        assert await client.ask("one two").completed()


@in_trio
async def test_clients_take_turns_and_one_that_goes_is_forgotten(encoder_path: Path) -> None:
    async with launch(embedder=encoder_path) as client:
        await client.embed(["a"])
        pid = await embedder_of(client)
        start = cpu_ticks(pid)
        await client.embed([LONG])
        one = cpu_ticks(pid) - start
        async with raw_peer(client.info) as raw:
            await raw.greet()
            await raw.say(m.Embed(2, raw.epoch, (LONG,) * 64))
            await raw.say(m.Ping(3, raw.epoch))
            await raw.hear_of(3)
            await client.embed(["b"])
            freeze(pid)
            start = cpu_ticks(pid)
            await raw.say(m.Bye(4, raw.epoch))
            while isinstance(answer := await raw.hear(), m.Pong):
                pass
            assert isinstance(answer, m.Ok), "the other client had to wait for all texts"
            thaw(pid)
        await client.embed([LONG])
        await client.embed([LONG])
        assert cpu_ticks(pid) - start < 20 * max(one, 1), "the texts of a client that has gone were encoded"


@in_trio
async def test_requests_that_are_repeated_after_a_resumption_are_carried_out_once(encoder_path: Path) -> None:
    async with launch(embedder=encoder_path) as client:
        await client.embed(["a"])
        freeze(pid := await embedder_of(client))
        async with raw_peer(client.info) as raw:
            session = (await raw.greet()).session
            requests = [m.Embed(number, raw.epoch, ("a",)) for number in range(2, 18)]
            for request in requests:
                await raw.say(request)
            await raw.say(m.Ping(18, raw.epoch))
            await raw.hear_of(18)
        async with raw_peer(client.info) as raw:
            assert (await raw.greet(session=session)).resumed
            for request in requests:
                await raw.say(request)
            heard: list[Any] = []

            async def listen(until_id: int) -> None:
                while not heard or heard[-1].id != until_id:
                    heard.append(await raw.hear())

            await raw.say(m.Ping(19, raw.epoch))
            await listen(19)
            thaw(pid)
            await listen(requests[-1].id)
            await raw.say(m.Embed(20, raw.epoch, ("b",)))
            await listen(20)
        answers = [(type(answer), answer.id) for answer in heard if not isinstance(answer, m.Pong)]
        assert answers == [(m.Embeddings, number) for number in (*range(2, 18), 20)]


def test_an_embedder_that_gives_no_answer_has_not_answered() -> None:
    """Its process is ended, and the text is still to be encoded."""
    embedder = Embedder("encoder", epoch=77, changed=lambda: None)
    embedder.ask(ServerConnection(1, epoch=77, held_bytes=1, now=0.0), m.Embed(2, 77, ("a",)))
    embedder._next_text()
    with pytest.raises(errors.BadMessage):
        embedder._answered(wire.Encode("a"))
    assert embedder._current is not None


@in_trio
async def test_limits(encoder_path: Path) -> None:
    async with launch(embedder=encoder_path) as client:
        results: dict[str, Any] = {}
        await client.embed(["a"])
        freeze(pid := await embedder_of(client))
        async with trio.open_nursery() as nursery:
            for number in range(17):
                nursery.start_soon(kept, results, str(number), client.embed(["a"]))
            await until(lambda: bool(results))
            thaw(pid)
        refused = [error for error in results.values() if isinstance(error, Exception)]
        assert [type(error) for error in refused] == [errors.Overloaded]  # 16 wait for the process
        for wrong in ([], [""], ["a"] * 65, ["a" * 65537], ["a" * 60000] * 20):
            with pytest.raises(errors.BadArgument):
                await client.embed(wrong)
        for text in ("word " * 13107, "猫" * 21845):
            with pytest.raises(errors.ContextOverflow, match=r"texts\[1\]: it has \d+ tokens") as caught:
                await client.embed(["a", text])
            assert caught.value.detail["text"] == 1
            assert caught.value.detail["n_ctx"] == 512
    async with launch() as client:
        with pytest.raises(errors.Unsupported, match="launch it with embedder=PATH"):
            await client.embed(["a"])
        assert (await client.model_info()).embedder == ""


@in_trio
async def test_an_encoder_is_no_language_model(encoder_path: Path) -> None:
    """llama.cpp would draw tokens from it, and end the engine at a prompt of several steps."""
    with pytest.raises(errors.Unsupported, match="launch option embedder"):
        async with frameshard.launch(encoder_path, device="cpu", log=subprocess.DEVNULL):
            pytest.fail("it was launched")
