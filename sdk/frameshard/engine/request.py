"""Turns a :class:`frameshard.wire.engine.Submit` into a :class:`Job` with a tokenised prompt.

Templates, tokenisers, image decoders and forms may take seconds, so this does not run in the decode thread. Nothing
here changes the runtime or the vision tower.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

from frameshard.engine import speculation, tools
from frameshard.engine.answer import Answer
from frameshard.engine.calls import CallReader, call_id
from frameshard.engine.channels import Channel, Channels
from frameshard.engine.chat import OURS
from frameshard.engine.forms import Form, form_of
from frameshard.engine.job import Job
from frameshard.engine.lookup import Lookup
from frameshard.engine.runtime import Runtime
from frameshard.engine.sampling import Dry, Prepared
from frameshard.engine.sequences import common_prefix, unpack_shapes
from frameshard.engine.thinking import ThoughtLimit, switch
from frameshard.engine.vision import Image, Picture, Vision
from frameshard.errors import BadArgument, ContextOverflow, Unsupported
from frameshard.wire import messages as m
from frameshard.wire import toolchecks
from frameshard.wire.engine import CountTokens, Submit

_REMEMBERED = 16  # DRY samplers
_NO_PIECES: Mapping[int, bytes] = {}


class _Prompt(NamedTuple):
    """
    :param pictures: see :class:`Job`.
    :param begins: the channel in which the answer begins.
    """

    tokens: list[int]
    pictures: dict[int, Picture]
    begins: Channel = Channel.TEXT


class RequestReader:
    """[any thread] Reads requests for one runtime and, if there is one, its vision tower."""

    def __init__(self, runtime: Runtime, vision: Vision | None = None) -> None:
        self._runtime = runtime
        self._vision = vision
        self._making_dry = threading.Lock()
        self._make_dry = functools.lru_cache(_REMEMBERED)(
            lambda params: Dry.make(runtime.tokenizer.vocab, params, runtime.n_ctx_seq)
        )

    def read(self, request: Submit) -> Job:
        """Makes the job of a request.

        :raises BadArgument: the prompt is empty, the chat template refuses it, ``resume`` or ``history`` do not fit the
            job, a form, a tool or the choice of tools is wrong, a biased token is not in the vocabulary, or the
            template keywords cannot be used.
        :raises ContextOverflow: prompt and answer together are longer than a sequence.
        :raises Unsupported: it is a chat and the model has no chat template; it has images and there is no vision
            tower; it asks for a form and the model has no token that ends an answer; it has tools and the chat template
            cannot have them; it asks for a thought and the model does not think; or it is a warm-up and the model has a
            recurrent state.
        """
        runtime, sampling = self._runtime, request.sampling
        if request.warm_up:
            self._check_warm_up()
        form = self._form(request)
        matcher = runtime.forms.matcher(form) if form is not None else None
        if request.thinking != "off" and runtime.tokenizer.thinking is None:
            raise Unsupported("this model does not think before it answers: leave out thinking, or set it to off")
        prompt, pictures, begins = self._prompt(request)
        n_prompt = len(prompt)
        if not n_prompt:
            raise BadArgument("the prompt is empty", field="prompt")
        self._check_fits(n_prompt, _n_answer(request))
        if len(request.resume) > sampling.max_tokens:
            raise BadArgument("more tokens to resume than the job may produce", field="resume")
        if max(request.resume, default=0) >= runtime.n_vocab:
            raise BadArgument("a token to resume is not in the vocabulary", field="resume")
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        answer = self._answer(request, begins, partial(call_id, seed, n_prompt), formed=matcher is not None)
        given: list[int] = []
        if request.given:
            if begins is Channel.THOUGHT:
                raise Unsupported("an answer that was broken off cannot go on where a prompt ends inside a thought")
            # If the given text already has `max_tokens` tokens, the answer is complete.
            given = runtime.tokenizer.tokenize(request.given, add_special=False)[: sampling.max_tokens]
            answer.begin(request.given, len(given))
        return Job(
            id=request.job,
            prompt=prompt,
            sampling=sampling,
            seed=seed,
            conversation=request.conversation,
            resume=[*given, *request.resume],
            history=unpack_shapes(request.history, n_prompt, n_prompt if pictures else runtime.n_ubatch),
            answer=answer,
            prepared=Prepared(matcher, self._biases(sampling), self._dry(sampling, prompt)),
            priority=request.priority,
            warm_up=request.warm_up,
            wanted=request.adapters,
            pictures=pictures,
            lookup=Lookup(prompt) if speculation.worthwhile(runtime) else None,
        )

    def _form(self, request: Submit) -> Form | None:
        """The form of the answer: that which the request asks for, or that of calls of its tools."""
        form = form_of(request.sampling)
        if not (request.tools or request.tool_choice != "auto"):
            return form
        toolchecks.check(request.tools, request.tool_choice)
        if form is not None:
            raise BadArgument(f"{form.name}: an answer with tools has no other form: leave it out", field=form.name)
        if request.kind != "chat":
            raise BadArgument("tools: only a chat has tools: ask with messages", field="tools")
        tokenizer = self._runtime.tokenizer
        return tools.form(request.tools, request.tool_choice, tokenizer.call_syntax, tokenizer.with_marks)

    def _answer(self, request: Submit, begins: Channel, make_id: Callable[[int], str], *, formed: bool) -> Answer:
        tokenizer, thinking = self._runtime.tokenizer, self._runtime.tokenizer.thinking
        if thinking is None or request.kind == "completion":
            channels, limit, marker_pieces = Channels(), ThoughtLimit(), _NO_PIECES
        else:
            channels, marker_pieces = Channels(thinking.markers, begins, formed=formed), tokenizer.marker_pieces
            # White space behind the marker would be part of a form.
            closing = thinking.closing.rstrip() if formed else thinking.closing
            most = 0 if request.thinking == "off" else request.thinking_tokens or None
            limit = ThoughtLimit(most, tokenizer.tokenize(closing, add_special=False, parse_special=True))
        calls = None
        if request.tools:
            marker_pieces = {**marker_pieces, **tokenizer.call_pieces}
            must_call = request.tool_choice not in ("auto", "none")
            calls = CallReader(tokenizer.call_syntax, make_id, must_call=must_call)
        return Answer(
            channels,
            request.sampling.stop,
            sentences=request.sentences,
            limit=limit,
            marker_pieces=marker_pieces,
            calls=calls,
        )

    def _check_warm_up(self) -> None:
        if not self._runtime.llama.can_trim:
            raise Unsupported("a model with a recurrent state cannot be warmed up", arch=self._runtime.model_info.arch)
        if not self._runtime.config.kv_cache_bytes:
            raise BadArgument("a warm-up needs the KV store: launch with kv_cache_mb above 0", field="warm_up")

    def count(self, request: CountTokens) -> int:
        """Counts the tokens of a prompt.

        :raises BadArgument: the chat template refuses the messages, or a tool is wrong.
        :raises ContextOverflow: the prompt is so long that it cannot fit, and counting its tokens would take long.
        :raises Unsupported: it is a chat and the model has no chat template, or it has tools and the chat template
            cannot have them.
        """
        toolchecks.check(request.tools, "auto")
        return len(self._text_prompt(request).tokens)

    def _biases(self, sampling: m.Sampling) -> list[tuple[int, float]]:
        """The biases of tokens, one for each: of several, llama.cpp's sampler may add only the first. A text stands for
        each of its tokens, as in llama.cpp's server."""
        biases: dict[int, float] = {}
        for entry in sampling.logit_bias:
            if entry.token is not None and entry.token >= self._runtime.n_vocab:
                raise BadArgument(
                    f"logit_bias: there is no token {entry.token}, the vocabulary has {self._runtime.n_vocab}",
                    field="logit_bias",
                )
            text_tokens = self._runtime.tokenizer.tokenize(entry.text, add_special=False)
            for token in text_tokens if entry.token is None else [entry.token]:
                biases[token] = biases.get(token, 0.0) + entry.bias
        return list(biases.items())

    def _dry(self, sampling: m.Sampling, prompt: list[int]) -> Dry | None:
        if not (sampling.dry_multiplier and sampling.dry_penalty_last_n):
            return None
        params = m.Sampling(
            **{name: getattr(sampling, name) for name in vars(m.DEFAULT_SAMPLING) if name.startswith("dry_")}
        )
        with self._making_dry:
            dry = self._make_dry(params)
        return dry.after([token for token in prompt if token >= 0])

    def _prompt(self, request: Submit) -> _Prompt:
        images = [Image.read(image) for image in request.images]
        if images and self._vision is None:
            raise Unsupported("no model that reads images is loaded: serve with one (mmproj)")
        if self._vision is None or not images:
            return self._text_prompt(request)
        text, add_special, begins = self._marked_text(request, "".join(f"{self._vision.marker}\n" for _ in images))
        self._check_fits(self._runtime.tokenizer.least_tokens(text), _n_answer(request), least=True)
        prompt: list[int] = []
        pictures: dict[int, Picture] = {}
        for part in self._vision.tokenize(text, images, add_special=add_special):
            if isinstance(part, Picture):
                self._vision.check(part)
                pictures[len(prompt)] = part
                prompt += part.ids
            else:
                prompt += part
        if add_special:
            prompt = self._runtime.tokenizer.without_eos(prompt)
        return _Prompt(prompt, pictures, begins)

    def _text_prompt(self, request: Submit | CountTokens) -> _Prompt:
        tokenizer, chat, begins = self._runtime.tokenizer, bool(request.messages), Channel.TEXT
        if isinstance(request, Submit) and request.warm_up and chat and request.messages[-1].role != "user":
            return _Prompt(self._prompt_before_a_question(request), {})
        parts, add_special = [request.prompt], True
        if chat:
            parts, add_special = tokenizer.chat_parts(request.messages, request.tools, _variables(request))
            parts[-1], begins = self._ended(parts[-1], request)
        n_answer = _n_answer(request) if isinstance(request, Submit) else 1
        self._check_fits(sum(map(tokenizer.least_tokens, parts)), n_answer, least=True)
        tokens = tokenizer.tokenize_parts(parts, add_special=add_special, parse_special=chat)
        return _Prompt(tokens, {}, begins)

    def _ended(self, prompt: str, request: Submit | CountTokens) -> tuple[str, Channel]:
        """Returns the end of a chat's prompt, where the model begins to think or to answer, and which of both."""
        thinking = self._runtime.tokenizer.thinking
        if thinking is None:
            return prompt, Channel.TEXT
        formed = bool(request.tools) or (isinstance(request, Submit) and form_of(request.sampling) is not None)
        end, begins = thinking.prompt_end(prompt, wanted=_thinks(request), formed=formed)
        return prompt + end, begins

    def _prompt_before_a_question(self, request: Submit) -> list[int]:
        """The tokens with which every prompt begins that continues these messages with a question. Templates may need
        a question, and may write the system message into it."""
        questions = [m.ChatMessage("user", text) for text in ("a", "b")]
        prompts = [
            self._text_prompt(dataclasses.replace(request, messages=(*request.messages, question))).tokens
            for question in questions
        ]
        return prompts[0][: common_prefix(*prompts)]

    def _check_fits(self, n_prompt: int, n_answer: int, *, least: bool = False) -> None:
        n_ctx = self._runtime.n_ctx_seq
        if n_prompt and n_prompt + n_answer > n_ctx:  # 0: not known
            raise ContextOverflow(
                f"a prompt of {'at least ' if least else ''}{n_prompt} tokens and an answer of {n_answer} do not fit "
                f"the {n_ctx} tokens of a conversation: shorten the prompt, lower max_tokens, or launch with "
                f"{'a larger n_ctx' if least else f'n_ctx={n_prompt + n_answer}'} (--ctx on the command line)",
                n_prompt=n_prompt,
                n_ctx=n_ctx,
            )

    def _marked_text(self, request: Submit, marks: str) -> tuple[str, bool, Channel]:
        """Puts ``marks``, the image markers, before the last message. libmtmd parses control tokens anywhere in a text,
        so a message must not contain one, nor with tools a mark that calls may have.

        :returns: the text of the prompt, whether BOS must be added, and the channel in which the answer begins.
        :raises BadArgument: a message contains a control token.
        """
        tokenizer = self._runtime.tokenizer

        def checked(text: str, syntax: object = None) -> str:
            if (token := tokenizer.control_token(text, with_marks=syntax is not None)) is not None:
                raise BadArgument(f"beside images a prompt cannot have {token} in it: leave it out", field="messages")
            return text

        if request.kind == "completion":
            return marks + checked(request.prompt), True, Channel.TEXT
        *before, last = request.messages
        marked = [*before, dataclasses.replace(last, content=marks + last.content)]
        text, add_special = tokenizer.chat_text(marked, request.tools, _variables(request), checked)
        text, begins = self._ended(text, request)
        return text, add_special, begins


