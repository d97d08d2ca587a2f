"""Images for the language model: libmtmd's vision tower on the shard device.

The tower's weights are in host memory and are streamed while an image is encoded. It uses VRAM of the language model's
budget for that time alone. On the CPU the tower is stock libmtmd. Embeddings are kept in host memory, so that the same
image in another prompt costs its prefill alone. A :class:`Vision` belongs to the thread of its
:class:`~frameshard.engine.runtime.Runtime`, except for what says [any thread].
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import io
import logging
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from frameshard import models
from frameshard.engine.llama import DecodeAborted
from frameshard.engine.runtime import STOCK, Runtime
from frameshard.errors import (
    BadArgument,
    BadModel,
    BudgetBelowFloor,
    ContextOverflow,
    FrameshardError,
    Unsupported,
)
from frameshard.native import LLAMA_CPP_PYTHON
from frameshard.plan.tower import read_tower
from frameshard.wire import messages as m

try:
    from llama_cpp import mtmd_cpp as mtmd
except (OSError, RuntimeError):  # llama.cpp was built without libmtmd, or lies elsewhere; text needs none
    mtmd = None

_logger = logging.getLogger("frameshard.mtmd")
_errors: collections.deque[str] = collections.deque(maxlen=3)
VISION_DEVICE = "FRAMESHARD_VISION"
MAX_PIXELS = 16 << 20
"""A larger picture is refused: no tower sees more than a part of that."""

CACHE_BYTES = 256 << 20
"""Of encoded images."""

TRY_SIDE = 64
"""Pixels of the image that a new tower is tried with; towers for one size scale it up."""

NODES_A_LOOK = 16
"""On the CPU, between two looks at an abort."""

_FORMATS = ("PNG", "JPEG")
_CHANNELS = {"rgb": 3, "rgba": 4}


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

    @classmethod
    def read(cls, image: m.Image) -> Image:
        """[any thread] The pixels of an image of a request. Alpha is dropped.

        :raises BadArgument: it cannot be read, is no PNG or JPEG, is cut off or too large.
        :raises Unsupported: an encoded image, and Pillow is not installed.
        """
        data = _read(image.path, image.size) if image.path else image.data
        if image.format == "encoded":
            return _decode(data)
        width, height, channels = image.width, image.height, _CHANNELS[image.format]
        row = width * channels
        stride = image.stride or row
        if width * height > MAX_PIXELS:
            raise BadArgument(f"an image has at most {MAX_PIXELS} pixels", field="images")
        if len(data) < stride * (height - 1) + row:
            raise BadArgument("an image's pixels do not match its size", field="images")
        rows = np.lib.stride_tricks.as_strided(
            np.frombuffer(data, np.uint8), (height, row), (stride, 1), writeable=False
        )
        return cls(width, height, rows.reshape(height, width, channels)[:, :, :3].tobytes())


def _read(path: str, size: int) -> bytes:
    """A copy of the bytes at ``path``: their owner may change them between the check and the use."""
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read(size)
    except OSError as error:
        raise BadArgument(f"an image cannot be read: {error.strerror}", field="images") from None
    if data is None or len(data) != size:
        raise BadArgument("an image is cut off", field="images")
    return data


def _decode(data: bytes) -> Image:
    try:
        from PIL import Image as Pillow
    except ImportError:
        raise Unsupported("PNG and JPEG images need Pillow: pip install 'frameshard[vision]'") from None
    try:
        with Pillow.open(io.BytesIO(data), formats=_FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise BadArgument(f"an image has at most {MAX_PIXELS} pixels", field="images")
            return Image(opened.width, opened.height, opened.convert("RGB").tobytes())
    except FrameshardError:
        raise
    except Exception as error:  # on wrong bytes its decoders raise of everything
        raise BadArgument(f"an image is no PNG or JPEG, or cut off: {error}", field="images") from None


class Picture:
    """An image, or a tile of one, in a prompt: ``n_tokens`` of the context, which move the text on by ``n_pos``."""

    def __init__(self, chunk: Any, digest: bytes) -> None:
        """Takes over ``chunk``."""
        self.chunk = chunk
        weakref.finalize(self, mtmd.mtmd_input_chunk_free, chunk)
        self.digest = digest
        self.n_tokens = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        self.n_pos = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
        self.embedding: npt.NDArray[np.float32] | None = None
        """Set by :meth:`Vision.encode`."""
        words = np.frombuffer(hashlib.shake_128(digest).digest(4 * self.n_tokens), np.uint32)
        self.ids = [-1 - int(word) for word in words]
        """What stands for its tokens where prompts are compared: negative, and another image's are others."""


