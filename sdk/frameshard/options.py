"""Keyword arguments that :mod:`frameshard` and :mod:`frameshard.sync` share.

Written by `make generate` from bindings/generated-manifest.json; do not edit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from frameshard.images import Pixels
from frameshard.tools import Tool
from frameshard.wire.messages import Sampling


class LaunchOptions(TypedDict, total=False):
    """How a sidecar is started; see :func:`frameshard.launch`."""

    mmproj: str | os.PathLike[str] | None
    """Path of the GGUF file with the model's vision tower, which cannot be a part of a file; empty: none."""
    device: str
    """`auto` (the best GPU that works, or the CPU if there is none), `cpu`, `emulated`, or a ggml device such as
    `CUDA0`. For tests, `emulated:25` limits copies to 25e9 bytes/s. By default auto."""
    n_ctx: int
    """Context length of each conversation in tokens, rounded up to a multiple of 256. VRAM is used only for the tokens
    in the context. By default 4096."""
    n_ubatch: int
    """Maximum number of prompt tokens that are computed in one graph. Streamed weights are copied once for each graph,
    and its buffers take VRAM while it runs. 0: what is best at each budget, and the floor has room for 256 tokens; in
    mode `stream_only` 512. Any other value holds at every budget, and the floor has room for it. By default 0."""
    n_parallel: int
    """Number of jobs that run at once, each in its own context. By default 4."""
    n_threads: int
    """Number of CPU threads; 0: half of the CPUs. By default 0."""
    mode: Literal["planned", "stream_only"]
    """`planned`: the fastest plan at the budget. `stream_only`: slower, but the same bits at every budget. By default
    planned."""
    speculate: Literal["auto", "off"]
    """Speculative decoding. `auto`: repeated text is drafted by lookup, and several tokens are verified in one graph,
    where that is faster. `off`: never. By default auto."""
    draft_model: str | os.PathLike[str] | None
    """Path of the GGUF file of a draft model: a small model with the same vocabulary; empty: none. It drafts text that
    does not repeat, where that is faster. It runs on the CPU; its weights and its KV cache (at most 16,384 tokens) are
    in host memory. It is not loaded with `speculate` off, without a GPU, or with recurrent models."""
    kv_type: Literal["f16", "q8_0", "q4_0"]
    """Type of the KV cache. `q8_0` needs half, `q4_0` a little more than a quarter of the bytes of `f16`, at some loss
    of quality. Refused with `unsupported` if the model's attention head size is not a multiple of 32. On NVIDIA GPUs
    the floor stays the same, because a prompt also needs one layer's whole context in 16 bits. By default f16."""
    adapters: Mapping[str, str | os.PathLike[str]]
    """LoRA adapters that jobs may use, as paths of GGUF files by name. Their weights are in VRAM at every budget."""
    kv_cache_mb: float
    """Host memory for KV caches of conversations without a sequence of their own, of paused jobs and of texts that
    several jobs begin with. The least recently used are dropped; 0: none are kept. In MiB. By default 512."""
    host_budget_mb: float
    """Limit for all host memory that the sidecar's processes use, with the model's file in the page cache; 0: no limit.
    Only on Linux; elsewhere it is refused with `unsupported`. In MiB. By default 0."""
    transport: Literal["ipc", "tcp"]
    """How clients connect: `ipc`, or `tcp` on the loopback interface (the default on Windows). Both are encrypted."""
    endpoint: str | None
    """Where the sidecar listens: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; without it, the sidecar chooses."""
    connect_file: str | os.PathLike[str] | None
    """Path of the file from which other clients learn how to connect; only this user can read it. The sidecar removes
    it at the end. Without it, the sidecar chooses a path. Refused with `bad_argument` if it cannot be written, or if a
    file is there that is no connect file."""
    engine: Sequence[str]
    """Command that starts the engine process."""
    max_jobs: int
    """Maximum number of unfinished jobs of all clients. By default 256."""
    max_client_jobs: int
    """Maximum number of unfinished jobs of one client. By default 64."""
    held_bytes: int
    """Maximum text kept for one job whose client does not read; with more, the job fails. By default 49152."""
    silent_s: float
    """A client that stays disconnected for this long loses its jobs. A client that is connected but silent (a
    breakpoint, a long load) keeps them. By default 10.0."""
    hang_idle_s: float
    """An engine without work that does not answer for this long is replaced. By default 5.0."""
    hang_busy_s: float
    """An engine with work that does not answer for this long is replaced. By default 60.0."""
    hang_load_s: float
    """An engine that loads and does not answer for this long is replaced. By default 600.0."""
    hang_still_s: float
    """An engine in which no thread answers for this long counts as stopped and is replaced. By default 5.0."""
    restart_limit: int
    """Number of engine deaths within `restart_window_s` that are followed by a restart; after one more, the engine is
    off for `off_pause_s`. Deaths while a job runs do not count, and each new token starts the count again. By default
    3."""
    restart_window_s: float
    """Time span in which `restart_limit` counts deaths. By default 300.0."""
    off_pause_s: float
    """How long an engine that keeps dying stays off before the next try. Each pause is twice as long as the last. By
    default 1.0."""
    off_pause_max_s: float
    """Maximum length of such a pause. By default 60.0."""
    loading: Literal["off", "on"]
    """`on`: the sidecar reports how far the model is loaded, before it is ready. `off`: it reports later loads only. By
    default off."""
    http: str
    """Where the sidecar offers OpenAI's HTTP interface: `127.0.0.1:8080`, with port 0 for a free one; empty: nowhere.
    The HTTP server is a process of its own that ends with the sidecar. Refused with `bad_argument` if the packages of
    `frameshard[http]` are not installed, or if the address cannot be listened on."""
    http_key: str
    """Key that HTTP requests must have (`Authorization: Bearer`), in printable ASCII; empty: a new one."""
    embedder: str | os.PathLike[str] | None
    """Path of the GGUF file of a sentence encoder, for `embed`; empty: none. The first `embed` starts a process for it.
    That process encodes texts on the CPU at idle priority and uses no VRAM."""
    fallback: str
    """Base URL of a server with OpenAI's HTTP interface, such as `https://llm.example.com/v1`; empty: none. Jobs go
    there while the lease is parked or hibernated or the engine is off, or if the plan cannot meet their deadline. Needs
    `frameshard[fallback]`."""
    fallback_model: str
    """Name of the model that the server is asked for."""
    fallback_key_file: str | os.PathLike[str] | None
    """Path of a file with the server's key, which only this user may read; empty: none."""
    fallback_key_env: str
    """Name of the environment variable with the server's key; empty: none."""
    fallback_http: Literal["loopback", "anywhere"]
    """Where the server may be if its URL begins with `http://`: on this machine, or `anywhere`, where prompts and the
    key can be read on the way. By default loopback."""


