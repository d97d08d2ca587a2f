"""Shared by the tests of the fallback server: launches with one behind a proxy, and parts of its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

import frameshard
from proxy import Proxy
from sidecars import DEADLINE_S, launch

KEY = "key-that-nobody-may-see-4711"
MODEL = "the other model"
N_CTX = 1 << 16

SSE = b'data: {"choices":[{"index":0,"delta":{"content":"One two"}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def with_fallback(door: Proxy, place: Path, **given: Any) -> frameshard.ClientScope:
    """Launches a sidecar whose fallback server is behind the proxy.

    :param place: has the file with the key.
    """
    options = {"fallback": door.url, "fallback_model": MODEL, "fallback_key_file": place / "key", **given}
    return frameshard.launch(options.pop("model"), **options) if "model" in options else launch(**options)


async def until_none_is_remote(client: frameshard.Client) -> None:
    with trio.fail_after(DEADLINE_S):
        while (await client.stats()).broker.jobs_remote:
            await trio.sleep(0.01)
