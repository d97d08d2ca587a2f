"""Images and sounds for the language model: libmtmd's towers on the shard device.

The tower's weights are in host memory and are streamed while an image is encoded. The tower takes VRAM from the
language model's budget, and only during that time. On the CPU the tower is stock libmtmd. Embeddings are kept in host
memory, so the same image in another prompt is only prefilled, not encoded again. Only the thread of the
:class:`~frameshard.engine.runtime.Runtime` may use its :class:`Vision`, except for methods marked [any thread].
"""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import io
import logging
import os
import secrets
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from frameshard import models, system
from frameshard.engine import llamalog
from frameshard.engine.embeddings import Embedding, Embeddings, copied
from frameshard.engine.llama import DecodeAborted, StepTooLarge
from frameshard.engine.runtime import STOCK, Runtime
from frameshard.engine.sounds import MAX_SECONDS, MIN_SECONDS, Sound, is_sound, tone
from frameshard.engine.tokenizer import with_deep_stack
from frameshard.errors import (
    BadArgument,
    BadModel,
    BudgetBelowFloor,
    ContextOverflow,
    FrameshardError,
    OutOfMemory,
    Unsupported,
    below_floor,
)
from frameshard.native import LLAMA_CPP_PYTHON
from frameshard.plan.tower import read_tower
from frameshard.records import record
from frameshard.wire import messages as m

try:
    from llama_cpp import mtmd_cpp as mtmd
except (OSError, RuntimeError):  # there is no libmtmd beside llama.cpp; text works without it
    mtmd = None

_logger = logging.getLogger("frameshard.mtmd")
_errors: collections.deque[str] = collections.deque(maxlen=3)
VISION_DEVICE = "FRAMESHARD_VISION"
MAX_PIXELS = 16 << 20
"""Larger images are refused: every tower scales images down to far fewer pixels."""

MAX_RATIO = 200
"""The most times that an image may be as wide as high, or as high as wide. Some towers scale thinner ones up, and then
need several GB of host memory."""

TRY_SIDE = 64
"""Width and height in pixels of the image that a new tower is tried with. The tower scales it to its own size."""

NODES_A_LOOK = 16
"""On the CPU, the number of graph nodes between two checks for an abort."""

_ALLOC_FAILED = " error -2"  # the end of libmtmd's message for GGML_STATUS_ALLOC_FAILED
_FORMATS = ("PNG", "JPEG")
_CHANNELS = {"rgb": 3, "rgba": 4}


@record
class Image:
    """An image: RGB, 8 bits per channel, row by row, without padding.

    :raises BadArgument: the size is not allowed, or does not match the pixels.
    """

    width: int
    height: int
    pixels: bytes

    def __post_init__(self) -> None:
        _check_size(self.width, self.height)
        if len(self.pixels) != 3 * self.width * self.height:
            raise BadArgument("an image's pixels do not match its size", field="images")

    @property
    def digest(self) -> bytes:
        """A hash of size and pixels; the key of caches."""
        size = self.width.to_bytes(4, "little") + self.height.to_bytes(4, "little")
        return hashlib.sha256(size + self.pixels).digest()

    @classmethod
    def read(cls, image: m.Image) -> Image | Sound:
        """[any thread] Reads an image of a request, whose alpha channel is dropped, or a sound.

        :raises BadArgument: it cannot be read, is not a PNG, JPEG, WAV or MP3, is cut off or too large.
        :raises Unsupported: it is a PNG or JPEG, and Pillow is not installed.
        """
        data = _read(image.path, image.size) if image.path else image.data
        if image.format == "encoded":
            return Sound.read(data) if is_sound(data) else _decode(data)
        width, height, channels = image.width, image.height, _CHANNELS[image.format]
        row = width * channels
        stride = image.stride or row
        _check_size(width, height)
        if len(data) < stride * (height - 1) + row:
            raise BadArgument("an image's pixels do not match its size", field="images")
        rows = np.lib.stride_tricks.as_strided(
            np.frombuffer(data, np.uint8), (height, row), (stride, 1), writeable=False
        )
        return cls(width, height, rows.reshape(height, width, channels)[:, :, :3].tobytes())


