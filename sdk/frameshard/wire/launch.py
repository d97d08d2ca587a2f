"""What passes between a host and the sidecar that it starts: one JSON line each way, before any socket is opened.

The host writes a :class:`ServeConfig` to the sidecar's standard input and keeps that pipe open for as long as it lives:
its end is the host's end. The sidecar answers on standard output with ``{"ready": ConnectInfo}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from frameshard import program
from frameshard.errors import BadArgument, FrameshardError, from_wire
from frameshard.wire import messages

T = TypeVar("T")

MODES = ("planned", "stream_only")
SPECULATE = ("auto", "off")
KV_TYPES = ("f16", "q8_0", "q4_0")
TRANSPORTS = ("ipc", "tcp")

_IPC = re.compile(r"ipc:///[^\x00-\x1f\x7f\ud800-\udfff]*[^\x00-\x1f\x7f\ud800-\udfff/]")
_TCP = re.compile(r"tcp://127\.0\.0\.1:(\*|[1-9][0-9]{0,4})")


def check_endpoint(endpoint: str, *, bind: bool) -> None:
    """Raises :class:`BadArgument` unless `endpoint` is, as a whole, a path or a port of the loopback.

    The port ``*``, any that is free, is for `bind` alone. libzmq's own grammar has more: in
    ``tcp://127.0.0.1:1;0.0.0.0:2`` what stands behind the semicolon is bound, on all interfaces.
    """
    if _IPC.fullmatch(endpoint):
        return
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None or (not bind if tcp[1] == "*" else int(tcp[1]) > 65535):
        raise BadArgument(
            "endpoint must be ipc:///PATH or tcp://127.0.0.1:PORT, with a port from 1 to 65535", field="endpoint"
        )


@dataclass(frozen=True)
class ServeConfig:
    """What a sidecar serves and how.

    :param model: path of a GGUF file.
    :param mmproj: path of the GGUF file that reads images for this model; "" for none.
    :param device: ``cpu``, ``emulated``, a ggml device such as ``CUDA0``, or ``auto``.
    :param vram_budget_bytes: all that the sidecar may hold in VRAM; 0 is no limit.
    :param n_ctx: tokens of context of each conversation, rounded up to a multiple of 256.
    :param n_parallel: jobs that run at once, each in a context of its own. VRAM is taken for the tokens in use.
    :param n_ubatch: tokens of a prompt that are computed at once. Weights that are streamed are read once for each so
        many, and the buffers for them are part of the floor: 512 keeps that low. 0 chooses by plan, at launch, with
        what long prompts and the first 16 tokens of their answers take least, with a floor of about half of the
        budget at most (or that of 512, if it is higher): for a game that will not take more than half of the budget
        back. Without a budget it is 512.
    :param n_threads: 0 is half of the CPUs.
    :param link_gbps: copy rate of the emulated device in 1e9 bytes/s; 0 is unlimited.
    :param mode: ``planned``, or ``stream_only`` for the same bits at any budget.
    :param speculate: ``auto`` drafts tokens that repeat the prompt or the answer and verifies them together where that
        pays; output is unchanged. ``off`` drafts none.
    :param draft_model: path of a GGUF file, a small model with the same vocabulary: on the CPU and in host memory alone
        it drafts what does not repeat, where that pays; "" for none.
    :param kv_type: how keys and values are kept: ``f16``, or with half of that (``q8_0``) or little more than a quarter
        (``q4_0``) for the same context, at some loss (SmolLM2-135M over 1,536 tokens: a perplexity of 31.2, 31.2 and
        32.5). A model whose heads are no multiple of 32 cannot. The floor does not get lower by it on NVIDIA's GPUs,
        where prompts have a layer's whole context in 16 bits beside it.
    :param transport: ``ipc`` or ``tcp`` on the loopback; both carry CURVE.
    :param endpoint: where to listen, such as ``ipc:///run/game/npc.sock`` or ``tcp://127.0.0.1:5555``; by default a
        fresh place.
    :param connect_file: where to leave the :class:`ConnectInfo` for other clients, readable by this user only.
    :param engine: command that starts the engine process; by default frameshard's own.
    :param max_jobs: jobs of all clients that have not ended.
    :param max_client_jobs: the same of one client.
    :param held_bytes: text kept for one job whose client does not read.
    :param silent_s: a client whose connection is gone and that does not come back for so long loses its jobs. One that
        is connected and silent (a breakpoint, a long load) keeps them.
    :param hang_idle_s: an engine without work that does not answer for so long is replaced; `hang_busy_s` with work,
        `hang_load_s` while it loads. One of which no thread answers for `hang_still_s` is stopped, and is replaced
        whatever it does.
    :param restart_limit: engine deaths in `restart_window_s`, without a new token in between and not while jobs ran,
        after which it is off for `off_pause_s`. Deaths while jobs ran count against those jobs. Each pause is twice as
        long as the last, `off_pause_max_s` at most; then the engine is tried again.
    :raises BadArgument: a value is of the wrong type or out of range.
    """

    model: str
    mmproj: str = ""
    device: str = "auto"
    vram_budget_bytes: int = 0
    n_ctx: int = 4096
    n_ubatch: int = 512
    n_parallel: int = 4
    n_threads: int = 0
    link_gbps: float = 0.0
    mode: str = "planned"
    speculate: str = "auto"
    draft_model: str = ""
    kv_type: str = "f16"
    transport: str = "tcp" if sys.platform == "win32" else "ipc"
    endpoint: str | None = None
    connect_file: str | None = None
    engine: tuple[str, ...] = program.command("frameshard.engine.process")
    max_jobs: int = 256
    max_client_jobs: int = 64
    held_bytes: int = 49152
    silent_s: float = 10.0
    hang_idle_s: float = 5.0
    hang_busy_s: float = 60.0
    hang_load_s: float = 600.0
    hang_still_s: float = 5.0
    restart_limit: int = 3
    restart_window_s: float = 300.0
    off_pause_s: float = 1.0
    off_pause_max_s: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise BadArgument("model must be the path of a GGUF file", field="model")
        for name in ("mmproj", "draft_model"):
            if not isinstance(getattr(self, name), str):
                raise BadArgument(f"{name} must be the path of a GGUF file", field=name)
        if not isinstance(self.device, str) or not self.device:
            raise BadArgument("device must be a name", field="device")
        if self.mode not in MODES:
            raise BadArgument(f"mode must be one of {', '.join(MODES)}", field="mode")
        if self.speculate not in SPECULATE:
            raise BadArgument(f"speculate must be one of {', '.join(SPECULATE)}", field="speculate")
        if self.kv_type not in KV_TYPES:
            raise BadArgument(f"kv_type must be one of {', '.join(KV_TYPES)}", field="kv_type")
        if self.transport not in TRANSPORTS:
            raise BadArgument(f"transport must be one of {', '.join(TRANSPORTS)}", field="transport")
        for name in ("endpoint", "connect_file"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise BadArgument(f"{name} must be a string", field=name)
        if self.endpoint is not None:
            check_endpoint(self.endpoint, bind=True)
        engine = self.engine
        if not isinstance(engine, tuple) or not engine or not all(isinstance(word, str) and word for word in engine):
            raise BadArgument("engine must be a command", field="engine")
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise BadArgument(f"{name} must be an integer from {low} to {high}", field=name)
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= 1e6:
                raise BadArgument(f"{name} must be a number from 0 to 1e6", field=name)


_INTEGERS = {
    "vram_budget_bytes": (0, 2**53 - 1),
    "n_ctx": (1, 2**24),
    "n_ubatch": (0, 2**16),
    "n_parallel": (1, 64),
    "n_threads": (0, 1024),
    "max_jobs": (1, 1024),
    "max_client_jobs": (1, 1024),
    "held_bytes": (0, 49152),
    "restart_limit": (0, 1000),
}
_NUMBERS = (
    "link_gbps",
    "silent_s",
    "hang_idle_s",
    "hang_busy_s",
    "hang_load_s",
    "hang_still_s",
    "restart_window_s",
    "off_pause_s",
    "off_pause_max_s",
)


@dataclass(frozen=True, repr=False)
class ConnectInfo:
    """All that a client needs to connect. The keys are CURVE's, as Z85 text, new for each launch and secret."""

    protocol: int
    endpoint: str
    epoch: int
    pid: int
    server_key: str
    client_key: str
    client_secret: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not (int if field.type == "int" else str):
                raise BadArgument(f"{field.name} must be of type {field.type}", field=field.name)
        check_endpoint(self.endpoint, bind=False)

    def __repr__(self) -> str:
        return f"ConnectInfo(endpoint={self.endpoint!r}, epoch={self.epoch}, pid={self.pid})"