class JobOptions(TypedDict, total=False):
    """What a job may be given; see :meth:`frameshard.Client.ask`."""

    conversation: str | None
    """Name of the conversation. Its KV cache is kept, so a later prompt that begins with the same messages is computed
    faster."""
    sampling: Sampling
    """How tokens are chosen."""
    timeline: int
    """A number that each event of the job repeats. By default 0."""
    window: int
    """Maximum number of events that are sent before the client gives credit. By default 32."""
    images: Sequence[bytes | Pixels]
    """Images. They are placed before the last message of a chat, or before the prompt."""
    sentences: bool
    """Deltas say where sentences end, for text to speech. By default False."""
    priority: int
    """0: background, 1: normal, 2: urgent. A job pauses a running job of lower priority if `n_parallel` jobs run; the
    paused job continues later, in mode `stream_only` with the same text. By default 1."""
    warm_up: bool
    """The prompt is only read, so that later jobs whose prompt begins with it need not read it. All other jobs go
    first. The job ends with `done` and has no text. By default False."""
    adapters: Mapping[str, float]
    """LoRA adapters, for the whole job, as scales by name: `{"pirate": 0.8}`. Jobs with equal adapters are computed
    together, others in turns."""
    deadline_ms: int
    """Milliseconds from now to the job's first token. Of jobs of equal priority the one with the earliest deadline goes
    first. A job without a token by then fails with `deadline_missed`; 0: no deadline. By default 0."""
    thinking: Literal["off", "hidden", "shown"]
    """Whether the model thinks before it answers. `off`: it answers at once. `hidden`: it thinks, and the thought is
    not sent. `shown`: the thought comes in events `thought`. A thought is in no text. Refused with `unsupported` if the
    model does not think. By default off."""
    thinking_tokens: int
    """Maximum length of the thought; then it is ended, and the answer begins. 0: no limit but `max_tokens`, which
    counts thought and answer. By default 0."""
    template_keywords: str
    """A JSON object with further variables for the model's chat template, such as `reasoning_effort`; empty: none."""
    local_only: bool
    """The job never goes to the server of the launch option `fallback`. By default False."""
    tools: Sequence[Tool]
    """The tools that the model may call; only for a chat."""
    tool_choice: str
    """`auto`: the answer is text, or ends with calls. `required`: it is calls. `none`: it is text. The name of a tool:
    it is calls of this tool. By default auto."""


class LeaseTerms(TypedDict, total=False):
    """Terms of a lease beside its budget; see :meth:`frameshard.Client.set_budget`."""

    timeout_s: float
    """Time that the sidecar has to release the VRAM above the budget. By default 5.0."""
    state: Literal["active", "parked", "hibernated"]
    """`parked`: only the driver's context stays in VRAM. `hibernated`: the engine process ends and no VRAM is used. By
    default active."""
    floor_mb: float
    """The idle floor: a sidecar without a job for 5 s shrinks to this VRAM budget on its own; 0: it does not. In MiB.
    By default 0."""
    version: int
    """Version of the lease. It is refused with `stale_lease` unless it is higher than the version in force; 0: never
    refused for its version. By default 0."""
    reason: str
    """Text for the sidecar's log."""
    host_budget_mb: float
    """Limit for all host memory that the sidecar's processes use; 0: no limit. If it is missing, the limit in force
    stays. In MiB."""