def _check_size(width: int, height: int) -> None:
    if min(width, height) < 1 or width * height > MAX_PIXELS:
        raise BadArgument(f"an image has 1 to {MAX_PIXELS} pixels", field="images")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BadArgument(f"an image is at most {MAX_RATIO} times as wide as high, or as high as wide", field="images")


def _read(path: str, size: int) -> bytes:
    """Copies ``size`` bytes from ``path``. The copy is needed because the client may change the file at any time."""
    try:
        with open(system.open_to_read(path), "rb", buffering=0) as file:
            data = file.read(size)
    except OSError as error:
        raise BadArgument(f"an image cannot be read: {error.strerror}", field="images") from None
    if data is None or len(data) != size:
        raise BadArgument("an image is cut off", field="images")
    return data


def _decode(data: bytes) -> Image:
    try:
        from PIL import Image as Pillow
        from PIL import ImageOps
    except ImportError:
        raise Unsupported("PNG and JPEG images need Pillow: pip install 'frameshard[vision]'") from None
    Pillow.MAX_IMAGE_PIXELS = None  # the limit here is lower
    try:
        with Pillow.open(io.BytesIO(data), formats=_FORMATS) as opened:
            _check_size(opened.width, opened.height)
            upright = ImageOps.exif_transpose(opened)
            if upright.mode.startswith("I"):  # 16 bits; convert() would take all values above 255 as white
                upright = Pillow.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            return Image(upright.width, upright.height, upright.convert("RGB").tobytes())
    except FrameshardError:
        raise
    except Exception:  # Pillow's decoders raise many types of exceptions on damaged files
        raise BadArgument("an image is no PNG or JPEG (or sound), or damaged or cut off", field="images") from None


class Picture:
    """An image in a prompt, one tile of an image, or 30 s of a sound. It takes ``n_tokens`` KV cells and ``n_pos``
    positions."""

    def __init__(self, chunk: Any, digest: bytes) -> None:
        """
        :param chunk: a chunk of libmtmd; it is freed with this object.
        :param digest: the hash that identifies the image or tile.
        """
        self.chunk = chunk
        weakref.finalize(self, mtmd.mtmd_input_chunk_free, chunk)
        self.digest = digest
        self.n_tokens = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        self.n_pos = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
        self.embedding: Embedding | None = None
        """Shape [n_tokens, n_embd]; set by :meth:`Vision.encode`."""
        words = np.frombuffer(hashlib.shake_128(digest).digest(4 * self.n_tokens), np.uint32)
        self.ids = [-1 - int(word) for word in words]
        """Numbers that stand for its tokens when prompts are compared: negative, and different for each image."""


