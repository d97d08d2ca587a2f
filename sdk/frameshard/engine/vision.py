"""Images for the language model: libmtmd's vision tower on the shard device.

The tower's weights lie in host memory and are streamed while an image is encoded; VRAM for it is borrowed from the
language model's budget for that time alone. On the CPU the tower is stock libmtmd. A :class:`Vision` belongs to the
thread of its :class:`~frameshard.engine.runtime.Runtime`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import mtmd_cpp as mtmd

from frameshard.engine.runtime import STOCK, DecodeAborted, Rows, Runtime
from frameshard.errors import BadArgument, BadModel, BudgetBelowFloor, ContextOverflow, FrameshardError

_logger = logging.getLogger("frameshard.mtmd")
VISION_DEVICE = "FRAMESHARD_VISION"
MAX_PIXELS = 16 << 20
"""A larger picture is refused: no tower sees more than a part of that."""


@dataclass(frozen=True)
class Image:
    """RGB pixels, 8 bits each, row by row. ``digest`` names them in caches."""

    width: int
    height: int
    pixels: bytes

    def __post_init__(self) -> None:
        if not 0 < self.width * self.height <= MAX_PIXELS or self.width < 1:
            raise BadArgument(f"an image has 1 to {MAX_PIXELS} pixels", field="images")
        if len(self.pixels) != 3 * self.width * self.height:
            raise BadArgument("an image's pixels do not match its size", field="images")

    @property
    def digest(self) -> bytes:
        """A hash of size and pixels."""
        size = self.width.to_bytes(4, "little") + self.height.to_bytes(4, "little")
        return hashlib.sha256(size + self.pixels).digest()


class Vision:
    """The vision tower of an mmproj file, for one runtime's model.

    :raises BadModel: libmtmd refuses the file, or it does not belong to this model.
    """

    def __init__(self, runtime: Runtime, mmproj: str) -> None:
        mtmd.mtmd_helper_log_set(_log_callback, None)
        self._runtime = runtime
        self._marker = f"<image-{secrets.token_hex(8)}>"
        self._marker_bytes = self._marker.encode()
        params = mtmd.mtmd_context_params_default()
        params.media_marker = self._marker_bytes
        params.print_timings = False
        params.warmup = False  # it would take VRAM before there is an image
        params.n_threads = runtime.n_threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.use_gpu = runtime.device_name != "cpu"
        if params.use_gpu:
            from frameshard.native import device_handle

            stock = runtime.device_name.removeprefix(STOCK)
            params.device = device_handle(stock if stock != runtime.device_name else VISION_DEVICE)
        self._context: Any = mtmd.mtmd_init_from_file(os.fsencode(mmproj), runtime.model, params)
        if not self._context or not mtmd.mtmd_support_vision(self._context):
            self.close()
            raise BadModel(f"libmtmd refuses {mmproj} for this model")

    @property
    def marker(self) -> str:
        """Stands for an image in a prompt. Nobody who writes a prompt can guess it."""
        return self._marker

    def read(self, seq: int, prompt: str, images: Sequence[Image], *, add_special: bool) -> int:
        """Decodes ``prompt``, each :attr:`marker` in it standing for one of ``images``, to the end of sequence ``seq``;
        returns the row of its last logits.

        :raises BadArgument: the prompt does not end in text, or libmtmd cannot use an image.
        :raises ContextOverflow: text and images do not fit the sequence.
        :raises DecodeAborted: the runtime was aborted; the sequence is as it was.
        :raises BudgetBelowFloor: the budget has no room for an image of this size; the sequence is as it was.
        """
        runtime = self._runtime
        bitmaps = [mtmd.mtmd_bitmap_init(i.width, i.height, _bytes(i.pixels)) for i in images]
        chunks = mtmd.mtmd_input_chunks_init()
        before, row = runtime.length(seq), -1
        try:
            data = prompt.encode("utf-8", "replace")
            text = mtmd.mtmd_input_text(data, len(data), add_special, True)
            array = (ctypes.c_void_p * max(1, len(bitmaps)))(*bitmaps)
            if mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), array, len(bitmaps)) != 0:
                raise BadArgument("the model's vision tower cannot use these images", field="images")
            found = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(mtmd.mtmd_input_chunks_size(chunks))]
            n = sum(mtmd.mtmd_input_chunk_get_n_tokens(chunk) for chunk in found)
            if before + n > runtime.n_ctx_seq:
                raise ContextOverflow("text and images do not fit", n_prompt=before + n, n_ctx=runtime.n_ctx_seq)
            for chunk in found:
                row = -1
                if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    tokens = _tokens(chunk)
                    for at in range(0, len(tokens), runtime.n_ubatch):
                        row = runtime.decode([Rows(seq, tokens[at : at + runtime.n_ubatch])])[0]
                else:
                    self._decode_image(seq, chunk, self._encode(chunk))
            if row < 0:
                raise BadArgument("a prompt ends in text", field="prompt")
            return row
        except BaseException:
            runtime.trim(seq, before)
            raise
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            for bitmap in bitmaps:
                mtmd.mtmd_bitmap_free(bitmap)

    def _decode_image(self, seq: int, chunk: Any, embedding: npt.NDArray[np.float32]) -> None:
        runtime, past = self._runtime, self._runtime.length(seq)
        end = llama_cpp.llama_pos(0)
        pointer = embedding.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        code = mtmd.mtmd_helper_decode_image_chunk(
            self._context,
            runtime.context,
            chunk,
            pointer,
            past,
            seq,
            runtime.n_ubatch,
            ctypes.byref(end),
            _no_callback,
            None,
        )
        runtime.advance(seq, mtmd.mtmd_input_chunk_get_n_pos(chunk))  # what was decoded of it is trimmed on an error
        if code == 2:
            raise DecodeAborted
        if code != 0:
            raise FrameshardError(f"decoding an image failed with {code}")

    def _encode(self, chunk: Any) -> npt.NDArray[np.float32]:
        device = self._runtime.device
        while True:
            generation = device.stats().budget_generation if device else 0
            if mtmd.mtmd_encode_chunk(self._context, chunk) == 0:
                break
            if self._runtime.aborted:
                raise DecodeAborted
            if device is None:
                raise FrameshardError("the vision tower failed")
            stats = device.stats()
            if stats.budget_generation == generation:  # else a smaller budget ended the encode: begin again within it
                raise BudgetBelowFloor(
                    "the VRAM budget has no room for an image of this size: raise it or send a smaller one",
                    budget_bytes=stats.budget_bytes,
                    floor_bytes=stats.floor_bytes,
                )
        n = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        n_embd = int(llama_cpp.llama_model_n_embd_inp(self._runtime.model))
        return np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._context), (n, n_embd)).copy()

    def close(self) -> None:
        """Frees the tower. Safe to call twice."""
        if self._context:
            mtmd.mtmd_free(self._context)
            self._context = None


def _tokens(chunk: Any) -> list[int]:
    n = ctypes.c_size_t()
    tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
    return [int(tokens[i]) for i in range(n.value)]


def _bytes(pixels: bytes) -> Any:
    return (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels)


def _on_log(level: int, text: bytes, _data: object) -> None:
    if level >= 3 and level <= 4:  # warnings and errors of ggml_log_level
        _logger.log(logging.ERROR if level == 4 else logging.WARNING, "%s", text.decode("utf-8", "replace").strip())


_no_callback = ctypes.cast(0, mtmd.mtmd_helper_post_decode_callback)
_log_callback = llama_cpp.llama_log_callback(_on_log)  # libmtmd keeps the pointer for the life of the process
