"""What passes between a host and the sidecar that it starts: one JSON line each way, before any socket is opened.

The host writes a :class:`ServeConfig` to the sidecar's standard input and keeps that pipe open for as long as it
lives: the sidecar ends when the pipe does. It answers on standard output with ``{"ready": ConnectInfo}`` or
``{"error": ...}``.

This file is the source of everything that mirrors the launch options, as :mod:`frameshard.wire.messages` is for the
protocol.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
import sys
import urllib.parse
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar, get_args

from frameshard import program
from frameshard.errors import BadArgument, FrameshardError, from_wire
from frameshard.records import record
from frameshard.wire import checks, messages
from frameshard.wire.checks import Bytes, Count, Id, Name

T = TypeVar("T")

KvType = Literal["f16", "q8_0", "q4_0"]
MAX_HTTP_KEY = 256
MAX_THREADS = 1024
MAX_CONNECT_FILE = 1 << 16  # bytes, more than any has
MAX_QUOTED = 200
"""The most characters of a line that an error repeats."""

KV_TYPES: tuple[KvType, ...] = get_args(KvType)

_IPC = re.compile(r"ipc:///[^\x00-\x1f\x7f\ud800-\udfff]*[^\x00-\x1f\x7f\ud800-\udfff/]")
_TCP = re.compile(r"tcp://127\.0\.0\.1:(\*|[1-9][0-9]{0,4})")


def check_endpoint(endpoint: str, *, bind: bool) -> None:
    """
    :param bind: the port may be ``*``: any that is free.
    :raises BadArgument: `endpoint` is not, as a whole, a path or a port of the loopback. libzmq's own grammar has more:
        in ``tcp://127.0.0.1:1;0.0.0.0:2`` what stands behind the semicolon is bound, on all interfaces.
    """
    if _IPC.fullmatch(endpoint):
        return
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None or (not bind if tcp[1] == "*" else int(tcp[1]) > 65535):
        raise BadArgument(
            "endpoint must be ipc:///PATH or tcp://127.0.0.1:PORT, with a port from 1 to 65535", field="endpoint"
        )


def address_of(text: str, option: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``. The host is an IP address (IPv6 in brackets) or ``localhost``.

    :param option: the option that has the text, for the error.
    :raises BadArgument: it is anything else.
    """
    host, _, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ValueError
        return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))), int(port)
    except ValueError:
        raise BadArgument(
            f"{text!r} is not an address: 127.0.0.1:8080, or port 0 for a free one", field=option
        ) from None


def check_http_key(key: str, option: str) -> None:
    """
    :param option: the option that has the key, for the error.
    :raises BadArgument: `key` cannot stand in a header.
    """
    if not 0 < len(key) <= MAX_HTTP_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise BadArgument(f"{option}: a key has 1 to {MAX_HTTP_KEY} printable ASCII characters, no space", field=option)


Path = Annotated[str, checks.path()]
Duration = Annotated[float, checks.number(0, 1e6, "s")]
Pause = Annotated[float, checks.number(0.05, 1e6, "s")]
"""Without a pause, an engine that cannot start would be started over and over, at the cost of a CPU core."""
NamedPath = Annotated[str, checks.text(4161, least=1)]


