"""Checks the GGUF header of a tower (mmproj), which reads images or sounds, for errors that libmtmd does not check and
that end the process.

libmtmd finds most tensors by name, and many are optional. So a damaged name has an effect only in the first encode,
which the engine therefore runs at launch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from frameshard.errors import BadModel
from frameshard.plan.header import MAX_LAYERS, Header, Value, Wrong, read_header, whole, wrong
from frameshard.records import record

_MAX_SIDE = 1 << 14  # pixels
_MAX_WIDTH = 1 << 20
_MAX_MELS = 1 << 10
_MAX_STEP = 64  # the most patches along one side that are merged into one token
_WINDOWED = ("qwen2.5vl_merger", "exaone4_5", "youtuvl")
_WINDOW = 112  # pixels; libmtmd's own number, which only youtuvl's files can change
_BLOCK = re.compile(r"([va])\.blk\.(\d+)\.(.+)")


@record
class Tower:
    """A checked mmproj file. Of one that reads images and sounds, the numbers are those of images. ``side`` and
    ``patch`` are in pixels, and 0 for a tower that only hears. ``side`` is 0 also where the file says so, for images of
    any size."""

    path: Path
    projector: str
    n_layer: int
    side: int
    patch: int
    file_bytes: int


def read_tower(path: str | os.PathLike[str]) -> Tower:
    """Reads and checks the header of an mmproj file.

    :raises ModelNotFound: there is no such file.
    :raises BadModel: the file is not a vision tower, is truncated or contradicts itself. The message says what is
        wrong.
    """
    path = Path(path)
    header = read_header(path)
    try:
        return _check(path, header)
    except Wrong as error:
        raise BadModel(f"{path.name}: {error}", path=str(path)) from None


def _check(path: Path, header: Header) -> Tower:
    metadata = header.metadata
    arch = metadata.get("general.architecture")
    if arch != "clip":
        wrong(f"general.architecture is {arch!r}, and a vision tower is of clip")
    kinds = [kind for kind in ("vision", "audio") if metadata.get(f"clip.has_{kind}_encoder") is True]
    if not kinds:
        wrong(
            "neither clip.has_vision_encoder nor clip.has_audio_encoder is true: nothing in it reads images or sounds"
        )
    if not header.tensors:
        wrong("there are no tensors in it")
    (projector, n_layer), *_ = [_check_kind(header, kind) for kind in kinds]
    side, patch = _check_images(metadata, projector) if kinds[0] == "vision" else (0, 0)
    return Tower(path, projector, n_layer, side, patch, header.file_bytes)


def _check_kind(header: Header, kind: str) -> tuple[str, int]:
    """Checks what reads images ("vision") or sounds ("audio").

    :returns: its projector and its layers.
    """
    metadata = header.metadata
    projector = metadata.get("clip.projector_type") or metadata.get(f"clip.{kind}.projector_type")
    if not isinstance(projector, str):
        wrong("clip.projector_type is missing")
    if projector.endswith(("_spkenc", "_gen")):
        wrong(f"it is of the kind {projector}, which speaks: a tower reads images or sounds")
    _check_numbers(metadata, kind)
    n_layer = _between(metadata, kind, "block_count", 0, MAX_LAYERS)
    _check_heads(metadata, kind, n_layer)
    _between(metadata, kind, "feed_forward_length", 0, _MAX_WIDTH, 0)
    _between(metadata, kind, "projection_dim", 0, _MAX_WIDTH, 0)
    if kind == "audio":
        _between(metadata, kind, "num_mel_bins", 1, _MAX_MELS)
        _between(metadata, kind, "projector.stack_factor", 1, _MAX_STEP, 1)
    # The first converter of MiniCPM-V wrote a layer more than it said. libmtmd does not read that one.
    unread = 1 if projector == "resampler" else 0
    _check_layers([tensor.name for tensor in header.tensors], kind[0], n_layer, unread)
    return projector, n_layer


def _check_images(metadata: Mapping[str, Value], projector: str) -> tuple[int, int]:
    """Returns the side of an image and of a patch, in pixels."""
    least = 0 if projector.startswith("dots") else 1  # these files say 0, and the towers read images of any size
    side = _between(metadata, "vision", "image_size", least, _MAX_SIDE)
    patch = _between(metadata, "vision", "patch_size", 1, side or _MAX_SIDE)
    for name in ("spatial_merge_size", "projector.scale_factor"):
        _between(metadata, "vision", name, 1, _MAX_STEP, 1)
    _check_order(metadata, "image_min_pixels", "image_max_pixels")
    _check_order(metadata, "preproc_min_tiles", "preproc_max_tiles")
    _check_grids(metadata, side)
    _check_window(metadata, projector, patch)
    for name in ("image_mean", "image_std"):
        key = f"clip.vision.{name}"
        colours = metadata.get(key)
        if not isinstance(colours, tuple) or len(colours) < 3 or not all(isinstance(each, float) for each in colours):
            wrong(f"{key} is {colours}, not three numbers")
        if name == "image_std" and min(colours) <= 0:
            wrong(f"{key} is {colours}, not above 0")
    return side, patch


def _between(
    metadata: Mapping[str, Value], kind: str, name: str, low: int, high: int, default: int | None = None
) -> int:
    """The number ``clip.KIND.NAME``, between ``low`` and ``high``. It must be there unless there is a default."""
    key = f"clip.{kind}.{name}"
    if default is None and key not in metadata:
        wrong(f"{key} is missing")
    value = whole(metadata, key, default or 0)
    if key in metadata and not low <= value <= high:
        wrong(f"{key} is {value}, not from {low} to {high}")
    return value


def _check_heads(metadata: Mapping[str, Value], kind: str, n_layer: int) -> None:
    least = 1 if n_layer else 0
    n_embd = _between(metadata, kind, "embedding_length", least, _MAX_WIDTH)
    n_head = _between(metadata, kind, "attention.head_count", least, _MAX_WIDTH)
    head_dim = _between(metadata, kind, "attention.head_dim", 1, _MAX_WIDTH, 0)
    if n_head and not head_dim and n_embd % n_head:
        wrong(f"clip.{kind}.attention.head_count is {n_head}, which does not divide an embedding of {n_embd}")
    n_head_kv = _between(metadata, kind, "attention.head_count_kv", least, max(n_head, least), n_head)
    if n_head_kv and n_head % n_head_kv:
        wrong(f"clip.{kind}.attention.head_count_kv is {n_head_kv}, which does not divide {n_head} heads")


def _check_layers(names: list[str], tower: str, n_layer: int, unread: int = 0) -> None:
    """Checks that no tensor is missing in a single layer: libmtmd would follow a null pointer. Feed-forward networks
    are not checked, because in some mixtures of experts the first layer has other ones, nor are attention sinks, which
    only layers with a window have.

    :param unread: the number of layers that libmtmd does not read, behind the ``n_layer`` that it does.
    """
    layers: dict[str, set[int]] = {}
    for name in names:
        match = _BLOCK.fullmatch(name)
        if match is None or match[1] != tower:
            continue
        if int(match[2]) >= n_layer + unread:
            wrong(f"tensor {name} belongs to a layer beyond the {n_layer} there are")
        if int(match[2]) < n_layer:
            layers.setdefault(match[3], set()).add(int(match[2]))
    for part, found in layers.items():
        if len(found) == n_layer - 1 > 1 and not part.startswith(("ffn_", "exp_", "attn_sinks")):
            (missing,) = set(range(n_layer)) - found
            wrong(f"tensor {tower}.blk.{missing}.{part} is missing, and every other layer has one")


def _check_order(metadata: Mapping[str, Value], low: str, high: str) -> None:
    least, most = (whole(metadata, f"clip.vision.{name}", 0) for name in (low, high))
    if least < 0 or (f"clip.vision.{high}" in metadata and most < max(least, 1)):
        wrong(f"clip.vision.{low} is {least} and clip.vision.{high} {most}")


def _check_window(metadata: Mapping[str, Value], projector: str, patch: int) -> None:
    """Checks that a window of attention has room for the four patches of a token. libmtmd would never end otherwise."""
    if projector in _WINDOWED:
        window = (projector == "youtuvl" and whole(metadata, "clip.vision.window_size", 0)) or _WINDOW
        if window < 2 * patch:
            wrong(f"clip.vision.patch_size is {patch}, more than half of a window of {window} pixels")


def _check_grids(metadata: Mapping[str, Value], side: int) -> None:
    """Checks the sizes that a large image may be scaled to. libmtmd ends the process if one is not of whole tiles."""
    key = "clip.vision.image_grid_pinpoints"
    sizes = metadata.get(key, ())
    if not isinstance(sizes, tuple) or len(sizes) % 2:
        wrong(f"{key} is {sizes}, not pairs of numbers")
    for size in sizes:
        if not isinstance(size, int) or not 0 < side <= size <= _MAX_SIDE or size % side:
            wrong(f"{key} has {size}, which is not a number of tiles of {side} pixels")


def _check_numbers(metadata: Mapping[str, Value], kind: str) -> None:
    for key, value in metadata.items():
        if key.startswith("clip."):
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                wrong(f"{key} is {value}, not finite")
    epsilon = metadata.get(f"clip.{kind}.attention.layer_norm_epsilon", 0.0)
    if not isinstance(epsilon, float) or epsilon < 0:
        wrong(f"clip.{kind}.attention.layer_norm_epsilon is {epsilon}, not a number from 0 up")
