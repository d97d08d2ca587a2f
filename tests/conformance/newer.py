"""A newer sidecar: a real one behind a proxy that adds things that this version of the protocol does not know.

The proxy adds unknown fields to records, an unknown event before each event of a job, and messages of unknown kinds. It
numbers events again: event `n` of the sidecar is `2n + 1` for the client, and `2n` is the unknown event.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import msgpack
import zmq

MORE = {"colour": "red", "shades": [1, 2, {"of": "it"}]}
RECORDS = ("limits", "model", "broker", "error")


def bind(socket: zmq.Socket[bytes], place: Path) -> str:
    """Binds to a file, on Windows to a free port.

    :returns: the endpoint.
    """
    socket.bind("tcp://127.0.0.1:*" if sys.platform == "win32" else f"ipc://{place}")
    endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return endpoint


class Newer:
    """The proxy for the sidecar with this connect file. ``info`` is the content of the proxy's own connect file."""

    def __init__(self, file: Path, place: Path) -> None:
        self._sidecar: dict[str, Any] = json.loads(file.read_text())
        public, secret = zmq.curve_keypair()
        client, client_secret = zmq.curve_keypair()
        self.info = self._sidecar | MORE | {
            "protocol": 7,
            "server_key": public.decode(),
            "client_key": client.decode(),
            "client_secret": client_secret.decode(),
        }  # fmt: skip
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.curve_server = True
        self._front.curve_secretkey = secret
        self.info["endpoint"] = bind(self._front, place / "newer.sock")
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._ended.is_set():
            poller = zmq.Poller()
            for socket in (self._front, *self._backs.values()):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(50))
            if self._front in ready:
                peer, frame = self._front.recv_multipart()
                self._back(peer).send(_older(frame))
            for peer, back in self._backs.items():
                if back in ready:
                    for frame in _newer(back.recv()):
                        self._front.send_multipart([peer, frame])

    def _back(self, peer: bytes) -> zmq.Socket[bytes]:
        if peer not in self._backs:
            back = self._context.socket(zmq.DEALER)
            back.curve_serverkey = self._sidecar["server_key"].encode()
            back.curve_publickey = self._sidecar["client_key"].encode()
            back.curve_secretkey = self._sidecar["client_secret"].encode()
            back.connect(self._sidecar["endpoint"])
            self._backs[peer] = back
        return self._backs[peer]


def _older(frame: bytes) -> bytes:
    """Changes a request so that the sidecar understands it."""
    message = msgpack.unpackb(frame)
    if message["t"] == "credit":
        message["next"] //= 2
    packed: bytes = msgpack.packb(message)
    return packed


def _newer(frame: bytes) -> list[bytes]:
    """The frames that a newer sidecar would send for this answer or event."""
    message: dict[str, Any] = msgpack.unpackb(frame) | MORE
    for name in RECORDS:
        if isinstance(message.get(name), dict):
            message[name] |= MORE
    for row in message.get("rows", []):
        row |= MORE
    said = [message]
    epoch = {"epoch": message["epoch"]}
    if message["t"] == "welcome":
        message |= {"protocol": 7, "features": ["songs"]}
        said += [
            {"t": "weather", "rain": True, **epoch},
            {"t": "notice", "kind": "sings", "vram_budget_bytes": 0, "seconds": 0, "detail": "la", **epoch},
            {"t": "engine", "state": "dreaming", "restarts": 0, **epoch},
        ]
    elif message["t"] == "pong":
        message["jobs"] = [[job, 2 * count] for job, count in message["jobs"]]
        said += [{"t": "weather", "id": message["id"], **epoch}]
    elif "seq" in message:
        about = {name: message[name] for name in ("job", "epoch", "timeline")}
        said.insert(0, {"t": "hum", "seq": 2 * message["seq"], "tune": [1, 2, 3], **about})
        message["seq"] = 2 * message["seq"] + 1
    return [msgpack.packb(each) for each in said]