def check_fallback(url: str, *, anywhere: bool) -> None:
    """
    :param anywhere: plain HTTP is allowed to any host, not only to this machine.
    :raises BadArgument: `url` is no base URL of a server, or its traffic could be read on the way. The message does not
        repeat it, because it may have a key in it.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise BadArgument("fallback: not a URL", field="fallback") from None
    plain = re.fullmatch("[\x21-\x7e]+", url) and not (parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme not in ("http", "https") or not host or not plain:
        raise BadArgument(
            "fallback: must be a base URL such as https://llm.example.com/v1, without a key, a query or a fragment",
            field="fallback",
        )
    if parts.scheme == "http" and not anywhere and not _is_loopback(host):
        raise BadArgument(
            "fallback: http:// is for servers on this machine, because prompts and the key could be read on the way:"
            " use https://, or set fallback_http to anywhere",
            field="fallback",
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def adapter_of(named: str) -> tuple[str, str]:
    """Name and path of an adapter of the launch options.

    :raises BadArgument: it is not ``NAME=PATH``.
    """
    name, _, path = named.partition("=")
    if not 0 < len(name.encode(errors="replace")) <= 64 or not path or "\0" in path:
        raise BadArgument("adapters: must be NAME=PATH, with a name of 1 to 64 bytes and no NUL", field="adapters")
    return name, path


@record
class EngineOptions:
    """The launch options that are passed on to the engine (:class:`frameshard.wire.engine.EngineConfig`)."""

    model: Annotated[
        str,
        checks.path(least=1),
        "Path of a GGUF file; the only option without a default. `PATH@OFFSET+SIZE` is a part of a file, such as a"
        " game's pak file; the offset is a multiple of 32.",
    ]
    mmproj: Annotated[
        Path, "Path of the GGUF file with the model's vision tower, which cannot be a part of a file; empty: none."
    ] = ""
    device: Annotated[
        str,
        checks.text(256, least=1),
        "`auto` (the best GPU that works, or the CPU if there is none), `cpu`, `emulated`, or a ggml device such as"
        " `CUDA0`. For tests, `emulated:25` limits copies to 25e9 bytes/s.",
    ] = "auto"
    vram_budget_bytes: Annotated[Bytes, "Limit for all VRAM that the sidecar uses; 0: no limit."] = 0
    n_ctx: Annotated[
        int,
        checks.integer(1, 2**24, "tokens"),
        "Context length of each conversation in tokens, rounded up to a multiple of 256. VRAM is used only for the"
        " tokens in the context.",
    ] = 4096
    n_ubatch: Annotated[
        int,
        checks.integer(0, 2**16, "tokens"),
        "Maximum number of prompt tokens that are computed in one graph. Streamed weights are copied once for each"
        " graph, and its buffers take VRAM while it runs. 0: what is best at each budget, and the floor has room for"
        " 256 tokens; in mode `stream_only` 512. Any other value holds at every budget, and the floor has room for it.",
    ] = 0
    n_parallel: Annotated[int, checks.integer(1, 64), "Number of jobs that run at once, each in its own context."] = 4
    n_threads: Annotated[int, checks.integer(0, MAX_THREADS), "Number of CPU threads; 0: half of the CPUs."] = 0
    mode: Annotated[
        messages.Mode,
        "`planned`: the fastest plan at the budget. `stream_only`: slower, but the same bits at every budget.",
    ] = "planned"
    speculate: Annotated[
        Literal["auto", "off"],
        "Speculative decoding. `auto`: repeated text is drafted by lookup, and several tokens are verified in one"
        " graph, where that is faster. `off`: never.",
    ] = "auto"
    draft_model: Annotated[
        Path,
        "Path of the GGUF file of a draft model: a small model with the same vocabulary; empty: none. It drafts text"
        " that does not repeat, where that is faster. It runs on the CPU; its weights and its KV cache (at most 16,384"
        " tokens) are in host memory. It is not loaded with `speculate` off, without a GPU, or with recurrent models.",
    ] = ""
    kv_type: Annotated[
        KvType,
        "Type of the KV cache. `q8_0` needs half, `q4_0` a little more than a quarter of the bytes of `f16`, at some"
        " loss of quality. Refused with `unsupported` if the model's attention head size is not a multiple of 32."
        " On NVIDIA GPUs the floor stays the same, because a prompt also needs one layer's whole context in 16 bits.",
    ] = "f16"
    adapters: Annotated[
        tuple[NamedPath, ...],
        messages.MAX_ADAPTERS,
        "LoRA adapters that jobs may use, each as `NAME=PATH` of a GGUF file. Their weights are in VRAM at every"
        " budget.",
    ] = ()

    kv_cache_bytes: Annotated[
        Bytes,
        "Host memory for KV caches of conversations without a sequence of their own, of paused jobs and of texts that"
        " several jobs begin with. The least recently used are dropped; 0: none are kept.",
    ] = 512 << 20
    host_budget_bytes: Annotated[
        Bytes,
        "Limit for all host memory that the sidecar's processes use, with the model's file in the page cache; 0: no"
        " limit. Only on Linux; elsewhere it is refused with `unsupported`.",
    ] = 0

    def __post_init__(self) -> None:
        checks.verify(self)
        if 0 < self.n_ubatch < self.n_parallel:
            raise BadArgument("n_ubatch: must be at least n_parallel", field="n_ubatch")
        names = [adapter_of(adapter)[0] for adapter in self.adapters]
        if len(set(names)) < len(names):
            raise BadArgument("adapters: two of them have the same name", field="adapters")


@record
class ServeConfig(EngineOptions):
    """The launch options of a sidecar.

    Each field's meaning is in its annotation; bindings/PROTOCOL.md lists them, under "Starting a sidecar".

    :raises BadArgument: a value is of the wrong type or out of range.
    """

    transport: Annotated[
        str,
        checks.words("ipc", "tcp"),
        checks.Default("by system"),
        "How clients connect: `ipc`, or `tcp` on the loopback interface (the default on Windows). Both are encrypted.",
    ] = "tcp" if sys.platform == "win32" else "ipc"
    endpoint: Annotated[
        Annotated[str, checks.text(4096)] | None,
        "Where the sidecar listens: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; without it, the sidecar chooses.",
    ] = None
    connect_file: Annotated[
        Path | None,
        "Path of the file from which other clients learn how to connect; only this user can read it. The sidecar"
        " removes it at the end. Without it, the sidecar chooses a path. Refused with `bad_argument` if it cannot be"
        " written, or if a file is there that is no connect file.",
    ] = None
    engine: Annotated[
        tuple[Annotated[str, checks.text(65536, least=1)], ...],
        256,
        checks.Default("frameshard's own"),
        "Command that starts the engine process.",
    ] = program.command("frameshard.engine.process")
    max_jobs: Annotated[int, checks.integer(1, 1024), "Maximum number of unfinished jobs of all clients."] = 256
    max_client_jobs: Annotated[int, checks.integer(1, 1024), "Maximum number of unfinished jobs of one client."] = 64
    held_bytes: Annotated[
        int,
        checks.integer(0, 49152, "bytes"),
        "Maximum text kept for one job whose client does not read; with more, the job fails.",
    ] = 49152
    silent_s: Annotated[
        Duration,
        "A client that stays disconnected for this long loses its jobs. A client that is connected but silent (a"
        " breakpoint, a long load) keeps them.",
    ] = 10.0
    hang_idle_s: Annotated[Duration, "An engine without work that does not answer for this long is replaced."] = 5.0
    hang_busy_s: Annotated[Duration, "An engine with work that does not answer for this long is replaced."] = 60.0
    hang_load_s: Annotated[Duration, "An engine that loads and does not answer for this long is replaced."] = 600.0
    hang_still_s: Annotated[
        Duration, "An engine in which no thread answers for this long counts as stopped and is replaced."
    ] = 5.0
    restart_limit: Annotated[
        int,
        checks.integer(0, 1000),
        "Number of engine deaths within `restart_window_s` that are followed by a restart; after one more, the engine"
        " is off for `off_pause_s`. Deaths while a job runs do not count, and each new token starts the count again.",
    ] = 3
    restart_window_s: Annotated[Duration, "Time span in which `restart_limit` counts deaths."] = 300.0
    off_pause_s: Annotated[
        Pause,
        "How long an engine that keeps dying stays off before the next try. Each pause is twice as long as the last.",
    ] = 1.0
    off_pause_max_s: Annotated[Pause, "Maximum length of such a pause."] = 60.0
    loading: Annotated[
        Literal["off", "on"],
        "`on`: the sidecar reports how far the model is loaded, before it is ready. `off`: it reports later loads"
        " only.",
    ] = "off"
    http: Annotated[
        str,
        checks.text(64),
        "Where the sidecar offers OpenAI's HTTP interface: `127.0.0.1:8080`, with port 0 for a free one; empty:"
        " nowhere. The HTTP server is a process of its own that ends with the sidecar. Refused with `bad_argument` if"
        " the packages of `frameshard[http]` are not installed, or if the address cannot be listened on.",
    ] = ""
    http_key: Annotated[
        str,
        checks.text(MAX_HTTP_KEY),
        "Key that HTTP requests must have (`Authorization: Bearer`), in printable ASCII; empty: a new one.",
    ] = field(default="", repr=False)
    embedder: Annotated[
        Path,
        "Path of the GGUF file of a sentence encoder, for `embed`; empty: none. The first `embed` starts a process for"
        " it. That process encodes texts on the CPU at idle priority and uses no VRAM.",
    ] = ""
    fallback: Annotated[
        str,
        checks.text(2048),
        "Base URL of a server with OpenAI's HTTP interface, such as `https://llm.example.com/v1`; empty: none. Jobs go"
        " there while the lease is parked or hibernated or the engine is off, or if the plan cannot meet their"
        " deadline. Needs `frameshard[fallback]`.",
    ] = ""
    fallback_model: Annotated[str, checks.text(256), "Name of the model that the server is asked for."] = ""
    fallback_key_file: Annotated[
        Path, "Path of a file with the server's key, which only this user may read; empty: none."
    ] = ""
    fallback_key_env: Annotated[
        str, checks.text(256), "Name of the environment variable with the server's key; empty: none."
    ] = ""
    fallback_http: Annotated[
        Literal["loopback", "anywhere"],
        "Where the server may be if its URL begins with `http://`: on this machine, or `anywhere`, where prompts and"
        " the key can be read on the way.",
    ] = "loopback"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.http:
            address_of(self.http, "http")
        if self.http_key:
            check_http_key(self.http_key, "http_key")
        if self.fallback:
            check_fallback(self.fallback, anywhere=self.fallback_http == "anywhere")
        if self.fallback and not self.fallback_model:
            raise BadArgument("fallback_model: name the model that the server is asked for", field="fallback_model")
        if self.fallback_key_file and self.fallback_key_env:
            raise BadArgument("fallback_key_env: the key is in a file already", field="fallback_key_env")
        if self.endpoint is not None:
            check_endpoint(self.endpoint, bind=True)
        if not self.engine:
            raise BadArgument("engine: must be a command", field="engine")


@record
class ConnectInfo:
    """What a client needs to connect. The keys are CURVE keys as Z85 text. They are secret, and new for each launch."""

    protocol: Annotated[Count, "Protocol version that the sidecar speaks."]
    endpoint: Annotated[str, checks.text(4096), "Endpoint to connect to."]
    epoch: Annotated[Id, "Number of the launch; every request repeats it."]
    pid: Annotated[Count, "Process id of the broker."]
    server_key: Annotated[Name, "Public key of the sidecar, `CURVE_SERVERKEY`."]
    client_key: Annotated[Name, "Public key of all clients, `CURVE_PUBLICKEY`."]
    client_secret: Annotated[
        Name, "Secret key of all clients, `CURVE_SECRETKEY`. Keep it out of arguments, environment and logs."
    ]
    http_url: Annotated[
        Name, "Base URL of OpenAI's HTTP interface, if the launch option `http` is set; else empty."
    ] = ""
    http_key: Annotated[
        str, checks.text(MAX_HTTP_KEY), "Key for HTTP requests, secret as the keys above; empty without `http_url`."
    ] = ""

    def __post_init__(self) -> None:
        checks.verify(self)
        check_endpoint(self.endpoint, bind=False)

    def __repr__(self) -> str:
        return f"ConnectInfo(endpoint={self.endpoint!r}, epoch={self.epoch}, pid={self.pid})"


def _line(value: Mapping[str, Any]) -> bytes:
    """One line of JSON."""
    return json.dumps(value).encode() + b"\n"


def config_line(config: ServeConfig) -> bytes:
    """What the host writes."""
    return _line(dataclasses.asdict(config))


def make_config(fields: Mapping[str, Any]) -> ServeConfig:
    """
    :raises BadArgument: an option is unknown, missing or wrong.
    """
    return _make(ServeConfig, fields, strict=True)


def parse_config(line: bytes) -> ServeConfig:
    """
    :raises BadArgument: not a JSON object with the fields of :class:`ServeConfig`.
    """
    return make_config(_parse(line))


def info_line(info: ConnectInfo) -> bytes:
    """A connect file's content."""
    return _line(dataclasses.asdict(info))


