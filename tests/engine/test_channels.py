from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from frameshard.engine.channels import Channel, Channels, Marker

THINK = (Marker("<think>", Channel.TEXT, Channel.THOUGHT), Marker("</think>", Channel.THOUGHT, Channel.TEXT))
HARMONY = (
    Marker("<|channel|>analysis<|message|>", Channel.TEXT, Channel.THOUGHT),
    Marker("<|channel|>final<|message|>", Channel.TEXT, Channel.TEXT),
    Marker("<|end|><|start|>assistant<|channel|>final<|message|>", Channel.THOUGHT, Channel.TEXT),
)


def said(channels: Channels, pieces: list[str]) -> tuple[str, str]:
    """The text and the thought."""
    parts = [*(channels.push(piece) for piece in pieces), channels.finish()]
    return "".join(part.text for part in parts), "".join(part.thought for part in parts)


def cut(content: str, cuts: list[int]) -> list[str]:
    ends = sorted({c % (len(content) + 1) for c in cuts} | {0, len(content)})
    return [content[a:b] for a, b in itertools.pairwise(ends)]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a", "<think"]), max_size=12),
    st.lists(st.integers(0, 10_000)),
    st.sampled_from(Channel),
)
def test_the_result_does_not_depend_on_the_pieces(words: list[str], cuts: list[int], begin: Channel) -> None:
    content = "".join(words)
    pieces = cut(content, cuts)
    channels = Channels(THINK, begin)
    text = thought = ""
    whole = said(Channels(THINK, begin), [content])
    for piece in pieces:
        part = channels.push(piece)
        text, thought = text + part.text, thought + part.thought
        assert whole[0].startswith(text)
        assert whole[1].startswith(thought)
    rest = channels.finish()
    assert (text + rest.text, thought + rest.thought) == whole


def test_every_cut_of_a_thought_into_three() -> None:
    content = "<think>\nHe is <b>kind</b>. 1 < 2\n</think>\n\nHello </b> there <3"
    for first, second in itertools.combinations_with_replacement(range(len(content)), 2):
        pieces = [content[:first], content[first:second], content[second:]]
        assert said(Channels(THINK), pieces) == ("Hello </b> there <3", "He is <b>kind</b>. 1 < 2\n")


def test_every_cut_of_an_answer_with_headers() -> None:
    thinking = "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>final<|message|>Yes."
    direct = "<|channel|>final<|message|>Yes."
    for at in range(len(thinking)):
        assert said(Channels(HARMONY), [thinking[:at], thinking[at:]]) == ("Yes.", "Hm. ")
        assert said(Channels(HARMONY), [direct[:at], direct[at:]]) == ("Yes.", "")


def test_only_what_may_be_a_marker_is_held_back() -> None:
    channels = Channels(THINK)
    assert channels.push("  Well <thi") == ("  Well ", "")
    assert channels.push("s> is") == ("<this> is", "")
    assert channels.push("<think>I") == ("", "I")
    assert channels.push(" <think> so</") == ("", " <think> so")
    assert not channels.answering
    assert channels.push("think>") == ("", "")
    assert channels.answering
    assert channels.finish() == ("", "")


def test_an_output_may_begin_or_end_in_the_thought() -> None:
    assert said(Channels(THINK, Channel.THOUGHT), ["\nIs it", "?\n</think>", "\n\nNo."]) == ("No.", "Is it?\n")
    assert said(Channels(THINK), ["Yes. <think>Is it</thi"]) == ("Yes. ", "Is it</thi")
    assert said(Channels(), ["<think>all text</think>"]) == ("<think>all text</think>", "")


def test_text_with_a_form_begins_with_a_token_and_has_no_markers() -> None:
    channels = Channels(THINK, Channel.THOUGHT, formed=True)
    assert channels.push('Hm.</think>{"') == ("", "Hm.")
    assert channels.push(' {"a": "<think>') == (' {"a": "<think>', "")
    assert channels.push('"}') == ('"}', "")
