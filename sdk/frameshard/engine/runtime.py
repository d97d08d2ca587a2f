"""One model, one context, and the shard device under them. Every call into llama.cpp is made here or in ``sampling``.

Guarantees: a :class:`Runtime` belongs to the thread that made it, except for what says [any thread]; llama.cpp's return
codes become ``frameshard.errors`` here and nowhere else; what a sequence holds is known exactly after every call, also
after an aborted one.

Each sequence has key-value cells of its own (``kv_unified`` off). A unified cache would let one conversation use the
room of all, but then the cells a sequence gets, and with them the order in which attention adds up, depend on what
other sequences do: the same text could not be promised. So every sequence has room for ``n_ctx`` tokens, and
llama.cpp's own ``n_ctx`` is that times ``n_parallel``. VRAM is taken for the cells in use alone; what a large context
costs before it is used is its mask in the compute buffers, and the window for one layer in the floor.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from frameshard import cpu
from frameshard.cpu import default_threads
from frameshard.engine.chat import ChatTemplate
from frameshard.engine.nvml import DRIVER_MARGIN, Observer, OverheadMeter
from frameshard.engine.probe import load_or_probe
from frameshard.engine.schema import Schemas
from frameshard.engine.vocabulary import LeastTokens
from frameshard.errors import (
    BadArgument,
    BadModel,
    BudgetBelowFloor,
    ContextOverflow,
    FrameshardError,
    OutOfMemory,
    Unsupported,
)
from frameshard.native import CPU, EMULATED, parse_device
from frameshard.plan import routing
from frameshard.plan.context import DRIVER_BYTES, Context, check_kv_type, estimate_context, logits_rows
from frameshard.plan.ladder import make_ladder
from frameshard.plan.layout import lay_out
from frameshard.plan.model import Model, read_model
from frameshard.plan.plans import Plan, make_plan
from frameshard.plan.profile import Profile
from frameshard.plan.ubatch import LEAST_UBATCH, PLAIN_UBATCH, choose_launch_ubatch, choose_ubatch
from frameshard.wire.engine import EngineConfig

if TYPE_CHECKING:
    from frameshard.native import ShardDevice

logger = logging.getLogger("frameshard.engine")
_llama_logger = logging.getLogger("frameshard.llama")

ALL_LAYERS = 999
STOCK = "stock:"
LONG_TEXT_CHARS = 1 << 15
"""Shorter texts are tokenised within a tenth of a second, in which there is no use for a bound."""
KV_TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
_ROUTING_CHANGED = 0.08  # share of choices
KV_PAGE = 256
"""Cells in which room for keys and values is asked for; llama.cpp reads them in steps of as many."""
REPLAN_SHARE = 16
"""A new plan is made when keys and values have grown or shrunk by more than one in so many bytes of the budget."""
# Of a token's time, what another one in the same decode costs while weights are streamed.
_VERIFY_COST = 0.04
_REBUILD_S = 60e-6  # of a layer; measured on 2 slow cores, resident 45e-6 and streamed 80e-6


class DecodeAborted(Exception):
    """:meth:`Runtime.abort` stopped the decode. The sequences of that batch are back at the length they had before it,
    except where :meth:`Runtime.length` says otherwise: a recurrent state cannot be rolled back, that one is empty."""


@dataclass(frozen=True)
class Rows:
    """Part of a decode batch: ``tokens`` go to the end of sequence ``seq``; ``logits`` is "last", "all" or "none"."""

    seq: int
    tokens: Sequence[int]
    logits: str = "last"


class Runtime:
    """A loaded model with its context. Make it with :meth:`load`; a context manager that closes it."""

    def __init__(self, config: EngineConfig) -> None:
        """Nothing is loaded yet; use :meth:`load`."""
        self.config = config
        self.device: ShardDevice | None = None
        """The shard device; ``None`` on the CPU."""
        self.device_name = ""
        self.observer: Observer | None = None
        """NVML's view of this process; only for a real GPU."""
        self.profile: Profile | None = None
        self.plan: Plan | None = None
        """The plan in force; ``None`` on the CPU."""
        self.mode = config.mode
        """"planned" or "stream_only"; a change takes effect with the next :meth:`replan`."""
        self.gpu_busy_s = 0.0
        """How long a game keeps the device busy in each frame; a change takes effect with the next :meth:`replan`."""
        self.routing: tuple[float, ...] = ()
        """How the model's routers choose experts, as plans have it; see :meth:`learn`."""
        self.unfilled = False
        """Keys and values were given up: :meth:`fill` finds room for weights."""
        self.schemas = Schemas(self._grammar_tokens)
        """[any thread] What holds answers to a JSON schema."""
        self._model: Any = None
        self._context: Any = None
        self._abort = False
        self._nodes = 0
        self._bos = ""
        self._no_chat = "it has no chat template"
        self._meter = OverheadMeter()

    @classmethod
    def load(
        cls, config: EngineConfig, *, budgets: Sequence[int] = (), n_prompt: int = 0, fill: bool = True
    ) -> Runtime:
        """Checks the file, loads the model, makes the context, takes the VRAM and runs one token through it. Without
        ``fill`` no weights are made resident.

        Where ``config.n_ubatch`` is 0, that is chosen for a prompt of ``n_prompt`` tokens in each sequence at each of
        ``budgets``; without these, for ``config.vram_budget_bytes`` and what it may shrink to.

        :raises ModelNotFound: no such file.
        :raises BadModel: not a GGUF that can be served.
        :raises Unsupported: a model of a kind that cannot chat or complete (encoder, diffusion), or whose keys and
            values cannot be kept as ``config.kv_type``.
        :raises UnknownDevice: no such device.
        :raises BudgetBelowFloor: the budget is too small for this model and context; the error names the floor.
        :raises OutOfMemory: the device or the host refuses the memory.
        """
        runtime = cls(config)
        try:
            runtime._load(budgets, n_prompt, fill)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def _load(self, budgets: Sequence[int], n_prompt: int, fill: bool) -> None:
        config = self.config
        install_log()
        self.model_info: Model = read_model(config.model)
        check_kv_type(self.model_info, config.kv_type)
        # What was checked must be what is served: the file is held open and compared before each job.
        self._file = open(config.model, "rb")  # noqa: SIM115 - closed by close()
        self._file_state = _state(os.fstat(self._file.fileno()))
        self.n_threads = config.n_threads or default_threads()
        self._device = resolve_device(config.device)
        self.device_name, _ = parse_device(self._device)
        size_mib = -(-self.model_info.file_bytes >> 20)
        logger.info("loading %s (%d MiB) on %s", os.path.basename(config.model), size_mib, self.device_name)

        cpu.check()
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        if cpu.must_avoid_amx():
            logger.warning("llama-cpp-python was compiled with AMX, which gcc 12 gets wrong: loading without it")
            model_params.use_extra_bufts = False
        if self.device_name == "cpu":
            self._devices = (ctypes.c_void_p * 1)(None)  # an empty list, or llama.cpp would take every GPU it finds
            model_params.n_gpu_layers = 0
        elif self.device_name.startswith(STOCK):
            from frameshard.native import device_handle

            self._devices = (ctypes.c_void_p * 2)(device_handle(self.device_name[len(STOCK) :]), None)
            model_params.n_gpu_layers = ALL_LAYERS
        else:
            self.device = self._make_device()
            self._devices = self.device.devices_array
            model_params.n_gpu_layers = ALL_LAYERS
        model_params.devices = ctypes.cast(self._devices, ctypes.c_void_p).value
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(config.model), model_params)
        if not self._model:
            raise BadModel(f"llama.cpp refuses {config.model}: {_last_errors()}")
        if (
            llama_cpp.llama_model_has_encoder(self._model)
            or not llama_cpp.llama_model_has_decoder(self._model)
            or llama_cpp.llama_model_is_diffusion(self._model)
        ):
            raise Unsupported("this model does not generate text token by token", arch=self.model_info.arch)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        if not config.n_ubatch:
            self.config = replace(config, n_ubatch=max(self._choose_ubatch(budgets, n_prompt), config.n_parallel))
        self._make_context()
        self._make_batch()
        self._control_tokens = self._find_control_tokens()
        if self.device is not None:
            self.measure_overhead()
            self.profile = self.profile or self._probe(self.device)
            self.device.commit()
            kept = routing.load(self.model_info) if self.model_info.n_expert else {}
            self.routing = routing.shares(kept.values())
            self.replan()
        self._warm_up()
        if self.device is not None:
            self._recall(kept)
            # The driver's libraries took their workspaces in the warm-up; what is left of the budget is for weights.
            self.measure_overhead()
            self.replan()
            while fill and self.fill():
                pass

    def _make_device(self) -> ShardDevice:
        from frameshard.native import ShardDevice

        if self.device_name != EMULATED:
            self.observer = Observer()
        device = ShardDevice(
            self._device,
            vram_budget_bytes=self.config.vram_budget_bytes,
            n_threads=self.n_threads,
        )
        self.ladder = make_ladder(self.model_info)
        device.set_shards([[tensor.name for tensor in shard.tensors] for shard in self.ladder])
        return device

    def _probe(self, device: ShardDevice) -> Profile:
        try:
            return self._measure(device)
        except OutOfMemory:
            device.commit()  # a budget that has no room for the probe is below the floor, and this says so
            raise

    def _measure(self, device: ShardDevice) -> Profile:
        return load_or_probe(
            device,
            self.model_info,
            device_name=self._device,
            n_threads=self.n_threads,
            kv_type=self.config.kv_type,
        )

    def _choose_ubatch(self, budgets: Sequence[int], n_prompt: int) -> int:
        if self.device is None:
            return PLAIN_UBATCH
        config = self.config
        try:
            profile = self.profile = self._measure(self.device)
            self.measure_overhead()
            # Some of the driver's libraries come with the warm-up.
            least = 0 if self.device_name == EMULATED else DRIVER_BYTES
            shared: dict[str, Any] = {
                "n_ctx": config.n_ctx,
                "n_seq": config.n_parallel,
                "kv_type": config.kv_type,
                "overhead_bytes": max(least, self.device.stats().overhead_bytes),
                "routing": routing.recall(self.model_info),
            }
            if not budgets:
                return choose_launch_ubatch(self.model_info, profile, config.vram_budget_bytes, **shared)
            together = config.n_parallel
            return choose_ubatch(self.model_info, profile, budgets, n_prompt=n_prompt, n_together=together, **shared)
        except (BudgetBelowFloor, OutOfMemory):  # by an estimate: the device has the true floor, and names it
            return LEAST_UBATCH

    def _make_context(self) -> None:
        config = self.config
        params = llama_cpp.llama_context_default_params()
        # Whole pages for each sequence: llama.cpp divides this number, and rounds what it gets.
        params.n_ctx = -(-config.n_ctx // KV_PAGE) * KV_PAGE * config.n_parallel
        params.n_batch = config.n_ubatch
        params.n_ubatch = config.n_ubatch
        params.n_seq_max = config.n_parallel
        params.type_k = params.type_v = KV_TYPES[config.kv_type]
        rows = logits_rows(config.n_parallel, config.n_ubatch, can_speculate=self.can_speculate)
        params.n_outputs_max = config.n_outputs_max or rows
        params.n_threads = self.n_threads
        params.n_threads_batch = self.n_threads
        params.kv_unified = False
        params.offload_kqv = self.device_name != "cpu"
        params.op_offload = self.device_name != "cpu"
        params.no_perf = True
        if self.device is None:
            # Counting the calls shows that a long decode moves. Costs 2 % of a token of a 135M model, less of others.
            self._abort_callback = llama_cpp.ggml_abort_callback(self._on_node)
            params.abort_callback = self._abort_callback
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise OutOfMemory(
                f"llama.cpp cannot make {config.n_parallel} contexts of {config.n_ctx} tokens: {_last_errors()}; "
                "lower n_ctx or n_parallel"
            )
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.n_ctx_seq = int(llama_cpp.llama_n_ctx_seq(self._context))
        self.n_ubatch = int(llama_cpp.llama_n_ubatch(self._context))
        self.n_outputs_max = int(params.n_outputs_max)
        self._lengths = [0] * config.n_parallel
        self._expected = [0] * config.n_parallel
        self._cut = False
        self._kv_planned = self._ring_planned = 0

    @property
    def can_go_back(self) -> bool:
        """Tokens can be taken back, which a recurrent state cannot."""
        return not (llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model))

    @property
    def can_speculate(self) -> bool:
        """Drafted tokens can be decoded: a rejected one can be removed from the cache, and there is a shard device,
        whose plan predicts the cost."""
        return self.config.speculate == "auto" and self.device is not None and self.can_go_back

    def _make_batch(self) -> None:
        n = self.n_ubatch
        self._tokens = np.zeros(n, np.int32)
        self._positions = np.zeros(n, np.int32)
        self._n_seqs = np.ones(n, np.int32)
        self._seqs = np.zeros(n, np.int32)
        self._wanted = np.zeros(n, np.int8)
        self._seq_pointers = (self._seqs.ctypes.data + np.arange(n) * self._seqs.itemsize).astype(np.uintp)
        batch = llama_cpp.llama_batch()
        batch.embd = None
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._n_seqs),
            ("seq_id", self._seq_pointers),
            ("logits", self._wanted),
        ):
            kind = dict(llama_cpp.llama_batch._fields_)[name]
            setattr(batch, name, ctypes.cast(array.ctypes.data, kind))
        self._batch = batch

    @functools.cached_property
    def chat(self) -> ChatTemplate | None:
        """The model's chat template, which takes a process of its own; ``None`` where there is no usable one."""
        source = self.model_info.chat_template
        if source is None:
            return None

        def special(token: int) -> str:
            return self._piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

        self._bos = special(llama_cpp.llama_vocab_bos(self._vocab))
        try:
            return ChatTemplate(source, bos=self._bos, eos=special(llama_cpp.llama_vocab_eos(self._vocab)))
        except Unsupported as error:
            logger.warning("no chat with this model: %s", error)
            self._no_chat = str(error)
            return None

    def _grammar_tokens(self) -> tuple[list[bytes], list[int]]:
        """The bytes of each token, and the tokens that end an answer. No bytes have those, control tokens, and what
        stands in the vocabulary for a control token, such as ``<think>``: none of them can occur in JSON."""
        user_defined = llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
        ends = [token for token in range(self.n_vocab) if self.is_end(token)]
        pieces = [self.piece(token) for token in range(self.n_vocab)]
        for token, piece in enumerate(pieces):
            marks = piece.startswith(b"<") and piece.endswith(b">")
            if marks and llama_cpp.llama_vocab_get_attr(self._vocab, token) & user_defined:
                pieces[token] = b""
        for token in ends:
            pieces[token] = b""
        return pieces, ends

    def _find_control_tokens(self) -> re.Pattern[str]:
        special = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
        texts = {
            self._piece(token, special=True).decode("utf-8", "replace")
            for token in range(self.n_vocab)
            if llama_cpp.llama_vocab_get_attr(self._vocab, token) & special
        }
        # Longest first: one may begin with another.
        ordered = sorted(texts - {""}, key=lambda text: (-len(text), text))
        return re.compile("|".join(map(re.escape, ordered)) or "(?!)")

    def _warm_up(self) -> None:
        """A model whose first decode fails should fail here, not in somebody's job. On a GPU also as many prompts as
        one graph takes: drivers allocate workspaces at first use, and that must happen while the arena is still empty.

        :raises BadModel: what it computes is not finite.
        """
        token = self._first_token
        if self.observer is not None:
            n_seq = min(-(-self.n_ubatch // (self.n_ctx_seq - 1)), self.config.n_parallel)
            each = [token] * min(self.n_ubatch // n_seq, self.n_ctx_seq - 1)
            self.decode([Rows(seq, each) for seq in range(n_seq)])
            for seq in range(n_seq):
                self.clear(seq)
        if not self.computes(0):
            raise BadModel(
                f"{self.config.model} computes NaN or infinity on {self.device_name}: its weights are damaged, or its"
                " numbers do not fit them",
                path=self.config.model,
            )

    def close(self) -> None:
        """Frees the context, then the model. Safe to call twice and after a failed load."""
        if (chat := self.__dict__.get("chat")) is not None:
            chat.close()
        self.schemas.close()
        if self._context:
            llama_cpp.llama_free(self._context)
            self._context = None
        if self._model:
            llama_cpp.llama_model_free(self._model)
            self._model = None
        if hasattr(self, "_file"):
            self._file.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- text [any thread] --------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``. ``add_special`` adds BOS/EOS where the model wants them; ``parse_special`` reads
        control tokens written out in the text."""
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        while True:
            tokens = (llama_cpp.llama_token * room)()
            n = llama_cpp.llama_tokenize(self._vocab, data, len(data), tokens, room, add_special, parse_special)
            if n >= 0:
                return list(tokens[:n])
            room = -n

    def control_token(self, text: str) -> str | None:
        """The first control token, such as ``<|im_end|>``, that is written out in ``text``."""
        found = self._control_tokens.search(text)
        return found and found[0]

    def least_tokens(self, text: str) -> int:
        """A lower bound on the length of :meth:`tokenize`; 0 for a text that is tokenised quickly."""
        if len(text) < LONG_TEXT_CHARS or self._least_tokens is None:
            return 0
        return self._least_tokens.of(text.encode("utf-8", "replace"))

    @functools.cached_property
    def _least_tokens(self) -> LeastTokens | None:
        """``None`` for kinds of vocabulary that change or drop parts of a text."""
        name = ctypes.create_string_buffer(16)
        llama_cpp.llama_model_meta_val_str(self._model, b"tokenizer.ggml.model", name, len(name))
        if name.value not in (b"llama", b"gpt2"):
            return None
        stripping = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP | llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP
        tokens = range(self.n_vocab)
        strips = any(llama_cpp.llama_vocab_get_attr(self._vocab, token) & stripping for token in tokens)
        pieces = (self._piece(token, special=True) for token in tokens)
        return LeastTokens(pieces, strips=strips, escapes=name.value == b"llama")

    def chat_tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of :meth:`chat_text`, but of control tokens written out in a message those of the characters that
        they are: whoever is quoted there cannot end the message and speak for another. Raises like
        :meth:`chat_text`."""
        parts, add_special = self.chat_parts(messages)
        return self.tokenize_parts(parts, add_special=add_special, parse_special=True)

    def chat_parts(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[str], bool]:
        """:meth:`chat_text` for :meth:`tokenize_parts`, cut in the middle of control tokens written out in messages.
        Raises like :meth:`chat_text`."""
        cut = secrets.token_hex(16)

        def apart(found: re.Match[str]) -> str:
            return cut + cut.join(found[0]) + cut

        text, add_special = self.chat_text(
            [{**message, "content": self._control_tokens.sub(apart, message["content"])} for message in messages]
        )
        return text.split(cut), add_special

    def tokenize_parts(self, parts: Sequence[str], *, add_special: bool, parse_special: bool) -> list[int]:
        """The tokens of a text whose ``parts`` have no token in common; otherwise like :meth:`tokenize`."""
        tokens: list[int] = []
        for i, part in enumerate(parts):
            tokens += self.tokenize(part, add_special=add_special and i == 0, parse_special=parse_special)
        return tokens

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, bool]:
        """The prompt that the model's chat template makes of ``messages``, and whether BOS has still to be added.

        :raises Unsupported: the model has no usable chat template.
        :raises BadArgument: the template refuses the messages.
        """
        if self.chat is None:
            raise Unsupported(f"no chat with this model: {self._no_chat}; ask for a completion instead")
        prompt = self.chat.render(messages)
        return prompt, not (self._bos and prompt.startswith(self._bos))

    def piece(self, token: int) -> bytes:
        """The bytes that ``token`` adds to a text; control tokens add none. May end inside a code point."""
        return self._piece(token, special=False)

    def _piece(self, token: int, *, special: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            room = -n

    def is_end(self, token: int) -> bool:
        """The model ends its answer with this token."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    # --- decoding -------------------------------------------------------------------------------------------------

    def length(self, seq: int) -> int:
        """Tokens that sequence ``seq`` holds."""
        return self._lengths[seq]

    @property
    def speculates(self) -> bool:
        """Speculative decoding may pay. In stream-only mode the number of drafted tokens must follow from the text
        alone, and each token of a mixture of experts would copy experts of its own."""
        return self.can_speculate and (self.mode == "planned" or not self.model_info.n_expert_used)

    def verify_seconds(self, n_seq: int, n_each: int) -> float:
        """Predicted time of a decode of ``n_each`` tokens of each of ``n_seq`` sequences; in stream-only mode as a
        multiple of one token's, the same at any budget."""
        assert self.plan is not None
        if self.plan.mode == "stream_only":
            return 1.0 + _VERIFY_COST * (n_each - 1)
        return self.plan.predicted_decode_s(n_seq, n_each)

    @property
    def rebuild_seconds(self) -> float:
        """What a decode takes longer when it is of another shape than the one before, where that is for a plan to
        weigh."""
        return 0.0 if self.mode == "stream_only" else _REBUILD_S * self.model_info.n_layer

    def trim(self, seq: int, length: int) -> int:
        """Cuts sequence ``seq`` to its first ``length`` tokens and returns how many it has then: ``length``, or 0 where
        the model's memory cannot be cut (recurrent states)."""
        if length >= self._lengths[seq]:
            return self._lengths[seq]
        if length <= 0 or not llama_cpp.llama_memory_seq_rm(self._memory, seq, length, -1):
            llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
            length = 0
        self._lengths[seq] = length
        self._forget(seq)
        return length

    def clear(self, seq: int) -> None:
        """Empties sequence ``seq``."""
        llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
        self._lengths[seq] = 0
        self._forget(seq)

    def expect(self, seq: int, length: int) -> None:
        """Sequence ``seq`` will soon hold so many tokens: takes room for all of them at once, and plans for what is
        left of the budget.

        :raises OutOfMemory: neither VRAM nor the host has room.
        """
        if self.device is None or length <= self._expected[seq]:
            return
        self._expected[seq] = -(-length // KV_PAGE) * KV_PAGE
        self.device.use_kv(seq, self._expected[seq])
        self._replan_for_context()

    def _forget(self, seq: int) -> None:
        expected = -(-self._lengths[seq] // KV_PAGE) * KV_PAGE
        if self.device is not None and expected < self._expected[seq]:
            self._expected[seq] = expected
            self.device.use_kv(seq, expected)
            self.unfilled = self._cut = True

    def _replan_for_context(self) -> None:
        """A plan takes tens of milliseconds: a little more or less context does with the one there is."""
        assert self.device is not None
        stats = self.device.stats()
        changed = abs(stats.kv_bytes + stats.kv_host_bytes - self._kv_planned)
        # A ring that gave way has no room for the experts that it kept.
        gave_way = stats.ring_bytes < self._ring_planned
        if self.plan is not None and (gave_way or changed * REPLAN_SHARE > stats.budget_bytes):
            try:
                self.replan()
            except BudgetBelowFloor as error:  # the driver took more meanwhile: the plan there is still does
                logger.warning("%s", error)

    def decode(self, batch: Sequence[Rows]) -> list[int]:
        """Runs one batch of at most ``n_ubatch`` tokens; returns the rows for :meth:`logits` in the order of the batch.

        Rows of several sequences must come in ascending order of ``seq``: adjacent ones are computed together.

        :raises DecodeAborted: :meth:`abort` was called.
        :raises ContextOverflow: a sequence is full; nothing was changed.
        :raises FrameshardError: the device or llama.cpp failed. The runtime must not be used any more.
        """
        n, outputs = 0, []
        for rows in batch:
            count = len(rows.tokens)
            start = self._lengths[rows.seq]
            if start + count > self.n_ctx_seq:
                raise ContextOverflow("the context is full", n_prompt=start + count, n_ctx=self.n_ctx_seq)
            end = n + count
            if end > self.n_ubatch:
                raise BadArgument(f"a batch has at most {self.n_ubatch} tokens")
            self.expect(rows.seq, start + count)
            self._tokens[n:end] = rows.tokens
            self._positions[n:end] = np.arange(start, start + count)
            self._seqs[n:end] = rows.seq
            self._wanted[n:end] = rows.logits == "all"
            if rows.logits == "last" and count:
                self._wanted[end - 1] = 1
            outputs += [int(row) + n for row in np.flatnonzero(self._wanted[n:end])]
            n = end
        if not n:
            raise BadArgument("an empty batch")
        if int(self._tokens[:n].min()) < 0 or int(self._tokens[:n].max()) >= self.n_vocab:
            raise BadArgument(f"token ids must be from 0 to {self.n_vocab - 1}")
        if len(outputs) > self.n_outputs_max:  # llama.cpp ends the process here
            raise BadArgument(f"a batch has at most {self.n_outputs_max} rows of logits")
        self._batch.n_tokens = n
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code == 0:
            # Only now is it known where the cells of a sequence that was cut lie, and so which can be given up.
            self.unfilled, self._cut = self.unfilled or self._cut, False
            for rows in batch:
                self._lengths[rows.seq] += len(rows.tokens)
            self.follow_driver()
            return outputs
        if code == 1:
            raise ContextOverflow("no room in the key-value cache", n_ctx=self.n_ctx_seq)
        if code == 2:
            for rows in batch:
                # llama.cpp removed some of it or none; a recurrent state is lost either way
                before, self._lengths[rows.seq] = self._lengths[rows.seq], self.n_ctx_seq
                self.trim(rows.seq, before)
            raise DecodeAborted
        if code == -2:
            raise OutOfMemory(f"memory for a decode was refused: {_last_errors()}")
        raise FrameshardError(f"llama_decode failed with {code}: {_last_errors()}")

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of a row of the last decode, shape [n_vocab]; a view that the next decode overwrites."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,))

    def is_finite(self, row: int) -> bool:
        """A row of the last decode has a largest logit that is a number; NaN anywhere in it spoils that."""
        return bool(np.isfinite(self.logits(row).max()))

    def computes(self, seq: int) -> bool:
        """One token alone, in the empty sequence ``seq`` that is empty again after it, gives finite logits. The model
        did that when it was loaded: if not, the device does not compute any more. Overwrites all rows.

        :raises DecodeAborted: :meth:`abort` was called.
        """
        (row,) = self.decode([Rows(seq, [self._first_token])])
        finite = self.is_finite(row)
        self.clear(seq)
        return finite

    @property
    def _first_token(self) -> int:
        return max(0, int(llama_cpp.llama_vocab_bos(self._vocab)))

    def decode_tokens(self, seq: int, tokens: Sequence[int], logits: str = "last") -> npt.NDArray[np.float32]:
        """Appends ``tokens`` to sequence ``seq`` in chunks of ``n_ubatch``; returns the logits asked for, [n, n_vocab].

        "all" needs a configuration with ``n_outputs_max`` of ``n_ubatch``. Raises like :meth:`decode`.
        """
        out = []
        self.expect(seq, min(self._lengths[seq] + len(tokens), self.n_ctx_seq))
        for at in range(0, len(tokens), self.n_ubatch):
            chunk = tokens[at : at + self.n_ubatch]
            last = at + len(chunk) == len(tokens)
            want = logits if logits != "last" or last else "none"
            out += [self.logits(row).copy() for row in self.decode([Rows(seq, chunk, want)])]
        return np.stack(out) if out else np.empty((0, self.n_vocab), np.float32)

    @property
    def context(self) -> Any:
        """llama.cpp's context, for a sampler."""
        return self._context

    @property
    def vocab(self) -> Any:
        """llama.cpp's vocabulary, for a sampler."""
        return self._vocab

    @property
    def model(self) -> Any:
        """llama.cpp's model, for a vision tower."""
        return self._model

    @property
    def aborted(self) -> bool:
        """[any thread] :meth:`abort` is in force."""
        return self._abort

    def advance(self, seq: int, positions: int) -> None:
        """Sequence ``seq`` has grown by ``positions`` in the context, by a decode that was not made here."""
        self._lengths[seq] += positions

    def check_file(self) -> None:
        """:raises BadModel: the model file was changed in place since it was loaded; its mapping cannot be trusted."""
        if _state(os.fstat(self._file.fileno())) != self._file_state:
            raise BadModel(f"{self.config.model} was changed while it was in use")

    # --- abort and progress ---------------------------------------------------------------------------------------

    def abort(self) -> None:
        """[any thread] The running decode, or else the next, ends with :class:`DecodeAborted`, until :meth:`resume`."""
        self._abort = True
        if self.device is not None:
            self.device.set_abort(True)

    def resume(self) -> None:
        """[any thread] Takes :meth:`abort` back."""
        if self._abort:
            self._abort = False
            if self.device is not None:
                self.device.set_abort(False)

    @property
    def progress(self) -> int:
        """[any thread] A number that changes while a decode gets on. If it stands still in a decode, that is stuck."""
        return self._nodes + (0 if self.device is None else self.device.stats().steps)

    def _on_node(self, _data: object) -> bool:
        return self.on_node()

    def on_node(self) -> bool:
        """For callbacks of computations on the CPU: counts progress, and is true when :meth:`abort` is in force."""
        self._nodes += 1
        return self._abort

    # --- budget ---------------------------------------------------------------------------------------------------

    @property
    def budget_bytes(self) -> int:
        """[any thread] The VRAM budget in force; 0 for no limit."""
        return 0 if self.device is None else _limit(self.device.stats().budget_bytes)

    def placement(self) -> dict[str, str]:
        """[any thread] What decoding does with each shard right now: by kind one letter a layer, R resident,
        S streamed, C on the CPU, and a point where a layer has no shard of that kind."""
        assert self.device is not None
        assert self.plan is not None
        resident, others = self.device.stats().resident_shards, self.plan.tiers[0].placements
        letters = {
            (shard.kind, shard.layer or 0): "R" if i < resident else "C" if others[i] == CPU else "S"
            for i, shard in enumerate(self.ladder)
        }
        lengths: dict[str, int] = {}
        for kind, layer in letters:
            lengths[kind] = max(lengths.get(kind, 0), layer + 1)
        return {kind: "".join(letters.get((kind, i), ".") for i in range(n)) for kind, n in lengths.items()}

    def _recall(self, kept: dict[str, list[int]]) -> None:
        """Tells the device what experts were chosen in the last run, and nothing else: nobody will ask for what the
        warm-up's one word has chosen over and over."""
        assert self.device is not None
        for i, shard in enumerate(self.ladder):
            if shard.kind == "experts":
                self.device.set_expert_uses(i, kept.get(shard.name, []))

    def learn(self) -> bool:
        """Looks at what experts were chosen of late, and keeps that for the next run if it is much unlike what the plan
        in force was made for; then a new plan is due. Between decodes."""
        if self.device is None or not self.model_info.n_expert:
            return False
        seen = {
            shard.name: self.device.expert_uses(i, self.model_info.n_expert)
            for i, shard in enumerate(self.ladder)
            if shard.kind == "experts"
        }
        now = routing.shares(seen.values())
        if not now or routing.differ(now, self.routing) < _ROUTING_CHANGED:
            return False
        self.routing = now
        routing.save(self.model_info, {name: counts for name, counts in seen.items() if counts})
        return True

    def replan(self) -> None:
        """Makes the plan for the budget in force and gives it to the device. To be called between decodes after the
        budget changed; the device keeps within its budget before that too, by the old plan."""
        assert self.device is not None
        assert self.profile is not None
        while True:
            stats = self.device.stats()
            self._kv_planned = stats.kv_bytes + stats.kv_host_bytes
            n_ctx_used = max(512, *self._lengths)
            try:
                self.adopt(self.plan_for(_limit(stats.budget_bytes), n_ctx_used, gpu_busy_s=self.gpu_busy_s))
                return
            except BudgetBelowFloor:
                if self.device.stats().budget_generation == stats.budget_generation:
                    raise

    def adopt(self, plan: Plan) -> None:
        """Gives a plan to the device. Between decodes."""
        assert self.device is not None
        self.plan = plan
        tiers = [(tier.min_tokens, tier.placements) for tier in plan.tiers]
        self.device.set_plan(tiers, plan.ring_bytes, plan.expert_stream_share, exact=self.mode == "stream_only")
        self._ring_planned = self.device.stats().ring_bytes

    def plan_for(self, budget_bytes: int, n_ctx_used: int, n_parallel: int = 0, *, gpu_busy_s: float = 0.0) -> Plan:
        """[any thread] The plan for a budget when each token sees ``n_ctx_used`` others, and the context is what it is
        now, or that of ``n_parallel`` sequences as long if that is more; changes nothing.

        :raises BudgetBelowFloor: the budget is below the floor.
        """
        assert self.device is not None
        assert self.profile is not None
        stats, model = self.device.stats(), self.model_info
        layout = lay_out(model, self.device_name)
        fixed = stats.overhead_bytes + stats.buffers_bytes - stats.kv_bytes + stats.core_bytes + stats.scratch_bytes
        used = stats.kv_bytes + stats.kv_host_bytes
        if n_parallel:
            kv_type = self.config.kv_type
            held = estimate_context(model, self.device_name, self.n_ctx_seq, n_ctx_used, n_parallel, kv_type=kv_type)
            used = max(used, held.used)
        context = Context(
            used=used,
            whole=stats.full_bytes - fixed - layout.arena_bytes,
            window=stats.floor_bytes - fixed - layout.least_bytes,
            kv_type=self.config.kv_type,
        )
        return make_plan(
            model,
            self.profile,
            budget_bytes=budget_bytes,
            fixed_bytes=fixed,
            context=context,
            mode=self.mode,
            n_ctx_used=n_ctx_used,
            n_ubatch=self.n_ubatch,
            gpu_busy_s=gpu_busy_s,
            routing=self.routing,
            layout=layout,
        )

    def what_if(self, budget: int, n_prompt: int) -> dict[str, object]:
        """[any thread] Whether a budget fits, what would be where, and predicted times; changes nothing."""
        assert self.device is not None
        assert self.profile is not None
        row: dict[str, object] = {
            "vram_budget_bytes": budget,
            "fits": False,
            "ttft_s": None,
            "tokens_per_second": None,
        }
        sizes = {"resident_bytes": 0, "streamed_bytes": 0, "cpu_bytes": 0}
        with contextlib.suppress(BudgetBelowFloor):
            plan = self.plan_for(budget, min(n_prompt, self.n_ctx_seq), 1)
            row.update(fits=True, ttft_s=plan.predicted_ttft(n_prompt), tokens_per_second=plan.predicted_decode_tps())
            sizes = {name: getattr(plan.tiers[0], name) for name in sizes}
        return {**row, **sizes}

    def measure_overhead(self) -> None:
        """[any thread] Tells the device how much more the driver counts for this process than the device's ledger
        explains. Only while the ledger stands still: the driver's figure may be late by seconds.

        :raises BudgetBelowFloor: what the driver holds leaves less than the floor.
        """
        used = self.observer.used() if self.observer is not None else None
        if used is not None and self.device is not None:
            stats = self.device.stats()
            self.device.set_overhead(max(0, used - (stats.used_bytes - stats.overhead_bytes)) + DRIVER_MARGIN)
            self._meter.clear()

    def follow_driver(self) -> None:
        """Counts what the driver has taken since :meth:`measure_overhead`, while work goes on. To be called between
        decodes; takes 0.05 ms. Weights make room for it at once, so that the driver's margin is whole again."""
        if self.observer is None or self.device is None:
            return
        before = self.device.stats()
        observed = self.observer.used()
        after = self.device.stats()
        if observed is None or after.used_bytes != before.used_bytes:
            return
        ledger = after.used_bytes - after.overhead_bytes
        overhead = self._meter.look(time.monotonic(), observed, ledger, after.overhead_bytes)
        if overhead is None:
            return
        logger.info("the driver holds %d MiB now", (overhead - DRIVER_MARGIN) >> 20)
        self._meter.clear()
        try:
            self.device.set_overhead(overhead)
        except BudgetBelowFloor as error:
            logger.warning("%s", error)

    def fill(self, max_bytes: int = 2**63) -> int:
        """Copies up to about ``max_bytes`` of weights into free budget; returns the bytes copied, 0 when there is no
        more to do, also because another program holds memory that the budget allows."""
        if self.device is None:
            return 0
        try:
            self.unfilled = False
            filled = self.device.fill(max_bytes)
            self._replan_for_context()
            return filled
        except OutOfMemory as error:
            logger.warning("fewer weights are resident than the budget allows: %s", error)
            return 0


def resolve_device(name: str) -> str:
    """The device that ``name`` stands for: ``auto`` is the first GPU, else the CPU, and says which on the log."""
    if name != "auto":
        return name
    from frameshard.native import gpu_devices

    found = gpu_devices()
    name = found[0] if found else "cpu"
    logger.warning("device auto: using %s", name)
    return name


def _limit(budget_bytes: int) -> int:
    """The device's "no limit" is a number beyond any memory; everywhere else it is 0."""
    return budget_bytes if budget_bytes < 2**53 else 0


def _state(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


# --- llama.cpp's log ----------------------------------------------------------------------------------------------

_LEVELS = {3: logging.WARNING, 4: logging.ERROR}  # ggml_log_level
_OF_ABORTS = (  # llama.cpp reports an abort as if it were an error
    "failed with error 1",
    "compute status: 1",
    "removing memory module entries",
    "failed to decode, ret = 2",
)
_errors: collections.deque[str] = collections.deque(maxlen=3)


def _on_log(level: int, text: bytes, _data: object) -> None:
    if level in _LEVELS:
        line = text.decode("utf-8", "replace").strip()
        if any(part in line for part in _OF_ABORTS):
            return
        _llama_logger.log(_LEVELS[level], "%s", line)
        if level == 4:
            _errors.append(line)


_log_callback = llama_cpp.llama_log_callback(_on_log)  # llama.cpp keeps the pointer for the life of the process


def install_log() -> None:
    """What llama.cpp logs goes to Python's log from now on, warnings and errors only."""
    _errors.clear()
    llama_cpp.llama_log_set(_log_callback, None)


def _last_errors() -> str:
    return "; ".join(_errors) or "no reason given"