def ready_line(info: ConnectInfo) -> bytes:
    """What the sidecar writes when it serves."""
    return _line({"ready": dataclasses.asdict(info)})


def loading_line(loading: messages.Loading) -> bytes:
    """What the sidecar writes while it loads, if the host wants to know."""
    return _line({"loading": dataclasses.asdict(loading)})


def parse_loading(line: bytes) -> messages.Loading | None:
    """The progress in a line from :func:`loading_line`; None if it is another line.

    :raises FrameshardError: no sidecar has written this line.
    :raises BadArgument: it has not the fields of :class:`frameshard.wire.messages.Loading`.
    """
    fields = _parse_answer(line)
    return _make(messages.Loading, fields["loading"], strict=False) if "loading" in fields else None


def error_line(error: FrameshardError) -> bytes:
    """What the sidecar writes when it cannot serve."""
    return _line({"error": dataclasses.asdict(messages.ErrorInfo.of(error))})


def parse_ready(line: bytes) -> ConnectInfo:
    """
    :raises FrameshardError: the error that the sidecar reports; or no sidecar has written this line.
    :raises BadArgument: it has not the fields of :class:`ConnectInfo`.
    """
    fields = _parse_answer(line)
    if isinstance(fields.get("error"), Mapping):
        raise from_wire(fields["error"])
    return parse_info(json.dumps(fields.get("ready")))


def parse_info(text: str | bytes) -> ConnectInfo:
    """A connect file's content. Fields of a newer sidecar are left out.

    :raises BadArgument: not a JSON object with the fields of :class:`ConnectInfo`.
    """
    return _make(ConnectInfo, _parse(text), strict=False)


def _parse_answer(line: bytes) -> dict[str, Any]:
    try:
        return _parse(line)
    except BadArgument:
        written = line.decode(errors="replace").strip()[:MAX_QUOTED]
        raise FrameshardError(
            f"the sidecar's answer is not understood: {written!r}. Nothing else may write to its standard output, such"
            " as a sitecustomize module of its Python"
        ) from None


def _parse(text: str | bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise BadArgument("not JSON") from None
    if not isinstance(fields, dict):
        raise BadArgument("not a JSON object")
    return fields


def _make(cls: type[T], fields: Mapping[str, Any], *, strict: bool) -> T:
    try:
        return checks.convert(cls, fields, strict=strict)
    except checks.Refused as refused:
        raise BadArgument(str(refused), field=refused.field) from None