def _line(value: Mapping[str, Any]) -> bytes:
    """One line of JSON."""
    return json.dumps(value).encode() + b"\n"


def config_line(config: ServeConfig) -> bytes:
    """What the host writes."""
    return _line(dataclasses.asdict(config))


def parse_config(line: bytes) -> ServeConfig:
    """Raises :class:`BadArgument`."""
    fields = _parse(line)
    engine = fields.get("engine")
    return _make(ServeConfig, {**fields, "engine": tuple(engine)} if isinstance(engine, list) else fields)


def info_line(info: ConnectInfo) -> bytes:
    """A connect file's content."""
    return _line(dataclasses.asdict(info))


def ready_line(info: ConnectInfo) -> bytes:
    """What the sidecar writes when it serves."""
    return _line({"ready": dataclasses.asdict(info)})


def error_line(error: FrameshardError) -> bytes:
    """What the sidecar writes when it cannot serve."""
    return _line({"error": dataclasses.asdict(messages.ErrorInfo.of(error))})


def parse_ready(line: bytes) -> ConnectInfo:
    """Raises the error that the sidecar reports, or :class:`BadArgument`."""
    fields = _parse(line)
    if isinstance(fields.get("error"), Mapping):
        raise from_wire(fields["error"])
    return parse_info(json.dumps(fields.get("ready")))


def parse_info(text: str | bytes) -> ConnectInfo:
    """A connect file's content. Raises :class:`BadArgument`."""
    return _make(ConnectInfo, _parse(text))


def _parse(text: str | bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        raise BadArgument("not JSON") from None
    if not isinstance(fields, dict):
        raise BadArgument("not a JSON object")
    return fields


def _make(cls: type[T], fields: dict[str, Any]) -> T:
    try:
        return cls(**fields)
    except TypeError as error:
        raise BadArgument(str(error).replace("__init__() ", "")) from None
