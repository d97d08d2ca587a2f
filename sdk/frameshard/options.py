"""Keyword arguments that :mod:`frameshard` and :mod:`frameshard.sync` share.

Written by `make generate` from bindings/generated-manifest.json; do not edit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, TypedDict

from frameshard.images import Pixels
from frameshard.wire.messages import Sampling


class LaunchOptions(TypedDict, total=False):
    """How a sidecar is started; see :func:`frameshard.launch`."""

    mmproj: str | os.PathLike[str] | None
    """Path of the GGUF file that reads images for this model; empty: none."""
    device: str
    """`auto` (the first GPU, else the CPU), `cpu`, `emulated`, or a ggml device such as `CUDA0`. For tests:
    `emulated:25` copies 25e9 bytes/s at most. By default auto."""
    n_ctx: int
    """Context of each conversation, rounded up to a multiple of 256; VRAM is taken for the tokens in use. By default
    4096."""
    n_ubatch: int
    """Tokens of a prompt that are computed at once. Streamed weights are copied once for each so many, and the buffers
    for them are part of the floor. 0: chosen at launch, for the least time of a long prompt and the first 16 tokens of
    its answer, with a floor of about half of the budget at most (or that of 512, if it is higher); without a budget
    512. By default 512."""
    n_parallel: int
    """Jobs that run at once, each in a context of its own. By default 4."""
    n_threads: int
    """CPU threads; 0: half of the CPUs. By default 0."""
    mode: Literal["planned", "stream_only"]
    """`stream_only`: the same bits at any budget, at the cost of speed. By default planned."""
    speculate: Literal["auto", "off"]
    """Speculative decoding: `auto` drafts repeated text by lookup and verifies several tokens at a time where that
    pays; `off`: never. By default auto."""
    draft_model: str | os.PathLike[str] | None
    """Path of the GGUF file of a small model with the same vocabulary (empty: none), which drafts what does not repeat,
    where that pays. It runs on the CPU, with its weights and its KV cache (16,384 tokens at most) in host memory. Not
    loaded where nothing can be drafted: with `speculate` off, on the CPU alone or with recurrent models."""
    kv_type: Literal["f16", "q8_0", "q4_0"]
    """Type of the KV cache: `q8_0` takes half, `q4_0` little more than a quarter of the bytes of `f16`, at some loss.
    Refused with `unsupported` where the model's heads are no multiple of 32. The floor is not lower by it on NVIDIA's
    GPUs, where prompts have a layer's whole context in 16 bits beside it. By default f16."""
    transport: Literal["ipc", "tcp"]
    """How clients connect: `ipc`, or `tcp` on the loopback (the default on Windows). Both are encrypted."""
    endpoint: str | None
    """Where to listen: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; without it, a fresh place."""
    connect_file: str | os.PathLike[str] | None
    """Where to leave what further clients need to connect, readable by this user only; without it, a fresh place.
    Refused with `bad_argument` where it cannot be written."""
    engine: Sequence[str]
    """Command that starts the engine process."""
    max_jobs: int
    """Jobs of all clients that have not ended. By default 256."""
    max_client_jobs: int
    """Jobs of one client that have not ended. By default 64."""
    held_bytes: int
    """Text kept for one job whose client does not read; beyond, the job fails. By default 49152."""
    silent_s: float
    """A client whose connection is gone and that does not come back for so long loses its jobs. One that is connected
    and silent (a breakpoint, a long load) keeps them. By default 10.0."""
    hang_idle_s: float
    """An engine without work that does not answer for so long is replaced. By default 5.0."""
    hang_busy_s: float
    """An engine with work that does not answer for so long is replaced. By default 60.0."""
    hang_load_s: float
    """An engine that loads and does not answer for so long is replaced. By default 600.0."""
    hang_still_s: float
    """An engine of which no thread runs for so long is stopped, and replaced whatever it does. By default 5.0."""
    restart_limit: int
    """Deaths of the engine within `restart_window_s`, without a new token in between and while no job runs, after which
    it is off for `off_pause_s`. By default 3."""
    restart_window_s: float
    """Span of time for `restart_limit`. By default 300.0."""
    off_pause_s: float
    """Pause of an engine that cannot be kept alive; then it is tried again. Each is twice as long as the last. By
    default 1.0."""
    off_pause_max_s: float
    """The longest such pause. By default 60.0."""


class JobOptions(TypedDict, total=False):
    """What a job may be given; see :meth:`frameshard.Client.ask`."""

    conversation: str | None
    """Name of the KV cache to keep: a later prompt that begins with the same messages is read faster."""
    sampling: Sampling
    """How tokens are chosen."""
    timeline: int
    """Comes back in each event of the job. By default 0."""
    window: int
    """Events that may be under way before the client gives credit. By default 32."""
    images: Sequence[bytes | Pixels]
    """Images; they stand before the last message of a chat, or before the prompt."""


class LeaseTerms(TypedDict, total=False):
    """Terms of a lease beside its budget; see :meth:`frameshard.Client.set_budget`."""

    timeout_s: float
    """Deadline of the release. By default 5.0."""
    state: Literal["active", "parked", "hibernated"]
    """`parked` keeps no more than the driver's context in VRAM, `hibernated` ends the engine process. By default
    active."""
    floor_mb: float
    """What the sidecar keeps while it is idle; 0: it gives nothing back on its own. In MiB. By default 0."""
    version: int
    """Refused with `stale_lease` unless it is above the one in force; 0: the last word counts. By default 0."""
    reason: str
    """For the sidecar's log."""
