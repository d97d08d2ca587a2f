"""draft_driver.py MODEL: checks that drafts of a decode that failed do not stay. The model is its own draft model.

Other programs take the VRAM in the middle of the decode. Until it is repeated another job comes, with which nothing is
drafted. Both must say what they say undisturbed: no job gets the logits of another.

In a process of its own, because a process has one shard device.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from frameshard.engine.batch import Batcher
from frameshard.engine.draft import DraftModel
from frameshard.engine.llama import Rows, VramTaken
from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import Runtime
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire.engine import EngineConfig

SHORT = "Once upon a time there was a king who lived in"
LONG = "The wind blew over the hills and the old road was empty. " * 30


def said(runtime: Runtime, model: str, *, fails: bool) -> dict[int, list[int]]:
    """The tokens of two answers.

    :param fails: the first decode with drafts fails, and only then the second job comes.
    """
    tokens: dict[int, list[int]] = {1: [], 2: []}
    decode = runtime.decode
    with contextlib.closing(Batcher(runtime, None, DraftModel(runtime, model))) as batcher:

        def add(job: int, prompt: str) -> None:
            sampling = m.Sampling(max_tokens=16, seed=4)
            batcher.add(RequestReader(runtime).read(em.Submit(job, "completion", prompt=prompt, sampling=sampling)))

        def failing(batch: Sequence[Rows], *, ahead: bool = False) -> list[int]:
            if batch[0].logits == "all" and len(batch[0].tokens) > 1:
                runtime.decode = decode
                add(2, LONG)
                raise VramTaken("other programs hold it")
            return decode(batch, ahead=ahead)

        add(1, SHORT)
        if fails:
            runtime.decode = failing
        else:
            add(2, LONG)
        while batcher.busy:
            for event in batcher.step():
                assert not isinstance(event, em.Failed), event
                if isinstance(event, em.Token):
                    tokens[event.job].append(event.id)
    assert runtime.decode == decode
    return tokens


def main(model: str) -> None:
    config = EngineConfig(
        model, device="emulated", mode="stream_only", n_ctx=2048, n_parallel=2, n_ubatch=512, n_threads=1
    )
    with Runtime.load(config, measure=False) as runtime:
        undisturbed = said(runtime, model, fails=False)
        assert [len(tokens) for tokens in undisturbed.values()] == [16, 16]
        assert said(runtime, model, fails=True) == undisturbed


if __name__ == "__main__":
    main(*sys.argv[1:])
