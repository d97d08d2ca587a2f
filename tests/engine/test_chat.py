"""Chat templates in a process of their own. Without limits, each of these attacks would take gigabytes or hours."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_driver import EngineProcess, user

import tiny_models
from frameshard.engine.chat import ChatTemplate
from frameshard.errors import BadArgument, Unsupported

CHATML = (
    "{% for m in messages %}{{ bos_token if loop.first }}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello {{ 1 + 1 }}"}]
# These attack only if the message asks for it, so that the template is accepted at first.
WORST = "{% if 'worst' in messages[0].content %}...{% endif %}fine"
SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}"
LARGE = "{{ 'a' * 10**10 }}"
MANY = "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + [ns.l] + ns.l %}{% endfor %}"
DEEP = "{% macro deep() %}{{ deep() }}{% endmacro %}{{ deep() }}"
NUMBER = "{{ 10**(10**10) }}"


@pytest.fixture
def template() -> Iterator[Callable[[str], ChatTemplate]]:
    made: list[ChatTemplate] = []

    def make(source: str) -> ChatTemplate:
        made.append(ChatTemplate(source, bos="<s>", eos="</s>"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_renders_and_leaves_contents_alone(template: Callable[[str], ChatTemplate]) -> None:
    chatml = template(CHATML)
    assert chatml.render(HELLO) == "<s><|user|>Hello {{ 1 + 1 }}</s>\n<|assistant|>"
    said = 'Grüße 旅人 🐉 "quoted"\r\n\0\u2028'
    assert said in chatml.render([{"role": "user", "content": said}])
    assert len(chatml.render([{"role": "user", "content": "é" * 500_000}]).encode()) > 1_000_000


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no system role') }}",
        "{{ raise_exception('x' * 1000000) }}",
        "{{ messages[99].role }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        DEEP,
    ],
)
def test_what_a_template_must_not_do_is_a_typed_error(template: Callable[[str], ChatTemplate], source: str) -> None:
    refusing = template(source)
    with pytest.raises(BadArgument) as refused:
        refusing.render(HELLO)
    assert len(str(refused.value)) < 1000


def test_a_template_that_needs_a_list_of_tools_gets_an_empty_one(template: Callable[[str], ChatTemplate]) -> None:
    told = template("{% for tool in tools %}<{{ tool }}>{% endfor %}" + CHATML)
    assert told.render(HELLO).startswith("<s><|user|>Hello")
    assert told.render(HELLO, {"tools": ["a"]}).startswith("<a><s>")
    plain = template("{% if tools is not none %}tools: {{ tools }}{% endif %}" + CHATML)
    assert plain.render(HELLO).startswith("<s>")


@pytest.mark.parametrize("size", ["{{ 'x' * 2**20 }}y", "{% for i in range(99999) %}{{ 'é' * 100 }}{% endfor %}"])
def test_prompts_over_the_limit_are_refused(template: Callable[[str], ChatTemplate], size: str) -> None:
    long = template(WORST.replace("...", size))
    assert long.render(HELLO) == "fine"
    with pytest.raises(BadArgument, match="longer than 1048576 bytes"):
        long.render(user("worst"))


def test_json_is_written_as_hugging_face_writes_it(template: Callable[[str], ChatTemplate]) -> None:
    """jinja2's own filter would sort the keys and escape ``<`` and ``旅``."""
    value = {"schema": {"type": "object", "b": "<旅&'>", "a": [1, None, True]}}
    plain = '{"type": "object", "b": "<旅&\'>", "a": [1, null, true]}'
    assert template("{{ schema | tojson }}").render(HELLO, value) == plain
    assert template("{{ schema.b | tojson(ensure_ascii=True) }}").render(HELLO, value) == '"<\\u65c5&\'>"'
    assert template("{{ schema.a | tojson(indent=2) }}").render(HELLO, value) == "[\n  1,\n  null,\n  true\n]"
    tight = template("{{ schema | tojson(separators=(',', ':'), sort_keys=true) }}").render(HELLO, value)
    assert tight == '{"a":[1,null,true],"b":"<旅&\'>","type":"object"}'


def test_the_body_of_a_generation_block_is_rendered(template: Callable[[str], ChatTemplate]) -> None:
    marked = template(
        "{% set at = 1 %}{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}\n"
        "{% set at = 2 %}{{ m.content }}{{ at }}{% endgeneration %}{% endif %}{% endfor %}{{ at }}"
    )
    assert marked.render([*user("q "), {"role": "assistant", "content": "a"}]) == "q a21"
    with pytest.raises(Unsupported):
        ChatTemplate("{% generation %}", bos="", eos="")


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ unclosed", "x" * (256 * 1024 + 1), "{{ " + "(" * 100_000, SLOW, LARGE]
)
def test_templates_that_cannot_be_used(source: str) -> None:
    with pytest.raises(Unsupported):
        ChatTemplate(source, bos="", eos="")


@pytest.mark.parametrize("worst", [SLOW, LARGE, MANY, NUMBER])
def test_one_that_fails_over_some_messages_serves_the_others(
    template: Callable[[str], ChatTemplate], worst: str
) -> None:
    """Constant expressions are not computed at compile time either, so such a template works for other messages."""
    shifty = template(WORST.replace("...", worst))
    assert shifty.render(HELLO) == "fine"
    with pytest.raises(BadArgument):
        shifty.render(user("do your worst"))
    assert shifty.render(HELLO) == "fine"


def test_a_renderer_that_was_killed_is_started_again(template: Callable[[str], ChatTemplate]) -> None:
    before = children()
    chatml = template(CHATML)
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    assert chatml.render(HELLO).endswith("<|assistant|>")
    chatml.close()
    assert children() == before


def test_a_model_whose_template_cannot_be_used_has_no_chat(tmp_path: Path) -> None:
    tiny_models.make("llama", tmp_path / "large.gguf", chat_template=LARGE)
    child = EngineProcess()
    try:
        ready = child.load(tmp_path / "large.gguf", device="cpu", n_ctx=512, n_parallel=2, n_threads=1)
        assert ready["model"]["chat"] is False
        error = child.run(user("Hello"))[-1]["error"]
        assert error["name"] == "unsupported"
        assert "256 MiB of memory" in error["message"]
        assert child.run("Hello")[-1]["ev"] == "done"
    finally:
        child.close()


def children() -> set[int]:
    return set(map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()))