class Vision:
    """The vision tower of an mmproj file, for one runtime's model.

    :raises ModelNotFound: no such file.
    :raises BadModel: the file is no vision tower or contradicts itself, libmtmd refuses it, or it does not belong to
        this model.
    :raises Unsupported: there is no libmtmd.
    """

    def __init__(self, runtime: Runtime, mmproj: str) -> None:
        if mtmd is None:
            raise Unsupported(
                "images need libmtmd, which is not beside this llama-cpp-python: install one with it, or name the"
                " library's folder in MTMD_CPP_LIB"
            )
        read_tower(mmproj)
        mtmd.mtmd_helper_log_set(_log_callback, None)
        _errors.clear()
        self._runtime = runtime
        self._marker = f"<image-{secrets.token_hex(8)}>"
        self._marker_bytes = self._marker.encode()
        self._asked = 0
        self.name = os.path.basename(mmproj)
        self._path = mmproj
        self._cache: collections.OrderedDict[bytes, npt.NDArray[np.float32]] = collections.OrderedDict()
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
        if runtime.device is None:
            self._eval_callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
            params.cb_eval = self._eval_callback
        self._context: Any = mtmd.mtmd_init_from_file(os.fsencode(mmproj), runtime.llama.model, params)
        if not self._context or not mtmd.mtmd_support_vision(self._context):
            self.close()
            raise BadModel(f"libmtmd refuses {mmproj} for this model: {'; '.join(_errors)}", path=mmproj)

    def _on_node(self, _tensor: object, ask: bool, _data: object) -> bool:
        """The scheduler asks of each node whether the caller wants to see it, and shows it when all up to it are
        computed; a "no" then ends the graph. So an encode on the CPU can be stopped, and shows that it moves."""
        if ask:
            self._asked += 1
            return self._asked % NODES_A_LOOK == 0
        return not self._runtime.on_node()

    @property
    def marker(self) -> str:
        """Stands for an image in a prompt. It is random, so that no prompt can contain it."""
        return self._marker

    def tokenize(self, prompt: str, images: Sequence[Image], *, add_special: bool) -> list[list[int] | Picture]:
        """[any thread] The parts of ``prompt``: text and pictures. Each :attr:`marker` stands for one of
        ``images``; control tokens written out in the text are read.

        :raises BadArgument: libmtmd cannot use an image.
        """
        digests = [image.digest for image in images]
        bitmaps = [mtmd.mtmd_bitmap_init(i.width, i.height, _bytes(i.pixels)) for i in images]
        for digest, bitmap in zip(digests, bitmaps, strict=True):
            mtmd.mtmd_bitmap_set_id(bitmap, digest.hex().encode())
        chunks = mtmd.mtmd_input_chunks_init()
        parts: list[list[int] | Picture] = []
        tiles: collections.Counter[bytes] = collections.Counter()
        try:
            data = prompt.encode("utf-8", "replace")
            text = mtmd.mtmd_input_text(data, len(data), add_special, True)
            array = (ctypes.c_void_p * max(1, len(bitmaps)))(*bitmaps)
            if mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), array, len(bitmaps)) != 0:
                raise BadArgument("the model's vision tower cannot use these images", field="images")
            for i in range(mtmd.mtmd_input_chunks_size(chunks)):
                chunk = mtmd.mtmd_input_chunks_get(chunks, i)
                if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    parts.append(_tokens(chunk))
                    continue
                # An image may be cut into tiles, in an order that depends on its size alone.
                image = mtmd.mtmd_input_chunk_get_id(chunk)
                digest = hashlib.sha256(image + tiles[image].to_bytes(4, "little")).digest()
                tiles[image] += 1
                parts.append(Picture(mtmd.mtmd_input_chunk_copy(chunk), digest))
            return parts
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            for bitmap in bitmaps:
                mtmd.mtmd_bitmap_free(bitmap)

    def try_out(self) -> None:
        """Encodes a small image, so that a tower that fails does so here and not in somebody's job. A file that passed
        is not tried again on the same device until it changes.

        :raises BadModel: what it computes is not finite. Where libmtmd aborts, the process ends.
        """
        passed = models.verdict("tower", [Path(self._path)], LLAMA_CPP_PYTHON, self._runtime.device_name)
        if passed.exists():
            return
        _logger.warning("trying %s with one image; that is done once for a file", self.name)
        grey = Image(TRY_SIDE, TRY_SIDE, bytes(range(256)) * (3 * TRY_SIDE * TRY_SIDE // 256))
        try:
            for part in self.tokenize(self._marker, [grey], add_special=False):
                if isinstance(part, Picture) and not np.isfinite(self._encode(part)).all():
                    raise BadModel(
                        f"{self._path} computes NaN or infinity from an image: its weights are damaged, or its numbers"
                        " do not fit them",
                        path=self._path,
                    )
        except BudgetBelowFloor as error:  # a larger budget may come, and jobs with images are refused until then
            _logger.warning("the vision tower is not tried: %s", error)
            return
        models.pass_verdict(passed)

    def encode(self, picture: Picture) -> None:
        """Sets ``picture.embedding``, from the cache when the same image was encoded lately.

        :raises DecodeAborted: the runtime was aborted.
        :raises BudgetBelowFloor: the budget has no room for an image of this size; detail has what it needs.
        """
        known = self._cache.pop(picture.digest, None)
        picture.embedding = self._encode(picture) if known is None else known
        self._cache[picture.digest] = picture.embedding
        while sum(each.nbytes for each in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)

    def _encode(self, picture: Picture) -> npt.NDArray[np.float32]:
        device = self._runtime.device
        while True:
            generation = device.stats().budget_generation if device else 0
            code = mtmd.mtmd_encode_chunk(self._context, picture.chunk)
            if self._runtime.placement is not None:
                self._runtime.placement.overhead.follow()
            if self._runtime.aborted:
                raise DecodeAborted
            if code == 0:
                break
            if device is None:
                raise FrameshardError("the vision tower failed")
            stats = device.stats()
            if stats.budget_generation == generation:  # else a smaller budget ended the encode: begin again within it
                raise BudgetBelowFloor(
                    f"an image of this size needs a VRAM budget of {-(-stats.image_floor_bytes >> 20)} MiB:"
                    " raise it or send a smaller one",
                    budget_bytes=stats.budget_bytes,
                    floor_bytes=stats.image_floor_bytes,
                )
        n_embd = int(llama_cpp.llama_model_n_embd_inp(self._runtime.llama.model))
        return np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._context), (picture.n_tokens, n_embd)).copy()

    def decode(self, seq: int, picture: Picture) -> None:
        """Reads an encoded picture to the end of sequence ``seq``.

        :raises DecodeAborted: the runtime was aborted; the sequence is as it was, or empty as after ``Runtime.decode``.
        :raises ContextOverflow: it does not fit; the sequence likewise.
        """
        assert picture.embedding is not None
        runtime, past = self._runtime, self._runtime.length(seq)
        end = llama_cpp.llama_pos(0)
        pointer = picture.embedding.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        code = mtmd.mtmd_helper_decode_image_chunk(
            self._context,
            runtime.llama.context,
            picture.chunk,
            pointer,
            past,
            seq,
            runtime.n_ubatch,
            ctypes.byref(end),
            ctypes.cast(0, mtmd.mtmd_helper_post_decode_callback),
            None,
        )
        runtime.advance(seq, picture.n_pos)
        if runtime.placement is not None:
            runtime.placement.overhead.follow()
        if code == 0:
            return
        runtime.trim(seq, past)  # of what was decoded
        if code == 2:
            raise DecodeAborted
        if code == 1:
            raise ContextOverflow("no room in the key-value cache", n_ctx=runtime.n_ctx_seq)
        raise FrameshardError(f"decoding an image failed with {code}")

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
        line = text.decode("utf-8", "replace").strip()
        _logger.log(logging.ERROR if level == 4 else logging.WARNING, "%s", line)
        if level == 4:
            _errors.append(line)


_log_callback = llama_cpp.llama_log_callback(_on_log)  # libmtmd keeps the pointer for the life of the process
