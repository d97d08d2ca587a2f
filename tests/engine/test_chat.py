from __future__ import annotations

import pytest

from frameshard.engine.chat import ChatTemplate
from frameshard.errors import BadArgument, Unsupported

CHATML = (
    "{% for m in messages %}{{ bos_token if loop.first }}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello {{ 1 + 1 }}"}]


def test_renders_and_leaves_contents_alone() -> None:
    template = ChatTemplate(CHATML, bos="<s>", eos="</s>")
    assert template.render(HELLO) == "<s><|user|>Hello {{ 1 + 1 }}</s>\n<|assistant|>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no system role') }}",
        "{{ messages[99].role }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 999999 }}{% endfor %}{% endfor %}",
    ],
)
def test_what_a_template_must_not_do_is_a_typed_error(source: str) -> None:
    template = ChatTemplate(source, bos="", eos="")
    with pytest.raises(BadArgument):
        template.render(HELLO)


@pytest.mark.parametrize("source", ["{% if %}", "{{ unclosed", "x" * (256 * 1024 + 1)])
def test_templates_that_cannot_be_used(source: str) -> None:
    with pytest.raises(Unsupported):
        ChatTemplate(source, bos="", eos="")