def _thinks(request: Submit | CountTokens) -> bool:
    return isinstance(request, Submit) and request.thinking != "off"


def _variables(request: Submit | CountTokens) -> dict[str, Any]:
    """The template's variables beside the messages.

    :raises BadArgument: the template keywords are no JSON object, or name a variable that is not the client's.
    """
    keywords = _keywords(request.template_keywords) if isinstance(request, Submit) else {}
    return {**keywords, **switch(wanted=_thinks(request))}


def _keywords(text: str) -> Mapping[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    if toolchecks.too_deep(text):
        raise BadArgument(f"template_keywords: more than {toolchecks.MAX_DEPTH} levels", field="template_keywords")
    try:
        keywords = json.loads(text or "{}", parse_constant=refuse)
    except ValueError as error:
        raise BadArgument(f"template_keywords: not valid JSON: {error}", field="template_keywords") from None
    if not isinstance(keywords, dict):
        raise BadArgument("template_keywords: must be a JSON object", field="template_keywords")
    if ours := OURS & keywords.keys():
        names = ", ".join(sorted(ours))
        raise BadArgument(
            f"template_keywords: {names}: the sidecar sets this itself; thinking is set by the job's own field",
            field="template_keywords",
        )
    return keywords


def _n_answer(request: Submit) -> int:
    """The most tokens of the answer."""
    return 0 if request.warm_up else request.sampling.max_tokens
