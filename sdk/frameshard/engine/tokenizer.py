"""Converts text to tokens and back, and renders chats. Any thread may call all of this module."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import llama_cpp

from frameshard.engine.chat import NO_VARIABLES, ChatTemplate
from frameshard.engine.thinking import Thinking, find_thinking
from frameshard.engine.tools import RESULT, CallSyntax, find_syntax
from frameshard.engine.tools import chat as for_template
from frameshard.engine.vocabulary import LeastTokens
from frameshard.errors import BadArgument, OutOfMemory, Unsupported
from frameshard.wire import messages as m

logger = logging.getLogger("frameshard.engine")

LONG_TEXT_CHARS = 1 << 15
"""Texts shorter than this are tokenised within 0.1 s, so no lower bound on their tokens is computed."""

_SHALLOW_BYTES = 1024  # a shorter text needs at most half a megabyte of stack
_STACK_PER_BYTE = 512
_STACK_BYTES = 1 << 20  # for anything else
_STACK_PAGE = 64 << 10  # macOS takes multiples of 16 KiB only; on Windows Python takes less than 256 MiB
_setting_stack = threading.Lock()


def with_deep_stack(n_bytes: int, call: Callable[[], int]) -> int:
    """Tokenises with a stack that is large enough. llama.cpp splits texts with the regular expressions of C++ for many
    vocabularies. They recurse for each character of a word, at 260 bytes or more, so one long line of dashes would
    exceed the usual stack and end the process.

    No call runs after the return, also where Ctrl-C raises an exception here: the caller may then free the model.

    :param n_bytes: the length of the text.
    :param call: calls llama.cpp and raises nothing.
    :returns: its result.
    :raises BadArgument: the text is too long for the stacks of this system.
    :raises OutOfMemory: the system has no memory for so large a stack.
    """
    if n_bytes <= _SHALLOW_BYTES:
        return call()
    results: list[int] = []
    calling, given_up = threading.Lock(), threading.Event()

    def run() -> None:
        with calling:
            if not given_up.is_set():
                results.append(call())

    thread = threading.Thread(target=run, daemon=True, name="tokenize")
    try:
        _start(thread, n_bytes)
        thread.join()
    except BaseException:
        # Not by a second join: before Python 3.13 it returns at once after one that was interrupted.
        with calling:
            given_up.set()
        raise
    return results[0]


def _start(thread: threading.Thread, n_bytes: int) -> None:
    """Starts a thread whose stack is large enough for a text; the errors are those of :func:`with_deep_stack`."""
    n_pages = -(-n_bytes * _STACK_PER_BYTE // _STACK_PAGE)
    with _setting_stack:
        try:
            usual = threading.stack_size(_STACK_BYTES + n_pages * _STACK_PAGE)
        except ValueError:
            raise BadArgument(f"a text of {n_bytes} bytes is too long to be tokenised here: shorten it") from None
        try:
            thread.start()
        except RuntimeError:
            raise OutOfMemory(f"the system has no memory for the stack to tokenise a text of {n_bytes} bytes") from None
        finally:
            threading.stack_size(usual)


def tokenize(vocab: Any, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
    """Returns the token ids of ``text``; see :meth:`Tokenizer.tokenize`.

    :param vocab: llama.cpp's vocabulary.
    :raises BadArgument: the vocabulary has no tokens for a part of the text.
    """
    data = text.encode("utf-8", "replace")
    room = len(data) + 8
    while True:
        tokens = (llama_cpp.llama_token * room)()
        given = vocab, data, len(data), tokens, room, add_special, parse_special
        n = with_deep_stack(len(data), functools.partial(llama_cpp.llama_tokenize, *given))
        if n >= 0:
            ids = list(tokens[:n])
            if min(ids, default=0) < 0:
                raise BadArgument("the model's vocabulary has no tokens for a part of the text")
            return ids
        room = -n


_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_SPECIAL = _CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds these texts. The longest comes first, because one may begin with another."""
    ordered = sorted({*texts} - {""}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


class Tokenizer:
    """The vocabulary of a loaded model. Free it with :meth:`close`.

    :param model: llama.cpp's model.
    :param template: the text of the model's chat template; ``None`` if it has none.
    """

    def __init__(self, model: Any, template: str | None) -> None:
        self._model = model
        self._template = template
        self.vocab: Any = llama_cpp.llama_model_get_vocab(model)
        """llama.cpp's vocabulary."""
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocab))
        self._bos = ""
        self._no_chat = "it has no chat template"
        self._control_tokens = _any_of(self._texts_with(_CONTROL))

    def close(self) -> None:
        """Ends the process that renders chat templates."""
        if (chat := self.__dict__.get("chat")) is not None:
            chat.close()

    @property
    def first_token(self) -> int:
        """The BOS token; token 0 if the vocabulary has none."""
        return max(0, int(llama_cpp.llama_vocab_bos(self.vocab)))

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Returns the token ids of ``text``. It never gets an EOS, because the model shall go on behind it.

        :param add_special: add BOS if the model's vocabulary asks for it.
        :param parse_special: read the names of control tokens in the text as these tokens.
        :raises BadArgument: the vocabulary has no tokens for a part of the text.
        """
        tokens = tokenize(self.vocab, text, add_special=add_special, parse_special=parse_special)
        return self.without_eos(tokens) if add_special else tokens

    def without_eos(self, tokens: list[int]) -> list[int]:
        """Returns a prompt without the EOS that llama.cpp adds if the model's vocabulary asks for one."""
        eos = int(llama_cpp.llama_vocab_eos(self.vocab))
        added = llama_cpp.llama_vocab_get_add_eos(self.vocab) and tokens[-1:] == [eos]
        return tokens[:-1] if added else tokens

    def tokenize_parts(self, parts: Sequence[str], *, add_special: bool, parse_special: bool) -> list[int]:
        """Like :meth:`tokenize`, for a text in parts. No token spans two parts."""
        tokens = self.tokenize(parts[0], add_special=add_special, parse_special=parse_special)
        for part in parts[1:]:
            inside = tokens and not llama_cpp.llama_vocab_get_attr(self.vocab, tokens[-1]) & _SPECIAL
            lead = self._lead if inside else ""
            found = self.tokenize(lead + part, add_special=False, parse_special=parse_special)
            tokens += found[len(self.tokenize(lead, add_special=False)) :]
        return tokens

    @functools.cached_property
    def _lead(self) -> str:
        """A character that no token has but that of its byte; "" if none is needed, or there is none.

        SentencePiece puts a space in front of each text that is tokenised, and behind control tokens. In front of the
        rest of a text, the tokens of this character take that space."""
        if self._kind != b"llama":
            return ""
        pieces = [self._piece(token, special=True) for token in range(self.n_vocab)]
        alone = (bytes([byte]) for byte in range(1, 32))
        return next((each.decode() for each in alone if [p for p in pieces if each in p] == [each]), "")

    @functools.cached_property
    def _kind(self) -> bytes:
        """llama.cpp's name for the kind of vocabulary."""
        name = ctypes.create_string_buffer(16)
        llama_cpp.llama_model_meta_val_str(self._model, b"tokenizer.ggml.model", name, len(name))
        return name.value

    def least_tokens(self, text: str) -> int:
        """Returns a lower bound on the number of tokens of ``text``; 0 for a short text."""
        if len(text) < LONG_TEXT_CHARS or self._least_tokens is None:
            return 0
        return self._least_tokens.of(text.encode("utf-8", "replace"))

    @functools.cached_property
    def _least_tokens(self) -> LeastTokens | None:
        """The lower bound for this vocabulary; ``None`` for kinds of vocabulary that change or drop parts of a text."""
        if self._kind not in (b"llama", b"gpt2"):
            return None
        stripping = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP | llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP
        tokens = range(self.n_vocab)
        strips = any(llama_cpp.llama_vocab_get_attr(self.vocab, token) & stripping for token in tokens)
        pieces = (self._piece(token, special=True) for token in tokens)
        return LeastTokens(pieces, strips=strips, escapes=self._kind == b"llama")

    def piece(self, token: int) -> bytes:
        """Returns the bytes that ``token`` adds to a text; none for a control token. They may end inside a code
        point."""
        return self._piece(token, special=False)

    def _piece(self, token: int, *, special: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, room, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            room = -n

    def is_end(self, token: int) -> bool:
        """Returns true if this token ends the model's answer."""
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))

    def grammar_tokens(self) -> tuple[list[bytes], list[int]]:
        """Returns the bytes of each token, and the tokens that end an answer. Tokens that must not occur in an answer
        with a form have no bytes: those that end an answer, control tokens, and user-defined tokens such as
        ``<think>``."""
        user_defined = llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
        ends = [token for token in range(self.n_vocab) if self.is_end(token)]
        pieces = [self.piece(token) for token in range(self.n_vocab)]
        for token, piece in enumerate(pieces):
            marks = piece.startswith(b"<") and piece.endswith(b">")
            if marks and llama_cpp.llama_vocab_get_attr(self.vocab, token) & user_defined:
                pieces[token] = b""
        for token in ends:
            pieces[token] = b""
        return pieces, ends

    def control_token(self, text: str, *, with_marks: bool = False) -> str | None:
        """Returns the first name of a control token in ``text``, such as ``<|im_end|>``; ``None`` if it has none.

        :param with_marks: look for all of :attr:`marks`.
        """
        found = (self._any_mark if with_marks else self._control_tokens).search(text)
        return found and found[0]

    def _texts_with(self, attributes: int) -> dict[str, int]:
        """The tokens that have one of these attributes, by their texts."""
        return {
            self._piece(token, special=True).decode("utf-8", "replace"): token
            for token in range(self.n_vocab)
            if llama_cpp.llama_vocab_get_attr(self.vocab, token) & attributes
        }

    @functools.cached_property
    def marks(self) -> dict[str, int]:
        """The tokens that have no bytes in :meth:`grammar_tokens`, by their texts."""
        user_defined = self._texts_with(llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED)
        marks = {text: token for text, token in user_defined.items() if text.startswith("<") and text.endswith(">")}
        return {text: token for text, token in (marks | self._texts_with(_CONTROL)).items() if text}

    @functools.cached_property
    def _any_mark(self) -> re.Pattern[str]:
        return _any_of(self.marks)

    # --- chat -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def chat(self) -> ChatTemplate | None:
        """The model's chat template, rendered in a separate process; ``None`` if the model has no usable one."""
        if self._template is None:
            return None

        def special(token: int) -> str:
            return self._piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

        self._bos = special(llama_cpp.llama_vocab_bos(self.vocab))
        try:
            return ChatTemplate(self._template, bos=self._bos, eos=special(llama_cpp.llama_vocab_eos(self.vocab)))
        except Unsupported as error:
            logger.warning("no chat with this model: %s", error)
            self._no_chat = str(error)
            return None

    @functools.cached_property
    def thinking(self) -> Thinking | None:
        """How the model thinks; ``None`` if it does not, or cannot chat."""
        chat, source = self.chat, self._template
        if chat is None or source is None:
            return None

        def render(messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> str | None:
            with contextlib.suppress(BadArgument):
                return chat.render(messages, variables)
            return None

        return find_thinking(render, source)

    @functools.cached_property
    def marker_pieces(self) -> Mapping[int, bytes]:
        """The texts of the control tokens that the markers of a thought have in them."""
        texts = (marker.text for marker in self.thinking.markers) if self.thinking is not None else ()
        tokens = {token for text in texts for token in self.tokenize(text, add_special=False, parse_special=True)}
        return {token: self._piece(token, special=True) for token in tokens if not self.piece(token)}

    def chat_text(
        self,
        messages: Sequence[m.ChatMessage],
        tools: Sequence[m.Tool] = (),
        variables: Mapping[str, Any] = NO_VARIABLES,
        apart: Callable[[str, CallSyntax | None], str] = lambda text, syntax: text,
    ) -> tuple[str, bool]:
        """Renders ``messages`` and ``tools`` with the model's chat template.

        :param variables: further variables of the template.
        :param apart: changes each text of messages and tools; gets the syntax of calls if there are any.
        :returns: the prompt, and true if BOS must still be added to it.

        :raises Unsupported: the model has no usable chat template, or cannot have tools.
        :raises BadArgument: the template refuses the messages, or a call, a result or a schema is wrong.
        """
        template = self._chat_template
        syntax = self.call_syntax if tools or any(each.tool_calls or each.role == "tool" for each in messages) else None
        rendered, described = for_template(messages, tools, syntax, lambda text: apart(text, syntax))
        prompt = template.render(rendered, variables if described is None else {**variables, "tools": described})
        return prompt, not (self._bos and prompt.startswith(self._bos))

    def chat_parts(
        self,
        messages: Sequence[m.ChatMessage],
        tools: Sequence[m.Tool] = (),
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> tuple[list[str], bool]:
        """Like :meth:`chat_text`, but returns the prompt in parts for :meth:`tokenize_parts`. The names of control
        tokens in messages and tools are cut into single characters, so they do not become control tokens. Otherwise the
        text of a message could end that message and begin one with another role. With tools, this holds also for the
        marks of calls.

        :raises Unsupported: as :meth:`chat_text`.
        :raises BadArgument: as :meth:`chat_text`.
        """
        cut = secrets.token_hex(16)

        def apart(text: str, syntax: CallSyntax | None) -> str:
            marks = self._control_tokens if syntax is None else self._call_marks
            return marks.sub(lambda found: cut + cut.join(found[0]) + cut, text)

        text, add_special = self.chat_text(messages, tools, variables, apart)
        return text.split(cut), add_special

    @property
    def _chat_template(self) -> ChatTemplate:
        if self.chat is None:
            raise Unsupported(f"no chat with this model: {self._no_chat}; ask for a completion instead")
        return self.chat

    @functools.cached_property
    def call_syntax(self) -> CallSyntax:
        """How the model calls tools.

        :raises Unsupported: the model has no usable chat template, or cannot have tools.
        """
        ends = [token for token in range(self.n_vocab) if self.is_end(token)]
        texts = [self._piece(token, special=True).decode("utf-8", "replace") for token in ends]
        closing = self.thinking.closing if self.thinking is not None else ""
        return find_syntax(self._chat_template, texts, closing)

    @functools.cached_property
    def call_pieces(self) -> Mapping[int, bytes]:
        """The texts of the control tokens that the syntax of calls has in it."""
        syntax = self.call_syntax
        parts = self.with_marks("".join((syntax.begin, syntax.between, syntax.join, syntax.end)))
        return {token: text.encode() for text, token in parts if token is not None}

    @functools.cached_property
    def _call_marks(self) -> re.Pattern[str]:
        return _any_of([*self.marks, self.call_syntax.trigger, *RESULT])

    def with_marks(self, text: str) -> list[tuple[str, int | None]]:
        """Divides a text of the model's syntax into texts, without a token, and marks, with theirs."""
        found = re.split(f"({self._any_mark.pattern})", text)
        return [(part, self.marks.get(part) if i % 2 else None) for i, part in enumerate(found) if part]
