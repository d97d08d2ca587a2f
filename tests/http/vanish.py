"""Measures how soon a job ends when its HTTP client has vanished: ``python tests/http/vanish.py [MODEL]``.

The client closes its socket in the middle of a stream. Another client of the sidecar asks for its figures in a loop and
stops the clock when no job runs any more, so one round trip is in the time.
"""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import sys
import time

import trio

import frameshard
from frameshard.models import resolve

N = 50


def stream(url: str, key: str) -> tuple[http.client.HTTPConnection, socket.socket]:
    """A stream whose first token has come."""
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=60)
    document = {"messages": [{"role": "user", "content": "Tell me a very long story."}], "stream": True}
    body = json.dumps({**document, "max_tokens": 1500, "logit_bias": {"2": -100}})  # <|im_end|> never comes
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
    raw = connection.sock
    assert connection.getresponse().readline().startswith(b"data: ")
    return connection, raw


async def main(model: str) -> None:
    async with frameshard.launch(resolve(model), device="emulated", n_ctx=2048, http="127.0.0.1:0") as client:
        times_ms = []
        for _ in range(N):
            connection, raw = await trio.to_thread.run_sync(stream, client.http_url, client.http_key)
            await trio.sleep(0.2)
            assert (await client.stats()).broker.jobs_running == 1
            begun = time.perf_counter()
            raw.shutdown(socket.SHUT_RDWR)
            connection.close()
            while (await client.stats()).broker.jobs_running:
                pass
            times_ms.append(1000 * (time.perf_counter() - begun))
        print(f"{N} clients: median {statistics.median(times_ms):.1f} ms, at most {max(times_ms):.1f} ms")


trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
