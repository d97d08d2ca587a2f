"""Reads submit messages: from a request to a :class:`Job` with its prompt in tokens.

Templates, tokenisers, image decoders and schemas may take seconds, so all this runs beside the decode thread. Nothing
here changes the runtime or the tower.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from frameshard.engine.batch import Job, Shape
from frameshard.engine.lookup import Lookup
from frameshard.engine.runtime import Runtime
from frameshard.engine.sampling import SamplingParams
from frameshard.engine.text import TextStream
from frameshard.engine.vision import Image, Picture, Vision
from frameshard.errors import BadArgument, ContextOverflow, Unsupported

MAX_PROMPT_BYTES = 1 << 20
MAX_MESSAGES = 1024


class RequestReader:
    """Reads requests for one runtime, and one tower if there is one. [any thread]"""

    def __init__(self, runtime: Runtime, vision: Vision | None = None) -> None:
        self._runtime = runtime
        self._vision = vision

    def read(self, message: Mapping[str, object]) -> Job:
        """The job of a submit message.

        :raises BadArgument: a field is missing, of the wrong type or out of range.
        :raises ContextOverflow: prompt and answer do not fit one sequence of the context.
        :raises Unsupported: a chat with a model that has no chat template, images with one that reads none, or a JSON
            schema with one that has no token that ends an answer.
        """
        runtime = self._runtime
        params = message.get("params", {})
        if not isinstance(params, Mapping):
            raise BadArgument("params must be a map", field="params")
        sampling = SamplingParams.from_wire(params)
        grammar = runtime.schemas.grammar(sampling.json_schema) if sampling.json_schema else ""
        conversation = message.get("conversation")
        if conversation is not None and (not isinstance(conversation, str) or not 0 < len(conversation) <= 256):
            raise BadArgument("conversation must be a string of 1 to 256 characters", field="conversation")
        prompt, pictures = self._prompt(message, sampling.max_tokens or 1)
        n_prompt = len(prompt)
        if not n_prompt:
            raise BadArgument("the prompt is empty", field="prompt")
        self._check_fits(n_prompt, sampling.max_tokens or 1)
        max_new = sampling.max_tokens or runtime.n_ctx_seq - n_prompt
        resume = _whole_list("resume", message.get("resume") or [], runtime.n_vocab - 1)
        if len(resume) > max_new:
            raise BadArgument("more tokens to resume than the job may produce", field="resume")
        return Job(
            id=_whole("job", message.get("job"), 2**53),
            prompt=prompt,
            params=sampling,
            seed=secrets.randbits(32) if sampling.seed is None else sampling.seed,
            max_new=max_new,
            conversation=conversation,
            resume=resume,
            history=_unpack_shapes(message.get("history") or [], n_prompt, n_prompt if pictures else runtime.n_ubatch),
            text=TextStream(sampling.stop),
            grammar=grammar,
            pictures=pictures,
            lookup=Lookup(prompt) if runtime.speculates else None,
        )

    def _prompt(self, message: Mapping[str, object], n_answer: int) -> tuple[list[int], dict[int, Picture]]:
        specs = message.get("images") or []
        assert isinstance(specs, list)
        images = [Image.from_wire(spec) for spec in specs]
        if images and self._vision is None:
            raise Unsupported("no model that reads images is loaded: serve with one (mmproj)")
        if self._vision is None or not images:
            return self._text_prompt(message, n_answer), {}
        text, add_special = self._marked_text(message, "".join(f"{self._vision.marker}\n" for _ in images))
        self._check_fits(self._runtime.least_tokens(text), n_answer, least=True)
        prompt: list[int] = []
        pictures: dict[int, Picture] = {}
        for part in self._vision.tokenize(text, images, add_special=add_special):
            if isinstance(part, Picture):
                pictures[len(prompt)] = part
                prompt += part.ids
            else:
                prompt += part
        return prompt, pictures

    def _text_prompt(self, message: Mapping[str, object], n_answer: int) -> list[int]:
        chat = message.get("kind") != "completion"
        parts, add_special = self._runtime.chat_parts(_messages(message)) if chat else ([_completion(message)], True)
        self._check_fits(sum(map(self._runtime.least_tokens, parts)), n_answer, least=True)
        return self._runtime.tokenize_parts(parts, add_special=add_special, parse_special=chat)

    def _check_fits(self, n_prompt: int, n_answer: int, *, least: bool = False) -> None:
        n_ctx = self._runtime.n_ctx_seq
        if n_prompt and n_prompt + n_answer > n_ctx:  # 0 is not known
            raise ContextOverflow(
                f"a prompt of {'at least ' if least else ''}{n_prompt} tokens and an answer of {n_answer} do not fit "
                f"the {n_ctx} tokens of a conversation: shorten the prompt, lower max_tokens, or launch with "
                f"{'a larger n_ctx' if least else f'n_ctx={n_prompt + n_answer}'} (--ctx on the command line)",
                n_prompt=n_prompt,
                n_ctx=n_ctx,
            )

    def _marked_text(self, message: Mapping[str, object], marks: str) -> tuple[str, bool]:
        """The prompt with ``marks`` for images before what is said last, and whether tokens like BOS have to be added.
        libmtmd reads control tokens wherever they stand, so none may stand in what was said."""
        if message.get("kind") == "completion":
            prompt = _completion(message)
            said, text, add_special = [prompt], marks + prompt, True
        else:
            messages = _messages(message)
            said = [each["content"] for each in messages]
            last = {**messages[-1], "content": marks + messages[-1]["content"]}
            text, add_special = self._runtime.chat_text([*messages[:-1], last])
        for each in said:
            if (token := self._runtime.control_token(each)) is not None:
                raise BadArgument(f"beside images a prompt cannot have {token} in it: leave it out", field="messages")
        return text, add_special


def _completion(message: Mapping[str, object]) -> str:
    prompt = message.get("prompt")
    if not isinstance(prompt, str):
        raise BadArgument("a completion needs a prompt", field="prompt")
    _check_size(len(prompt.encode("utf-8", "replace")))
    return prompt


def _messages(message: Mapping[str, object]) -> Sequence[Mapping[str, str]]:
    if message.get("kind") != "chat":
        raise BadArgument("kind must be chat or completion", field="kind")
    messages = message.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not 0 < len(messages) <= MAX_MESSAGES:
        raise BadArgument(f"a chat needs 1 to {MAX_MESSAGES} messages", field="messages")
    size = 0
    for each in messages:
        if not isinstance(each, Mapping) or set(each) != {"role", "content"}:
            raise BadArgument("a message has role and content", field="messages")
        if not all(isinstance(value, str) for value in each.values()):
            raise BadArgument("role and content must be strings", field="messages")
        size += sum(len(value.encode("utf-8", "replace")) for value in each.values())
    _check_size(size)
    return messages


def _check_size(size: int) -> None:
    if size > MAX_PROMPT_BYTES:
        raise BadArgument(f"the prompt is longer than {MAX_PROMPT_BYTES} bytes", field="prompt")


def _whole(name: str, value: object, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        raise BadArgument(f"{name} must be a whole number from 0 to {high}", field=name)
    return value


def _whole_list(name: str, value: object, high: int) -> list[int]:
    if not isinstance(value, list):
        raise BadArgument(f"{name} must be a list", field=name)
    return [_whole(name, item, high) for item in value]


def _unpack_shapes(packed: object, n_prompt: int, n_ubatch: int) -> list[Shape]:
    if not isinstance(packed, list):
        raise BadArgument("history must be a list", field="history")
    shapes: list[Shape] = []
    total, kept, decoded = 0, 0, 0
    for row in packed:
        kept, decoded, count = row if isinstance(row, list) and len(row) == 3 else (0, 0, 0)
        if not (
            _whole("history", count, n_prompt) and _whole("history", kept, _whole("history", decoded, n_ubatch)) > 0
        ):
            raise BadArgument("history must have tokens kept, tokens decoded, and how often", field="history")
        shapes += [(kept, decoded)] * count
        total += kept * count
        if total > n_prompt:
            raise BadArgument("history is longer than the prompt", field="history")
    if total == n_prompt and kept < decoded:
        raise BadArgument("the prompt's last tokens cannot have been cut", field="history")
    return shapes
