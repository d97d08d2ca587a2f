"""Reports the progress of the load, the loaded model when the engine is ready, and statistics while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable

from frameshard.engine.batch import Batcher
from frameshard.engine.hostmemory import HostMemory
from frameshard.engine.link import BrokerGone
from frameshard.engine.runtime import Runtime
from frameshard.engine.vision import Vision
from frameshard.wire import engine as em
from frameshard.wire import messages as m

LOADING_S = 0.05
_MAX_REASONS_BYTES = 4096


class Loading:
    """Reports the progress of the load, for a bar: the ends of each stage, and not too often in between.

    :param send: sends an event to the broker.
    """

    def __init__(self, send: Callable[[em.Event], None]) -> None:
        self._send = send
        self._told_at = 0.0

    def __call__(self, stage: m.LoadingStage, done: int, total: int) -> None:
        now = time.monotonic()
        if 0 < done < total and now - self._told_at < LOADING_S:
            return
        self._told_at = now
        with contextlib.suppress(BrokerGone):  # the reader thread notices this, too, and ends the process
            self._send(em.Loading(stage, done, total))


def ready(runtime: Runtime, vision: Vision | None, load_s: float) -> em.Ready:
    """Returns the event that describes the loaded model.

    :param load_s: seconds that loading took.
    """
    model, placement = runtime.model_info, runtime.placement
    device = runtime.device.stats() if runtime.device is not None else None
    return em.Ready(
        model=m.ModelInfo(
            name=os.path.basename(runtime.config.model),
            arch=model.arch,
            device=runtime.device_name,
            n_ctx=runtime.n_ctx_seq,
            n_parallel=runtime.config.n_parallel,
            n_vocab=runtime.n_vocab,
            n_layer=model.n_layer,
            chat=runtime.tokenizer.chat is not None,
            floor_bytes=device.floor_bytes if device else 0,
            full_bytes=device.full_bytes if device else 0,
            plan={} if placement is None else placement.corrected(placement.plan).summary(),
            vision=vision.name if vision is not None else "",
            fingerprint=model.fingerprint,
            template_fingerprint=_template_fingerprint(model.chat_template),
            thinks=runtime.tokenizer.thinking is not None,
            passed_over=_cut("\n".join(runtime.passed_over)),
            sees=vision is not None and vision.sees,
            hears=vision is not None and vision.hears,
        ),
        vram_budget_bytes=runtime.vram_budget_bytes,
        n_ubatch=runtime.n_ubatch,
        n_threads=runtime.n_threads,
        load_s=load_s,
    )


def _cut(text: str) -> str:
    """The beginning of a text that fits into a message."""
    return text.encode()[:_MAX_REASONS_BYTES].decode(errors="ignore")


# What the engine alone acts on, or `bench` alone tells.
_NOT_REPORTED = (
    "refused_graph_bytes",
    "lacks_workspaces",
    "cpu_busy_s",
    "cpu_read_bytes",
    "experts_ahead",
    "experts_again",
)


def _template_fingerprint(template: str | None) -> str:
    return "" if template is None else hashlib.sha256(template.encode()).hexdigest()


def statistics(runtime: Runtime, batcher: Batcher, host: HostMemory, *, has_frame_block: bool) -> dict[str, object]:
    """[any thread] Returns the engine's part of the protocol's ``stats`` answer."""
    stats: dict[str, object] = batcher.statistics()
    stats["adapters"] = {each.name: each.size_bytes for each in runtime.adapters.describe()}
    stats["observed_by"] = None if runtime.observer is None else runtime.observer.source
    of_host = stats["host"] = host.figures()
    if runtime.device is not None and runtime.placement is not None:
        counters = dataclasses.asdict(runtime.device.stats())
        # A map of the protocol has 64 entries at most.
        of_host["device"] = {key: counters.pop(key) for key in [*counters] if key.startswith(("host_", "disk_"))}
        stats.update((key, value) for key, value in counters.items() if key not in _NOT_REPORTED)
        stats["budget_bytes"] = runtime.vram_budget_bytes
        stats["placement"] = runtime.placement.by_kind()
        stats["profile"] = "measured" if runtime.placement.rates.measurements is None else "estimated"
        if has_frame_block:
            stats["pacing"] = dataclasses.asdict(runtime.device.pacing())
    if runtime.observer is not None:
        stats["observed_bytes"] = runtime.observer.used()
    return stats
