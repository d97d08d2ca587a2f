"""``frameshard serve``: runs a sidecar for several programs until it is told to stop.

A game usually starts its own sidecar with :func:`frameshard.launch`. Such a sidecar ends with the game.
"""

from __future__ import annotations

import argparse
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from frameshard.cli import common, interrupt, progress
from frameshard.errors import BadArgument

if TYPE_CHECKING:
    from frameshard.wire.launch import ConnectInfo

logger = logging.getLogger("frameshard.serve")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run the sidecar that games connect to",
        description="Loads a model and serves until Ctrl-C, SIGTERM or a client's shutdown. Programs connect with the "
        "connect file, which holds address and keys and is readable by this user only: "
        "frameshard.connect(FILE).",
    )
    common.add_model_args(parser)
    common.add_context_args(parser)
    parser.add_argument(
        "--vram-budget", type=common.size, default=0, metavar="SIZE", help="VRAM for all it does (no limit)"
    )
    parser.add_argument(
        "--host-budget",
        type=common.size,
        default=0,
        metavar="SIZE",
        help="host memory for all its processes, with the model's file in the page cache (no limit)",
    )
    parser.add_argument(
        "--kv-cache",
        type=common.size,
        default=512 << 20,
        metavar="SIZE",
        help="host memory for KV caches that later jobs can start from (512MiB)",
    )
    parser.add_argument(
        "--mmproj",
        metavar="PATH|NAME",
        help="what reads images for this model: a GGUF file, a name on Hugging Face, or `sprites` for smollm2-135m "
        "(models that `frameshard models list` knows bring their own)",
    )
    parser.add_argument("--connect-file", metavar="FILE", help="where to leave address and keys (a fresh place)")
    parser.add_argument(
        "--endpoint", metavar="E", help="ipc:///PATH or tcp://127.0.0.1:PORT (a fresh ipc socket, tcp on Windows)"
    )
    parser.add_argument(
        "--mode",
        choices=("planned", "stream_only"),
        default="planned",
        help="stream_only: the same bits at any budget, at the cost of speed (planned)",
    )
    parser.add_argument(
        "--speculate",
        choices=("auto", "off"),
        default="auto",
        help="auto: speculative decoding where it pays; output is unchanged (auto)",
    )
    parser.add_argument(
        "--draft-model",
        metavar="PATH|NAME",
        help="a small model with the same vocabulary that drafts tokens on the CPU (none)",
    )
    parser.add_argument(
        "--embedder", metavar="PATH|NAME", help="a sentence encoder for embeddings; it runs on the CPU (none)"
    )
    common.add_adapter_arg(parser)
    parser.add_argument(
        "--http", default="", metavar="HOST:PORT", help="also offer OpenAI's HTTP interface there; port 0: a free one"
    )
    parser.add_argument(
        "--http-key-file",
        metavar="FILE",
        help="read the key for HTTP from FILE, or write a new one there (a new one, in the connect file only)",
    )
    _add_fallback_args(parser)
    parser.set_defaults(run=run)


def _add_fallback_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a server for jobs when there is no room here (docs/fallback.md)")
    group.add_argument("--fallback", default="", metavar="URL", help="base URL of its OpenAI interface (none)")
    group.add_argument("--fallback-model", default="", metavar="NAME", help="the model that it is asked for")
    keys = group.add_mutually_exclusive_group()
    keys.add_argument("--fallback-key-file", default="", metavar="FILE", help="file with its key (no key)")
    keys.add_argument("--fallback-key-env", default="", metavar="NAME", help="environment variable with its key")
    group.add_argument(
        "--fallback-http",
        choices=("loopback", "anywhere"),
        default="loopback",
        help="where it may be if the URL is http:// and prompts can be read on the way (loopback)",
    )


def run(args: argparse.Namespace) -> int:
    from frameshard import models
    from frameshard.broker import log, serve
    from frameshard.wire.launch import ServeConfig, adapter_of

    _check_fallback(args)
    mmproj = args.mmproj or models.mmproj_of(args.model)
    config = ServeConfig(
        model=str(models.resolve(args.model).absolute()),
        mmproj=str(models.resolve(mmproj).absolute()) if mmproj else "",
        device=args.device,
        vram_budget_bytes=args.vram_budget,
        kv_cache_bytes=args.kv_cache,
        host_budget_bytes=args.host_budget,
        n_ctx=args.ctx,
        n_ubatch=args.ubatch,
        kv_type=args.kv_type,
        n_parallel=args.parallel,
        n_threads=args.threads,
        mode=args.mode,
        speculate=args.speculate,
        draft_model=str(models.resolve(args.draft_model).absolute()) if args.draft_model else "",
        embedder=str(models.resolve(args.embedder).absolute()) if args.embedder else "",
        adapters=tuple(f"{name}={Path(path).absolute()}" for name, path in map(adapter_of, args.adapter)),
        http=args.http,
        http_key=_http_key(args.http, args.http_key_file),
        endpoint=args.endpoint,
        connect_file=args.connect_file and str(Path(args.connect_file).absolute()),
        fallback=args.fallback,
        fallback_model=args.fallback_model,
        fallback_key_file=args.fallback_key_file and str(Path(args.fallback_key_file).absolute()),
        fallback_key_env=args.fallback_key_env,
        fallback_http=args.fallback_http,
    )

    def ready(info: ConnectInfo, connect_file: Path) -> None:
        logger.info("serving; connect with %s", connect_file)
        http = {"http_url": info.http_url} if info.http_url else {}
        if http:
            logger.info("HTTP at %s", info.http_url)
        if args.json:
            common.emit_json({"connect_file": str(connect_file), "endpoint": info.endpoint, **http, "pid": info.pid})

    log.install()
    return interrupt.STATUS if serve(config, on_ready=ready, on_loading=progress.loading) == signal.SIGINT else 0


def _check_fallback(args: argparse.Namespace) -> None:
    for name in ("model", "key_file", "key_env"):
        if getattr(args, f"fallback_{name}") and not args.fallback:
            option = f"--fallback-{name.replace('_', '-')}"
            raise BadArgument(f"{option} is for --fallback", field=f"fallback_{name}")


def _http_key(http: str, key_file: str | None) -> str:
    """The key in a file; "" if none is named."""
    if not key_file:
        return ""
    if not http:
        raise BadArgument("--http-key-file is for --http", field="http_key_file")
    from frameshard.broker import httpserver

    httpserver.check_installed()
    from frameshard.http.server import key_in

    return key_in(Path(key_file))