class Vision:
    """The tower of an mmproj file, for one runtime's model. It reads images, sounds, or both.

    :raises ModelNotFound: no such file.
    :raises BadModel: the file is not a tower, contradicts itself, or does not belong to this model; or libmtmd
        refuses it.
    :raises Unsupported: there is no libmtmd.
    """

    def __init__(self, runtime: Runtime, mmproj: str) -> None:
        if mtmd is None:
            raise Unsupported(
                "images need libmtmd, which is not beside this llama-cpp-python: install one with it, or name the"
                " library's folder in MTMD_CPP_LIB"
            )
        if models.locate(mmproj).n_bytes is not None:  # libmtmd opens files by their path only
            raise Unsupported("a vision tower must be a file of its own, not a part of one", path=mmproj)
        tower = read_tower(mmproj)
        mtmd.mtmd_helper_log_set(_log_callback, None)
        _errors.clear()
        self._runtime = runtime
        self._marker = f"<image-{secrets.token_hex(8)}>"
        self._marker_bytes = self._marker.encode()
        self._asked = 0
        self.name = os.path.basename(mmproj)
        self._path = mmproj
        self.embeddings = Embeddings()
        params = mtmd.mtmd_context_params_default()
        params.media_marker = self._marker_bytes
        params.print_timings = False
        params.warmup = False  # a warm-up would take VRAM before there is an image
        params.n_threads = runtime.n_threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.use_gpu = runtime.device_name != "cpu"
        if params.use_gpu:
            from frameshard.ggml import device_handle

            stock = runtime.device_name.removeprefix(STOCK)
            params.device = device_handle(stock if stock != runtime.device_name else VISION_DEVICE)
        if runtime.device is None:
            self._eval_callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
            params.cb_eval = self._eval_callback
        self._context: Any = mtmd.mtmd_init_from_file(os.fsencode(mmproj), runtime.llama.model, params)
        if not self._context:
            self.close()
            raise BadModel(f"libmtmd refuses {mmproj} for this model: {'; '.join(_errors)}", path=mmproj)
        needs_mrope = tower.projector == "hunyuanvl" or runtime.model_info.arch in ("glm4", "glm4moe")
        if needs_mrope and not mtmd.mtmd_decode_use_mrope(self._context):
            self.close()  # llama.cpp would end the process at the first image
            raise BadModel(
                f"{mmproj} needs a model with positions in several dimensions (M-RoPE), which the model's file lacks:"
                " take a newer conversion",
                path=mmproj,
            )
        self.sees = bool(mtmd.mtmd_support_vision(self._context))
        self.hears = bool(mtmd.mtmd_support_audio(self._context))

    def _on_node(self, _tensor: object, ask: bool, _data: object) -> bool:
        """Callback of ggml's scheduler, so that an encode on the CPU can be aborted and counts its progress.

        :param ask: true before the node is computed: the result says whether to call again after it. False after it:
            the result says whether to go on with the graph.
        """
        if ask:
            self._asked += 1
            return self._asked % NODES_A_LOOK == 0
        return not self._runtime.on_node()

    @property
    def marker(self) -> str:
        """The text that stands for an image in a prompt. It is random, so a user's text cannot contain it."""
        return self._marker

    def tokenize(self, prompt: str, images: Sequence[Image | Sound], *, add_special: bool) -> list[list[int] | Picture]:
        """[any thread] Splits ``prompt`` into text tokens and pictures.

        :param prompt: text with one :attr:`marker` for each of ``images``. Control tokens in it are parsed.
        :param add_special: add BOS.
        :raises BadArgument: libmtmd cannot use an image or sound.
        :raises BadModel: the vocabulary lacks tokens that the tower puts around images.
        :raises Unsupported: the tower reads only images, or only sounds.
        """
        chunks = mtmd.mtmd_input_chunks_init()
        parts: list[list[int] | Picture] = []
        tiles: collections.Counter[bytes] = collections.Counter()
        bitmaps: list[Any] = []
        try:
            for i, image in enumerate(images):
                bitmaps.append(self._bitmap(image))
                mtmd.mtmd_bitmap_set_id(bitmaps[-1], f"{i} {image.digest.hex()}".encode())
            data = prompt.encode("utf-8", "replace")
            text = mtmd.mtmd_input_text(data, len(data), add_special, True)
            array = (ctypes.c_void_p * max(1, len(bitmaps)))(*bitmaps)
            given = self._context, chunks, ctypes.byref(text), array, len(bitmaps)
            if with_deep_stack(len(data), functools.partial(mtmd.mtmd_tokenize, *given)) != 0:
                raise BadArgument("the model's vision tower cannot use these images", field="images")
            for i in range(mtmd.mtmd_input_chunks_size(chunks)):
                chunk = mtmd.mtmd_input_chunks_get(chunks, i)
                if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    parts.append(self._tokens(chunk))
                    continue
                # An image may be cut into tiles. Their order depends only on its size, so the index identifies a tile.
                # DeepSeek V4's tower puts up to three tokens in front of an image, as its place in the prompt needs.
                bitmap = mtmd.mtmd_input_chunk_get_id(chunk)
                which = (tiles[bitmap], int(mtmd.mtmd_input_chunk_get_n_tokens(chunk)))
                digest = hashlib.sha256(bitmap.split()[1] + np.array(which, "<u4").tobytes()).digest()
                tiles[bitmap] += 1
                parts.append(Picture(mtmd.mtmd_input_chunk_copy(chunk), digest))
            return parts
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            for bitmap in bitmaps:
                mtmd.mtmd_bitmap_free(bitmap)

    def _tokens(self, chunk: Any) -> list[int]:
        """The tokens of a chunk of text."""
        n = ctypes.c_size_t()
        found = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
        tokens = [int(found[i]) for i in range(n.value)]
        if any(not 0 <= token < self._runtime.n_vocab for token in tokens):  # libmtmd has -1 for a token it misses
            raise BadModel(
                f"{self.name} needs tokens that this model's vocabulary lacks: it is the tower of another model",
                path=self._path,
            )
        return tokens

    def _together(self, picture: Picture) -> bool:
        """Whether each token of the picture sees all others of it, so that one step must decode them."""
        return bool(mtmd.mtmd_decode_use_non_causal(self._context, picture.chunk))

    def check(self, picture: Picture) -> None:
        """[any thread] Checks that the picture can be decoded.

        :raises BadArgument: it has more tokens than a step, and they must be decoded together.
        """
        most = self._runtime.n_ubatch
        if picture.n_tokens > most and self._together(picture):
            raise BadArgument(
                f"an image of this size has {picture.n_tokens} tokens, which this model decodes in one step, and a step"
                f" has at most {most}: launch with n_ubatch={picture.n_tokens} (--ubatch on the command line) or send a"
                " smaller one",
                field="images",
            )

    def _bitmap(self, image: Image | Sound) -> Any:
        if not (self.hears if isinstance(image, Sound) else self.sees):
            raise Unsupported(f"{self.name} reads {'images' if self.sees else 'sounds'} only")
        if isinstance(image, Image):
            return mtmd.mtmd_bitmap_init(image.width, image.height, _bytes(image.pixels))
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(self._context, _bytes(image.data), len(image.data), False)
        if not bitmap:
            raise BadArgument("a sound is no WAV or MP3 file, or damaged", field="images")
        n_samples, rate = mtmd.mtmd_bitmap_get_nx(bitmap), mtmd.mtmd_get_audio_sample_rate(self._context)
        if not MIN_SECONDS * rate <= n_samples <= MAX_SECONDS * rate:
            mtmd.mtmd_bitmap_free(bitmap)
            raise BadArgument(
                f"a sound is {n_samples / rate:.4g} s long: it must be from {MIN_SECONDS:g} to {MAX_SECONDS} s long",
                field="images",
            )
        return bitmap

    def try_out(self) -> None:
        """Encodes a small image, a tone or both, so that a damaged tower fails at launch and not in a job. A file that
        has passed is not encoded again on the same device until the file changes. If libmtmd aborts, the process ends.

        :raises BadModel: the tower fails, the embeddings are not finite, or the tower is that of another model.
        """
        passed = models.verdict("tower", [Path(self._path)], LLAMA_CPP_PYTHON, self._runtime.device_name)
        grey = Image(TRY_SIDE, TRY_SIDE, bytes(range(256)) * (3 * TRY_SIDE * TRY_SIDE // 256))
        try:
            inputs = [grey] * self.sees + [tone(1.0)] * self.hears
            parts = self.tokenize(self._marker * len(inputs), inputs, add_special=False)
            if models.has_passed(passed):
                return
            _logger.warning("trying %s with a small input; that is done once for a file", self.name)
            for part in parts:
                if isinstance(part, Picture) and not np.isfinite(self._encode(part)).all():
                    raise BadModel(
                        f"{self._path} computes NaN or infinity from its input: its weights are damaged, or its numbers"
                        " do not fit them",
                        path=self._path,
                    )
        except BudgetBelowFloor as error:  # jobs with images are refused until the budget is large enough
            _logger.warning("the vision tower is not tried: %s", error)
            return
        except BadArgument as error:
            raise BadModel(f"{self._path} cannot be used: {error}", path=self._path) from None
        models.pass_verdict(passed)

    def encode(self, picture: Picture) -> None:
        """Sets ``picture.embedding``, from the cache if the same image was encoded recently.

        :raises DecodeAborted: the runtime was aborted.
        :raises BudgetBelowFloor: the budget has no room for an image of this size; the error has the budget it needs.
        :raises OutOfMemory: the device refuses memory that the budget allows.
        :raises BadArgument: the tower fails with this image or sound, or computes NaN or infinity from it.
        """
        embedding = self.embeddings.get(picture.digest)
        if embedding is None:
            embedding = self._encode(picture)
            if not np.isfinite(embedding).all():  # it would spoil the KV cells of its sequence
                raise BadArgument(
                    "the tower computes NaN or infinity from this image or sound: a sound may have samples that are no"
                    " numbers, or far too large",
                    field="images",
                )
            self.embeddings.put(picture.digest, embedding)
        picture.embedding = embedding

    def _encode(self, picture: Picture) -> Embedding:
        device = self._runtime.device
        while True:
            generation = device.stats().budget_generation if device else 0
            _errors.clear()
            code = mtmd.mtmd_encode_chunk(self._context, picture.chunk)
            if self._runtime.placement is not None:
                self._runtime.placement.overhead.follow()
            if self._runtime.aborted:
                raise DecodeAborted
            if code == 0:
                break
            stats = device.stats() if device else None
            if stats is not None and stats.budget_generation != generation:
                continue  # a smaller budget has ended the encode
            if stats is not None and stats.image_floor_bytes > stats.budget_bytes:
                raise BudgetBelowFloor(
                    f"an image or sound of this size needs a VRAM budget of {-(-stats.image_floor_bytes >> 20)} MiB:"
                    " raise it or send a smaller one",
                    budget_bytes=stats.budget_bytes,
                    floor_bytes=stats.image_floor_bytes,
                )
            reason = _errors[-1] if _errors else "no reason given"
            if reason.endswith(_ALLOC_FAILED):
                raise OutOfMemory("the device refused memory for an image or sound: another program uses it")
            raise BadArgument(f"the tower fails with this image or sound: {reason}", field="images")
        n_embd = int(llama_cpp.llama_model_n_embd_inp(self._runtime.llama.model))
        return copied(np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._context), (picture.n_tokens, n_embd)))

    def decode(self, seq: int, picture: Picture) -> None:
        """Prefills an encoded picture at the end of sequence ``seq``. After an error the sequence is as before, or
        empty if the model has a recurrent state.

        :raises DecodeAborted: the runtime was aborted.
        :raises ContextOverflow: the sequence has no room for it.
        :raises BudgetBelowFloor: the budget has no room for it, and its tokens must be decoded together.
        :raises VramTaken: other programs hold too much of the VRAM that the budget allows.
        :raises OutOfMemory: the device or the host refuses the memory.
        """
        assert picture.embedding is not None
        runtime, past = self._runtime, self._runtime.length(seq)
        together = self._together(picture)
        step = runtime.n_ubatch if together else runtime.step
        end = llama_cpp.llama_pos(0)
        pointer = picture.embedding.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        code = mtmd.mtmd_helper_decode_image_chunk(
            self._context,
            runtime.llama.context,
            picture.chunk,
            pointer,
            past,
            seq,
            step,
            ctypes.byref(end),
            ctypes.cast(0, mtmd.mtmd_helper_post_decode_callback),
            None,
        )
        runtime.advance(seq, picture.n_pos)
        if runtime.device is not None:
            runtime.device.end_graph()
        if runtime.placement is not None:
            runtime.placement.overhead.follow()
        if code == 0:
            return
        kept = runtime.trim(seq, past)
        if code == 2:
            raise DecodeAborted
        if runtime.placement is not None and (needed := runtime.placement.refused_bytes):
            if together or not runtime.placement.refuse_step(min(step, picture.n_tokens)):
                raise below_floor(runtime.vram_budget_bytes, needed)
            if kept < past:
                raise StepTooLarge
            self.decode(seq, picture)
            return
        if code == 1:
            raise ContextOverflow("no room in the key-value cache", n_ctx=runtime.n_ctx_seq)
        if code == -2:
            raise runtime.without_memory(OutOfMemory(f"memory for an image was refused: {llamalog.last_errors()}"))
        raise FrameshardError(f"decoding an image failed with {code}: {llamalog.last_errors()}")

    def close(self) -> None:
        """Frees the tower. Safe to call twice."""
        if self._context:
            mtmd.mtmd_free(self._context)
            self._context = None


def _bytes(pixels: bytes) -> Any:
    return (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels)


def _on_log(level: int, text: bytes, _data: object) -> None:
    if level >= 3 and level <= 4:  # warnings and errors of ggml_log_level
        line = text.decode("utf-8", "replace").strip()
        _logger.log(logging.ERROR if level == 4 else logging.WARNING, "%s", line)
        if level == 4:
            _errors.append(line)


_log_callback = llama_cpp.llama_log_callback(_on_log)  # libmtmd keeps the pointer for the life of the process
