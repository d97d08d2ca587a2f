"""Towers of Qwen and of its relatives. They read an image in nearly its own size, with rotary positions for rows and
columns, and merge four patches into one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiny_towers.file import N_EMBD, Tower, TowerFile

MERGED = 4
"""Patches in one token."""


@dataclass(frozen=True)
class _Body:
    """The sizes of a tower's layers, and what is in them.

    :param fused: queries, keys and values come from one matrix.
    :param n_head_kv: heads of keys and values. 0: as many as of queries.
    :param head_dim: 0: the width is divided among the heads.
    :param rms: the norms have no bias.
    :param gated: the feed-forward network has a gate.
    :param bias: matrices have a bias.
    :param head_norms: each head of queries and keys has a norm.
    """

    width: int
    n_head: int
    ff: int
    n_layer: int
    patch: int
    fused: bool = False
    n_head_kv: int = 0
    head_dim: int = 0
    rms: bool = False
    gated: bool = False
    bias: bool = True
    head_norms: bool = False


def _layers(file: TowerFile, body: _Body) -> None:
    """The keys and tensors of the layers."""
    width, ff, bias = body.width, body.ff, body.bias
    file.keys(embedding_length=width, feed_forward_length=ff, block_count=body.n_layer, patch_size=body.patch)
    file.key("attention.head_count", body.n_head)
    head_dim = body.head_dim or width // body.n_head
    n_q, n_kv = head_dim * body.n_head, head_dim * (body.n_head_kv or body.n_head)
    parts = {"attn_qkv": n_q + 2 * n_kv} if body.fused else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
    for i in range(body.n_layer):
        for name, size in parts.items():
            file.weights(f"v.blk.{i}.{name}", width, size, bias=bias)
        file.weights(f"v.blk.{i}.attn_out", n_q, width, bias=bias)
        for name in ("ffn_gate", "ffn_up") if body.gated else ("ffn_up",):
            file.weights(f"v.blk.{i}.{name}", width, ff, bias=bias)
        file.weights(f"v.blk.{i}.ffn_down", ff, width, bias=bias)
        for name in ("ln1", "ln2"):
            file.norm(f"v.blk.{i}.{name}", width, bias=not body.rms)
        for name in ("attn_q_norm", "attn_k_norm") if body.head_norms else ():
            file.norm(f"v.blk.{i}.{name}", head_dim, bias=False)


def _patches(file: TowerFile, body: _Body, *, frames: int = 2, bias: bool = False) -> None:
    """The convolution that makes patches. With two frames there is a kernel for each: an image is both frames."""
    file.weights("v.patch_embd", body.patch, body.patch, 3, body.width, bias=bias)
    if frames == 2:
        gain = 1 / (3 * body.patch**2) ** 0.5
        file.tensor("v.patch_embd.weight.1", body.patch, body.patch, 3, body.width, kind="F16", gain=gain)


def _merger(file: TowerFile, n_in: int, names: Sequence[str], *, n_out: int = N_EMBD, bias: bool = True) -> None:
    """The two matrices that make tokens of merged patches."""
    file.weights(names[0], n_in, n_in, bias=bias)
    file.weights(names[1], n_in, n_out, bias=bias)


def _pixels(file: TowerFile, body: _Body, least: int, most: int) -> None:
    """The smallest and the largest image, given in tokens."""
    pixels = MERGED * body.patch**2
    file.keys(image_min_pixels=least * pixels, image_max_pixels=most * pixels)


def _qwen2vl(file: TowerFile) -> None:
    body = _Body(width=160, n_head=2, ff=640, n_layer=3, patch=14)
    _layers(file, body)
    # The converter writes the language model's width here, and libmtmd does not use it.
    file.keys(image_size=560, feed_forward_length=N_EMBD)
    _patches(file, body)
    file.norm("v.post_ln", body.width)
    _merger(file, MERGED * body.width, ("mm.0", "mm.2"))


def qwen25vl(file: TowerFile) -> None:
    body = _Body(width=160, n_head=2, ff=428, n_layer=4, patch=14, rms=True, gated=True)
    file.plain_key("clip.use_silu", True)
    _layers(file, body)
    file.keys(image_size=560, n_wa_pattern=2)
    _patches(file, body)
    file.norm("v.post_ln", body.width, bias=False)
    _merger(file, MERGED * body.width, ("mm.0", "mm.2"))


def _qwen3vl_with(file: TowerFile, deepstack: Sequence[int]) -> None:
    side, n_out = 48, N_EMBD // (1 + len(deepstack))
    body = _Body(width=144, n_head=2, ff=538, n_layer=5, patch=16, fused=True)
    file.plain_key("clip.use_gelu", True)
    _layers(file, body)
    file.keys(image_size=side * body.patch, spatial_merge_size=2)
    file.key("is_deepstack_layers", [i in deepstack for i in range(body.n_layer)])
    _patches(file, body, bias=True)
    file.tensor("v.position_embd.weight", body.width, side**2)
    file.norm("v.post_ln", body.width)
    merged = MERGED * body.width
    _merger(file, merged, ("mm.0", "mm.2"), n_out=n_out)
    for i in deepstack:
        file.norm(f"v.deepstack.{i}.norm", merged)
        _merger(file, merged, (f"v.deepstack.{i}.fc1", f"v.deepstack.{i}.fc2"), n_out=n_out)


def _qwen3vl(file: TowerFile) -> None:
    _qwen3vl_with(file, (0, 1, 3))


def _qwen35(file: TowerFile) -> None:
    _qwen3vl_with(file, ())


def _ling3vl(file: TowerFile) -> None:
    side = 48
    body = _Body(width=144, n_head=2, ff=538, n_layer=3, patch=16, fused=True)
    file.plain_key("clip.use_gelu", True)
    _layers(file, body)
    file.keys(image_size=side * body.patch, spatial_merge_size=2)
    _patches(file, body)
    file.tensor("v.position_embd.weight", body.width, side**2)
    file.norm("mm.input_norm", body.width)
    _merger(file, MERGED * body.width, ("mm.0", "mm.2"))


def _glm_with(file: TowerFile, body: _Body, *, n_out: int = N_EMBD) -> None:
    """What all GLM towers have: patches are merged by a convolution, and the projector is a gated network."""
    ff = 2 * n_out
    file.plain_key("clip.use_silu", True)
    file.key("attention.layer_norm_epsilon", 1e-5)
    _layers(file, body)
    file.key("image_size", 336)
    _patches(file, body, bias=True)
    file.norm("v.post_ln", body.width, bias=False)
    file.weights("mm.patch_merger", 2, 2, body.width, n_out, bias=True)
    file.weights("mm.model.fc", n_out, n_out)
    file.norm("mm.post_norm", n_out)
    file.weights("mm.gate", n_out, ff)
    file.weights("mm.up", n_out, ff)
    file.weights("mm.down", ff, N_EMBD)


def _glm4v(file: TowerFile) -> None:
    body = _Body(width=128, n_head=1, ff=512, n_layer=3, patch=14, fused=True, rms=True, gated=True, bias=False)
    _glm_with(file, body)
    file.key("feed_forward_length", 1712)  # that of the projector in real files. libmtmd does not use it.
    file.tensor("v.position_embd.weight", body.width, 24**2)
    file.norm("v.norm_embd", body.width, bias=False)


def _glm_ocr(file: TowerFile) -> None:
    body = _Body(width=128, n_head=2, ff=512, n_layer=3, patch=14, fused=True, rms=True, gated=True, head_norms=True)
    _glm_with(file, body)
    file.norm("v.norm_embd", body.width, bias=False)


def _glm5v(file: TowerFile) -> None:
    body = _Body(128, 2, 512, 3, 14, fused=True, rms=True, gated=True, bias=False, head_norms=True)
    _glm_with(file, body)
    file.keys(spatial_merge_size=2, swiglu_clamp=1.5)
    _pixels(file, body, 16, 4096)


def _exaone4_5(file: TowerFile) -> None:
    body = _Body(width=128, n_head=4, ff=320, n_layer=4, patch=14, fused=True, n_head_kv=1, rms=True, gated=True)
    file.plain_key("clip.use_silu", True)
    _layers(file, body)
    file.key("attention.head_count_kv", body.n_head_kv)
    file.keys(image_size=560, window_size=112, n_wa_pattern=2)
    _pixels(file, body, 4, 4096)
    _patches(file, body)
    file.norm("v.post_ln", body.width, bias=False)
    _merger(file, MERGED * body.width, ("mm.0", "mm.2"))


def _mimovl(file: TowerFile) -> None:
    modes = (-1, 0, 1, 1, 0, -1)  # a layer sees everything, a band of the rows, or a band of the columns
    body = _Body(160, 4, 512, len(modes), 16, fused=True, n_head_kv=1, head_dim=64, rms=True, gated=True)
    file.plain_key("clip.use_silu", True)
    _layers(file, body)
    file.key("attention.head_count_kv", body.n_head_kv)
    file.keys(image_size=560, spatial_merge_size=2, window_size=16, wa_pattern_mode=modes)
    _pixels(file, body, 8, 8192)
    _patches(file, body)
    for i, mode in enumerate(modes):
        if mode >= 0:
            file.tensor(f"v.blk.{i}.attn_sinks", body.n_head, gain=1.0)
    file.norm("v.post_ln", body.width)
    _merger(file, MERGED * body.width, ("mm.0", "mm.2"), bias=False)


def _minimax_m3(file: TowerFile) -> None:
    body = _Body(width=160, n_head=2, ff=640, n_layer=3, patch=14)
    file.plain_key("clip.use_gelu", True)
    file.key("attention.layer_norm_epsilon", 1e-5)
    _layers(file, body)
    file.keys(image_size=672, spatial_merge_size=2)
    _patches(file, body)
    file.norm("v.pre_ln", body.width)
    file.weights("mm.1", body.width, N_EMBD, bias=True)
    file.weights("mm.2", N_EMBD, N_EMBD, bias=True)
    file.weights("mm.merger.fc1", MERGED * N_EMBD, N_EMBD, bias=True)
    file.weights("mm.merger.fc2", N_EMBD, N_EMBD, bias=True)


def _step3vl(file: TowerFile) -> None:
    body = _Body(width=96, n_head=1, ff=560, n_layer=2, patch=14, fused=True)
    file.key("attention.layer_norm_epsilon", 1e-5)
    _layers(file, body)
    file.keys(image_size=728, preproc_image_size=3024)
    file.key("projector.scale_factor", 4)
    _patches(file, body, frames=1)
    file.tensor("v.position_embd.weight", body.width, (728 // body.patch) ** 2)
    file.norm("v.pre_ln", body.width)
    for i in range(body.n_layer):
        for name in ("ls1", "ls2"):
            file.tensor(f"v.blk.{i}.{name}.weight", body.width, mean=1.0)
    file.weights("mm.0", 3, 3, body.width, 2 * body.width, bias=True)
    file.weights("mm.1", 3, 3, 2 * body.width, 4 * body.width, bias=True)
    file.weights("mm.model.fc", 4 * body.width, N_EMBD)


def _paddleocr(file: TowerFile) -> None:
    body = _Body(width=144, n_head=2, ff=538, n_layer=3, patch=14)
    file.plain_key("clip.use_gelu", True)
    _layers(file, body)
    file.keys(image_size=1680, image_min_pixels=147384, image_max_pixels=2822400)
    _patches(file, body, frames=1, bias=True)
    file.tensor("v.position_embd.weight", body.width, 27**2)
    file.norm("v.post_ln", body.width)
    file.norm("mm.input_norm", body.width)
    _merger(file, MERGED * body.width, ("mm.1", "mm.2"))


def _muse_glimmer(file: TowerFile) -> None:
    side = 16  # patches along one side of a window
    body = _Body(width=96, n_head=1, ff=560, n_layer=6, patch=14)
    file.key("attention.layer_norm_epsilon", 1e-5)
    _layers(file, body)
    file.keys(image_size=side * body.patch * 2, spatial_merge_size=2)
    _patches(file, body, frames=1)
    file.tensor("v.position_embd.weight", body.width, side**2)
    file.norm("v.pre_ln", body.width)
    file.norm("v.post_ln", body.width)
    file.weights("mm.0", MERGED * body.width, N_EMBD)
    file.weights("mm.1", N_EMBD, N_EMBD)
    file.weights("mm.2", N_EMBD, N_EMBD)


TOWERS: dict[str, Tower] = {
    "qwen2vl": Tower("rotary positions of rows and columns", "qwen2vl_merger", _qwen2vl),
    "qwen2.5vl": Tower("most layers look only into windows", "qwen2.5vl_merger", qwen25vl),
    "qwen3vl": Tower("tokens also from inner layers (deepstack)", "qwen3vl_merger", _qwen3vl),
    "qwen3.5": Tower("as qwen3vl, tokens only from the last layer", "qwen3vl_merger", _qwen35),
    "ling3vl": Tower("as qwen3vl, another projector", "ling3vl", _ling3vl),
    "glm4v": Tower("positions resized by cubes, patches merged by a convolution", "glm4v", _glm4v),
    "glm-ocr": Tower("as glm4v, norms of heads, no learned positions", "glm4v", _glm_ocr),
    "glm5v": Tower("as glm-ocr, clamped gates, and padded images", "glm5v", _glm5v),
    "exaone4_5": Tower("as qwen2.5vl, heads share keys and values", "exaone4_5", _exaone4_5),
    "mimovl": Tower("bands of rows and of columns, with attention sinks", "mimovl", _mimovl),
    "minimax_m3": Tower("rotary positions leave a part of each head as it is", "minimax_m3", _minimax_m3),
    "step3vl": Tower("slices of one size, patches merged by convolutions", "step3vl", _step3vl),
    "paddleocr": Tower("rows of patches are not reordered", "paddleocr", _paddleocr),
    "muse-glimmer": Tower("windows of the size of the learned positions", "muse-glimmer", _muse_glimmer),
}
