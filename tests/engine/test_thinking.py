"""Thought beside the answer: how templates show it, and real engines that think."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_driver import EngineProcess, Event, engine, ids, text, user

from frameshard.engine.answer import Answer, Given
from frameshard.engine.channels import Channel, Channels
from frameshard.engine.chat import ChatTemplate
from frameshard.engine.thinking import Thinking, ThoughtLimit, find_thinking
from frameshard.errors import BadArgument
from thinking_models import BEGIN, END, OPENS, SWITCHES

QUESTION = user("Name three colours.")
NO_END = [{"bias": -100.0, "token": 2}]
"""A model that has not learned to think may end its output in a thought."""
THINK = ("<think>", "</think>")
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
FORGETS = (  # a thought is left out of earlier answers, and prompts end in a thought
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
GEMMA = (
    "{% if enable_thinking %}<|turn>system\n<|think|><turn|>\n{% endif %}{% for m in messages %}<|turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content.split('<channel|>')[-1] }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
DELIBERATES = (
    "Deliberation: {{ 'enabled' if enable_thinking else 'disabled' }}{# <|inner_prefix|> #}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
)
STEPS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.reasoning_content %}{{ m.reasoning_content }}\n"
    "[BEGIN FINAL RESPONSE]\n{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\nHere are my reasoning steps:\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
KIMI_K3 = (
    "{% for m in messages %}<|open|>message role=\"{{ m.role }}\"<|sep|>{% if m.role == 'assistant' %}"
    "{% if thinking %}<|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|>{% endif %}"
    "<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>{% else %}{{ m.content }}{% endif %}"
    "<|close|>message<|sep|>{% endfor %}"
    '{% if add_generation_prompt %}<|open|>message role="assistant"<|sep|>'
    "<|open|>{{ 'think' if thinking else 'response' }}<|sep|>{% endif %}"
)


def found(source: str) -> tuple[Thinking | None, str, str]:
    """How a template thinks, and the end of a prompt with and without a thought."""
    template = ChatTemplate(source, bos="<s>", eos="</s>")

    def render(messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> str | None:
        try:
            return template.render(messages, variables)
        except BadArgument:
            return None

    def ended(*, wanted: bool) -> str:
        prompt = template.render(QUESTION, {"enable_thinking": wanted, "thinking": wanted})
        added = thinking.prompt_end(prompt, wanted=wanted, formed=False)[0] if thinking is not None else ""
        return prompt + added

    try:
        thinking = find_thinking(render, source)
        return thinking, ended(wanted=True), ended(wanted=False)
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "markers", "end_with", "end_without"),
    [
        (OPENS, THINK, "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"),
        (SWITCHES, THINK, "<|im_start|>assistant\n", "assistant\n<think>\n\n</think>\n\n"),
        (FORGETS, THINK, "<|assistant|><think>\n", "<|assistant|><think>\n\n</think>\n\n"),
        (GEMMA, ("<|channel>thought", "<channel|>"), "<|turn>model\n", "<|turn>model\n<|channel>thought\n<channel|>"),
        (DELIBERATES, ("<|inner_prefix|>", "<|inner_suffix|>"), "<|assistant|>", "<|assistant|>"),
        (
            STEPS,
            ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
            "<|assistant|>\nHere are my reasoning steps:\n",
            "Here are my reasoning steps:\n\n[BEGIN FINAL RESPONSE]\n",
        ),
        (
            HARMONY,
            ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
            "<|start|>assistant",
            "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>",
        ),
        (
            KIMI_K3,
            ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
            'message role="assistant"<|sep|><|open|>think<|sep|>',
            'message role="assistant"<|sep|><|open|>response<|sep|>',
        ),
    ],
)
def test_templates_show_how_a_model_thinks(
    source: str, markers: tuple[str, str], end_with: str, end_without: str
) -> None:
    thinking, with_thought, without = found(source)
    assert thinking is not None
    assert tuple(marker.text for marker in thinking.markers[:2]) == markers
    assert [marker.text for marker in thinking.markers[2:]] == (
        ["<|channel|>final<|message|>"] if source is HARMONY else []
    )
    assert with_thought.endswith(end_with)
    assert without.endswith(end_without)


def test_a_template_without_thought() -> None:
    assert found(PLAIN)[0] is None


def test_a_form_needs_a_thought_that_has_begun() -> None:
    thinking, _, _ = found(SWITCHES)
    assert thinking is not None
    assert thinking.prompt_end("assistant\n", wanted=True, formed=True) == ("<think>\n", Channel.THOUGHT)
    assert thinking.prompt_end("assistant\n", wanted=True, formed=False) == ("", Channel.TEXT)


def test_the_tokens_that_end_a_thought_come_once_and_in_order() -> None:
    limit = ThoughtLimit(2, [7, 8])
    said = []
    for token in (1, 2, 3, 4, 5):
        said.append(limit.due or token)
        limit.add(token, Channel.THOUGHT, Channel.THOUGHT if len(said) < 4 else Channel.TEXT)
    assert said == [1, 2, 7, 8, 5]


ENDS = {2: b"</s>", 100: b"<|end|>", 101: b"<|begin|>", 102: b"assistant", 103: b"<|content|>"}
CLOSING = [100, 101, 102, 103]


def ending(begin: Channel) -> Answer:
    """The answer of a model whose marker behind a thought begins with a token that ends its output."""
    thinking = Thinking("<|think|>", "<|end|><|begin|>assistant<|content|>", "", switches=False)
    return Answer(
        Channels(thinking.markers, begin),
        (),
        sentences=False,
        limit=ThoughtLimit(closing=CLOSING),
        marker_pieces={token: ENDS[token] for token in CLOSING},
    )


@pytest.mark.parametrize("end", ["<|end|>", "</s>"])
def test_a_thought_that_the_model_ends_with_its_output_has_one_closing_marker(end: str) -> None:
    """The token that ends the output may be the first of the marker."""
    answer = ending(Channel.THOUGHT)
    sampled = [(7, b"I think "), (100 if end == "<|end|>" else 2, b""), (8, b"an answer")]
    tokens, given = [], Given("", (), "")
    while sampled:
        due = answer.due
        token, piece = sampled.pop(0) if due is None else (due, ENDS[due])
        tokens.append(token)
        given = given.followed_by(answer.push(token, piece, ends=token in (2, 100) and due is None))
    given = given.followed_by(answer.finish())
    assert tokens == [7, *([2] if end == "</s>" else []), *CLOSING, 8]
    assert (given.thought, given.text) == ("I think ", "an answer")


@pytest.mark.parametrize("end", [2, 100])
def test_the_token_that_ends_an_answer_is_not_in_its_text(end: int) -> None:
    answer = ending(Channel.TEXT)
    given = answer.push(8, b"an answer", ends=False)
    given = given.followed_by(answer.push(end, b"", ends=True)).followed_by(answer.finish())
    assert (given.thought, given.text) == ("", "an answer")


# ---- real engines ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opening(opening_model: Path) -> Iterator[EngineProcess]:
    with engine(opening_model, mode="stream_only", device="emulated") as child:
        yield child


@pytest.fixture(scope="module")
def switching(switching_model: Path) -> Iterator[EngineProcess]:
    with engine(switching_model) as child:
        yield child


@pytest.fixture(scope="module")
def plain(model_path: Path) -> Iterator[EngineProcess]:
    with engine(model_path) as child:
        yield child


def thought(events: Sequence[Event]) -> str:
    return "".join(event.get("thought", "") for event in events if event["ev"] == "token")


def said(child: EngineProcess, **fields: Any) -> tuple[str, str]:
    """What the model thinks and what it answers."""
    events = child.run(QUESTION, **fields)
    assert events[-1]["ev"] == "done", events[-1]
    return thought(events), text(events)


def refused(child: EngineProcess, prompt: str | list[dict[str, str]] = QUESTION, **fields: Any) -> str:
    """Why a job is refused: the name of its error, and the message."""
    event = child.run(prompt, **fields)[-1]
    assert event["ev"] == "failed", event
    return f"{event['error']['name']}: {event['error']['message']}"


def test_a_thought_is_ended_at_its_limit(opening: EngineProcess) -> None:
    """The same tokens come however many of them an engine has said before its death."""
    params = {"max_tokens": 20, "logit_bias": NO_END, "temperature": 0.9, "seed": 3}
    fields: dict[str, Any] = {"thinking": "hidden", "thinking_tokens": 9, "params": params}
    whole = opening.run(QUESTION, **fields)
    tokens = ids(whole)
    ended = tokens.index(END)
    assert END not in tokens[:9]
    assert 9 <= ended <= 10  # a line break comes before the marker
    assert thought(whole).strip()
    assert text(whole)[:1].strip()  # without the white space behind the marker
    assert "think>" not in thought(whole) + text(whole)
    for n in (5, 9, ended, ended + 1, ended + 2, 16):
        rest = opening.run(QUESTION, **fields, resume=tokens[:n], history=whole[0]["history"])
        assert tokens[:n] + ids(rest) == tokens
        assert thought(whole).endswith(thought(rest))
        assert text(whole).endswith(text(rest))
        assert len(thought(rest) + text(rest)) == sum(
            len(event.get("text", "") + event.get("thought", "")) for event in whole[n + 1 : -1]
        )


def test_drafts_do_not_change_a_thought(opening: EngineProcess, opening_model: Path) -> None:
    """A repeated text is drafted, so drafts reach into the tokens that end the thought."""
    rules = "No weapons at the table, no magic indoors, no talk of the drowned bell after dark. " * 3
    fields: dict[str, Any] = {
        "thinking": "shown",
        "thinking_tokens": 30,
        "params": {"max_tokens": 80, "logit_bias": NO_END},
    }
    before = opening.stats()["accepted_tokens"]
    drafted = opening.run(user(rules + "Repeat these rules."), **fields)
    assert opening.stats()["accepted_tokens"] > before
    with engine(opening_model, mode="stream_only", device="emulated", speculate="off") as child:
        alone = child.run(user(rules + "Repeat these rules."), **fields)
    assert ids(drafted) == ids(alone)
    assert (thought(drafted), text(drafted)) == (thought(alone), text(alone))
    assert END in ids(drafted)


def test_off_answers_at_once(opening: EngineProcess, switching: EngineProcess) -> None:
    for child in (opening, switching):
        params = {"temperature": 0.0, "logit_bias": NO_END}
        assert said(child, params=params)[0] == ""
        assert said(child, params=params)[1].strip()
        assert said(child, params=params, thinking="off") == said(child, params=params)
    # A thought that the model begins all the same is ended, and is in no text.
    bias = [{"bias": 100.0, "token": BEGIN}]
    events = opening.run(QUESTION, params={"logit_bias": bias, "max_tokens": 16})
    assert (thought(events), text(events)) == ("", "")
    assert ids(events).count(BEGIN) == ids(events).count(END) == 4  # each marker with the line breaks beside it


def test_markers_of_ordinary_text_are_found(switching: EngineProcess) -> None:
    """The model says the marker, because its tokens are made likely. The answer has a form, so that it ends."""
    params = {"choices": ["red", "green"], "max_tokens": 60}
    thinks, answers = said(switching, thinking="shown", thinking_tokens=12, params=params)
    assert thinks.strip()
    assert "think>" not in thinks
    assert answers in ("red", "green")
    # In planned mode, too, an engine goes on in the middle of the marker.
    fields: dict[str, Any] = {"thinking": "shown", "thinking_tokens": 4, "params": params}
    tokens = ids(switching.run(QUESTION, **fields))
    for n in (4, 5, 6):
        assert ids(switching.run(QUESTION, **fields, resume=tokens[:n]))[0] == tokens[n]


@pytest.mark.parametrize("ends", [True, False])
def test_a_form_applies_to_the_answer_alone(opening: EngineProcess, ends: bool) -> None:
    """A model that would end its output in the thought must answer all the same."""
    bias = [{"bias": 100.0, "token": 2}] if ends else NO_END
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    for seed in range(3):
        params = {"json_schema": json.dumps(schema), "max_tokens": 90, "temperature": 0.9, "seed": seed}
        thinks, answers = said(opening, thinking="hidden", thinking_tokens=12, params={**params, "logit_bias": bias})
        assert bool(thinks) != ends
        assert isinstance(json.loads(answers)["n"], int)


def test_stop_strings_and_sentences_are_those_of_the_answer(opening: EngineProcess) -> None:
    fields: dict[str, Any] = {"thinking": "shown", "thinking_tokens": 12}
    params = {"logit_bias": NO_END, "max_tokens": 50}
    thinks, answers = said(opening, **fields, params=params)
    inside, after = thinks.split()[1], answers.split()[2]
    assert said(opening, **fields, params={"stop": [inside], **params})[0] == thinks
    assert said(opening, **fields, params={"stop": [after], **params}) == (thinks, answers[: answers.index(after)])
    events = opening.run(QUESTION, sentences=True, params=params, **fields)
    assert (thought(events), text(events)) == (thinks, answers)
    assert all(not event.get("ends") for event in events if event.get("thought"))


def test_what_a_job_cannot_ask_for(plain: EngineProcess, switching: EngineProcess) -> None:
    assert refused(plain, thinking="shown").startswith("unsupported: this model does not think")
    assert said(plain, thinking="off")[1]
    for keywords, why in [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("[" * 8000, "more than 64 levels"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"messages": []}', "messages: the sidecar sets this itself"),
        ('{"enable_thinking": true}', "enable_thinking: the sidecar sets this itself"),
    ]:
        found = refused(switching, template_keywords=keywords)
        assert found.startswith("bad_argument: template_keywords: ")
        assert why in found


def test_template_keywords_are_variables_of_the_template(switching: EngineProcess) -> None:
    without = switching.run(QUESTION)[0]["n_prompt"]
    mood = json.dumps({"mood": "cheerful and 旅人"})
    assert switching.run(QUESTION, template_keywords=mood)[0]["n_prompt"] > without
    assert switching.run(QUESTION, template_keywords='{"unknown": [1]}')[0]["n_prompt"] == without
