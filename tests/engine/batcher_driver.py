"""The scheduler in this process, with a real model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frameshard.engine.batch import Batcher
from frameshard.engine.llama import Memory
from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import Runtime
from frameshard.wire import engine as em
from frameshard.wire.messages import Sampling

N_WORDS = 60


def tale(name: str, *more: str) -> str:
    return f"The {name} said: " + f"{name} " * N_WORDS + " ".join(more)


class Talk:
    """Gives jobs to the scheduler, and counts the copies to host memory."""

    def __init__(self, runtime: Runtime) -> None:
        self.n_saved = 0
        self.runtime = runtime
        self._save = runtime.save
        runtime.save = self._counted  # type: ignore[method-assign]
        self.batcher = Batcher(runtime)
        self._jobs = 0

    def _counted(self, seq: int, memory: Memory) -> object:
        self.n_saved += 1
        return self._save(seq, memory)

    def start(self, prompt: str, conversation: str | None = None, *, n_answer: int = 4, **fields: Any) -> int:
        """Adds a job, and returns its number.

        :param fields: further fields of :class:`em.Submit`.
        """
        self._jobs += 1
        sampling = Sampling(temperature=0.0, max_tokens=n_answer)
        request = em.Submit(
            fields.pop("job", self._jobs),
            "completion",
            sampling,
            prompt=prompt,
            conversation=conversation,
            **fields,
        )
        self.batcher.add(RequestReader(self.runtime).read(request))
        return request.job

    def events(self) -> list[em.JobEvent]:
        """Runs all jobs to their ends."""
        events: list[em.JobEvent] = []
        while self.batcher.busy:
            events += self.batcher.step()
        return events

    def say(self, prompt: str, conversation: str | None = None, **fields: Any) -> tuple[int, list[int]]:
        """Runs a job.

        :returns: the tokens that it reused, and those of the answer.
        """
        self.start(prompt, conversation, **fields)
        started, *said, done = self.events()
        assert isinstance(started, em.Started)
        assert isinstance(done, em.Done), done
        return started.n_reused, [event.id for event in said if isinstance(event, em.Token)]

    def copy_ahead(self) -> int:
        """Copies as an idle engine does, until there is nothing to copy.

        :returns: the number of copies.
        """
        before = self.n_saved
        while self.batcher.reuse.copy_ahead():
            pass
        return self.n_saved - before

    def blobs(self) -> list[tuple[str | None, list[int], object]]:
        """What the store holds, beside copies that were made ahead of time."""
        return [(blob.conversation, blob.tokens, blob.shapes) for blob in self.batcher.store if not blob.ahead]

    def stat(self, name: str) -> object:
        return self.batcher.statistics()[f"kv_cache_{name}"]


@contextmanager
def talk(path: Path, **options: object) -> Iterator[Talk]:
    fields = {"device": "cpu", "n_ctx": 1024, "n_parallel": 1, "n_threads": 1, **options}
    with Runtime.load(em.EngineConfig(str(path), **fields)) as runtime:  # type: ignore[arg-type]
        yield Talk(runtime)
