"""The codec's limits. Any bytes give a message or BadMessage, never another error."""

from __future__ import annotations

import contextlib
import math

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frameshard.errors import BadArgument, BadMessage
from frameshard.wire import channel, codec, messages

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-codec.MAX_ID, codec.MAX_ID)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "nothing"),
        (b"\xc1", "a byte that msgpack does not use"),
        (b"\x81\xa1a", "cut off"),
        (b"\x80\x80", "two values"),
        (msgpack.packb([1]), "an array"),
        (msgpack.packb(1), "a number"),
        (b"\x82\xa1a\x01\xa1a\x02", "a key twice"),
        (b"\x82\xa1a\x01\xc4\x01a\x02", "a binary key"),
        (msgpack.packb({1: 1}), "a number as key"),
        (msgpack.packb({"a": msgpack.ExtType(5, b"")}), "an empty extension"),
        (msgpack.packb({"a": msgpack.ExtType(5, b"x")}), "an extension"),
        (msgpack.packb({"a": msgpack.Timestamp(1, 0)}), "a timestamp"),
        (b"\x81\xa1a\xa1\xff", "not UTF-8"),
        (b"\x81\xa1a\xa3\xed\xa0\x80", "half a surrogate pair"),
        (msgpack.packb({"a": math.nan}), "NaN"),
        (msgpack.packb({"a": math.inf}), "infinity"),
        (msgpack.packb({"a": 2**53}), "beyond 2^53"),
        (msgpack.packb({"a": 2**64 - 1}), "beyond 2^53"),
        (msgpack.packb({"a": -(2**53)}), "below -2^53"),
        (msgpack.packb({"a": nested(8)}), "nine deep"),
        (b"\x91" * 2000, "2000 deep"),
        (b"\x91" * (1 << 20), "as deep as a frame is long"),
        (msgpack.packb({"a": [0] * 1025}), "a long array"),
        (msgpack.packb({str(i): 0 for i in range(65)}), "a large map"),
        (msgpack.packb({"a": "x" * 65537}), "a long string"),
        (msgpack.packb({"a": "é" * 32769}), "a string of too many bytes"),
        (msgpack.packb({"x" * 65537: 1}), "a long key"),
        (msgpack.packb({"a": [[[]] * 1000] * 20}), "many small arrays"),
        (msgpack.packb({"a": [{}] * 1000, "b": [[{}] * 1000] * 17}), "many small maps"),
        (b"\xdd\xff\xff\xff\xff", "an array that claims 4 Gi elements"),
        (b"\xdf\xff\xff\xff\xff", "a map that claims 4 Gi entries"),
        (b"\xc6\xff\xff\xff\xff", "a binary that claims 4 GiB"),
        (b"\x80" + bytes(1 << 20), "more than 1 MiB"),
    ],
)
def test_refuses(frame: bytes, why: str) -> None:
    with pytest.raises(BadMessage):
        codec.decode(frame)


@pytest.mark.parametrize(
    "message",
    [
        {"a": nested(7)},
        {"a": [0] * 1024},
        {str(i): 0 for i in range(64)},
        {"a": "x" * 65536},
        {"a": codec.MAX_ID, "b": -codec.MAX_ID},
        {"a": b"x" * 1000},
        {},
    ],
)
def test_accepts_up_to_the_limit(message: dict[str, object]) -> None:
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        {"a": nested(8)},
        {"a": [0] * 1025},
        {"a": "x" * 65537},
        {"a": 2**53},
        {"a": math.nan},
        {"a": "\ud800"},
        {"a": object()},
        {"a": {1, 2}},
        {1: 1},
        {"a": ["x" * 60000] * 20},
        {"a": [[[]] * 1000] * 20},
    ],
)
def test_sends_nothing_that_the_other_side_refuses(message: dict[str, object]) -> None:
    with pytest.raises(BadArgument):
        codec.encode(message)


@given(st.dictionaries(st.text(max_size=5), values, max_size=5))
def test_round_trip(message: dict[str, object]) -> None:
    assert codec.decode(codec.encode(message)) == message


@settings(max_examples=1000)
@given(st.binary(max_size=200))
def test_any_bytes(frame: bytes) -> None:
    try:
        message = codec.decode(frame)
    except BadMessage:
        return
    assert codec.decode(codec.encode(message)) == message


@settings(max_examples=400)
@given(st.data())
def test_damaged_messages(data: st.DataObject) -> None:
    """Valid messages with bytes changed, dropped or doubled give a message or BadMessage, never another error."""
    message = messages.Submit(
        1, 2, 3, "chat", (messages.ChatMessage("user", "hello"),), "", "npc", messages.Sampling(stop=("\n",), seed=7)
    )
    frame = bytearray(messages.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        frame = frame or bytearray(b"\x80")
    with contextlib.suppress(BadMessage):
        messages.decode_request(bytes(frame))


def test_channel_cuts_a_stream_at_any_point() -> None:
    sent = [{"op": "ping", "seq": i, "text": "x" * i} for i in range(50)]
    stream = b"".join(channel.pack(message) for message in sent)
    for step in (1, 3, 7, 1000):
        reader = channel.Reader()
        got = [message for at in range(0, len(stream), step) for message in reader.feed(stream[at : at + step])]
        assert got == sent


def test_channel_carries_long_token_lists() -> None:
    message = {"op": "submit", "resume": list(range(100_000))}
    assert list(channel.Reader().feed(channel.pack(message))) == [message]


def test_channel_refuses_a_frame_that_is_too_long() -> None:
    stream = channel.Reader().feed(channel.pack({"op": "ping"}) + (codec.ENGINE.frame + 1).to_bytes(4, "little"))
    assert next(stream) == {"op": "ping"}
    with pytest.raises(BadMessage):
        next(stream)
