"""SmolLM2, made to think: with other chat templates, and with markers among its tokens.

It has not learned to think. So it thinks where its prompt ends in a thought, and until its thought is ended.
"""

from __future__ import annotations

from pathlib import Path

from mutants import Gguf

_CHAT = (
    "{% if mood %}<|im_start|>system\n{{ mood }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
OPENS = _CHAT + "<think>\n{% endif %}"
"""Every prompt ends in a thought, as with the models that always think."""

SWITCHES = (
    _CHAT + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""The model begins its thought itself, and can be told not to."""

BEGIN, END = 8, 9
"""The marker tokens."""


def make(source: Path, path: Path, *, template: str, tokens: bool) -> None:
    """Writes SmolLM2 with another chat template.

    :param tokens: the markers are control tokens; else they are ordinary text.
    """
    file = Gguf(source)
    file.key("tokenizer.chat_template").value = template.encode()
    if tokens:
        names = file.key("tokenizer.ggml.tokens").value
        names[BEGIN], names[END] = b"<think>", b"</think>"
    file.write(path)
