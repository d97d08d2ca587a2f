from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from frameshard.text import TextStream, utf8_decoder

STORY = "Grüße, 旅人! 🐉 The inn — «The Red Dragon» — is open. 👩‍👧‍👦 Привет."


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@given(st.text(), st.lists(st.integers(0, 10_000)))
def test_code_points_are_never_cut(content: str, cuts: list[int]) -> None:
    decoder = utf8_decoder()
    parts = [decoder.decode(piece) for piece in cut(content.encode(), cuts)]
    assert "".join(parts) == content
    for part in parts:
        part.encode()  # it would fail for half of a surrogate pair


@given(st.lists(st.integers(0, 10_000)))
def test_bytes_that_are_no_utf8_do_not_stop_the_stream(cuts: list[int]) -> None:
    decoder = utf8_decoder()
    # An incomplete code point at the end is dropped.
    assert "".join(decoder.decode(piece) for piece in cut(b"a\xff\xfeb\xc3", cuts)) == "a\ufffd\ufffdb"


@given(
    st.text("ab\N{DRAGON}", max_size=30),
    st.lists(st.text("ab\N{DRAGON}", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 10_000)),
)
def test_stop_strings_end_the_text_however_it_is_cut(content: str, stops: list[str], cuts: list[int]) -> None:
    found = [
        (end, end - len(stop)) for stop in stops for end in range(len(content) + 1) if content[:end].endswith(stop)
    ]
    expected = content[: min(found)[1]] if found else content
    stream, decoder = TextStream(stops), utf8_decoder()
    shown = ""
    for piece in cut(content.encode(), cuts):
        shown += stream.push(decoder.decode(piece))
        assert expected.startswith(shown)
    assert stream.stopped == bool(found)
    assert shown + stream.finish() == expected


def test_text_is_given_out_as_soon_as_it_cannot_be_a_stop() -> None:
    stream = TextStream(["\nUser:"])
    assert stream.push("Hello\nUse") == "Hello"
    assert stream.push("d to it") == "\nUsed to it"
    assert stream.push("\nUser: hi") == ""
    assert stream.stopped
    assert stream.push("more") == ""


def test_every_cut_of_a_story() -> None:
    data = STORY.encode()
    for at in range(len(data)):
        stream, decoder = TextStream(["never said"]), utf8_decoder()
        shown = [stream.push(decoder.decode(part)) for part in (data[:at], data[at:])]
        assert "".join(shown) + stream.finish() == STORY
