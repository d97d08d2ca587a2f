"""Towers on SigLIP, and the vision towers of the Gemma family."""

from __future__ import annotations

from tiny_towers.file import N_EMBD, Tower, TowerFile
from tiny_towers.plain import LAYERS, PATCH, WIDTH, layers


def _siglip(file: TowerFile, side: int, patch: int = 16, *, post_norm: bool = True) -> None:
    """SigLIP: positions are learned, and there is no class token.

    :param side: of an image or, where images have any size, of the grid of positions, in pixels.
    """
    file.plain_key("clip.use_gelu", True)
    layers(file)
    file.keys(image_size=side, patch_size=patch)
    file.weights("v.patch_embd", patch, patch, 3, WIDTH, bias=True)
    file.tensor("v.position_embd.weight", WIDTH, (side // patch) ** 2)
    if post_norm:
        file.norm("v.post_ln", WIDTH)


def _gemma3(file: TowerFile) -> None:
    # The projection is stored with its outputs first, so the graph transposes it.
    _siglip(file, 224, PATCH)
    file.weights("mm.input_projection", N_EMBD, WIDTH)
    file.norm("mm.soft_emb_norm", WIDTH, bias=False)


def _idefics3(file: TowerFile, side: int, patch: int, merged: int, longest: int) -> None:
    _siglip(file, side, patch)
    file.key("projector.scale_factor", merged)
    file.key("preproc_image_size", longest)
    file.weights("mm.model.fc", merged**2 * WIDTH, N_EMBD)


def _idefics3_whole(file: TowerFile) -> None:
    _idefics3(file, 128, 16, 4, 512)


def _idefics3_cut(file: TowerFile) -> None:
    # As in SmolVLM2 2.2B, the side of an image is no multiple of a patch: the last pixels are not read.
    side = 9 * PATCH + 6
    _idefics3(file, side, PATCH, 3, 3 * side)


def _lfm2(file: TowerFile, *, norm: bool = True) -> None:
    merged, hidden = 2, 160
    _siglip(file, 256)
    file.key("projector.scale_factor", merged)
    if norm:
        file.norm("mm.input_norm", merged**2 * WIDTH)
    file.weights("mm.1", merged**2 * WIDTH, hidden, bias=True)
    file.weights("mm.2", hidden, N_EMBD, bias=True)


def _lfm25(file: TowerFile) -> None:
    _lfm2(file, norm=False)


def _janus_pro(file: TowerFile) -> None:
    _siglip(file, 192)
    file.weights("mm.0", WIDTH, N_EMBD, bias=True)
    file.weights("mm.1", N_EMBD, N_EMBD, bias=True)


def _phi4(file: TowerFile) -> None:
    _siglip(file, 256, post_norm=False)
    file.keys(image_min_pixels=256 * 16**2, image_max_pixels=3600 * 16**2)
    file.weights("mm.0", WIDTH, N_EMBD, bias=True)
    file.weights("mm.2", N_EMBD, N_EMBD, bias=True)


def _youtuvl(file: TowerFile) -> None:
    # Patches are embedded by a plain product, and positions are rotary.
    patch, merged, hidden = 16, 2, 192
    file.plain_key("clip.use_gelu", True)
    layers(file)
    file.keys(image_size=560, patch_size=patch, spatial_merge_size=merged, window_size=128, wa_layer_indexes=[1])
    file.weights("v.patch_embd", 3 * patch**2, WIDTH, bias=True)
    file.norm("v.post_ln", WIDTH)
    file.norm("mm.input_norm", WIDTH, bias=False)
    file.weights("mm.0", merged**2 * WIDTH, hidden, bias=True)
    file.weights("mm.2", hidden, N_EMBD, bias=True)


def _gemma_colours(file: TowerFile) -> None:
    file.keys(image_mean=[0.0, 0.0, 0.0], image_std=[1.0, 1.0, 1.0])


def _gemma4v(file: TowerFile, width: int, heads: int) -> None:
    """RMS norms before and after each part, norms of queries and keys, gates, and no biases."""
    patch, head_dim, ff = 16, width // heads, 3 * width
    file.mixed()
    _gemma_colours(file)
    file.keys(image_size=224, patch_size=patch, embedding_length=width, feed_forward_length=ff, block_count=LAYERS)
    file.key("attention.head_count", heads)
    file.weights("v.patch_embd", patch, patch, 3, width)
    file.tensor("v.position_embd.weight", width, 1024, 2)
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            file.weights(f"v.blk.{i}.{name}", width, width)
        for name in ("attn_q_norm", "attn_k_norm"):
            file.tensor(f"v.blk.{i}.{name}.weight", head_dim, mean=0.4)
        for name in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
            file.norm(f"v.blk.{i}.{name}", width, bias=False)
        for name in ("ffn_gate", "ffn_up"):
            file.weights(f"v.blk.{i}.{name}", width, ff)
        file.weights(f"v.blk.{i}.ffn_down", ff, width)
    file.weights("mm.input_projection", width, N_EMBD)


def gemma4v_small(file: TowerFile) -> None:
    # The inputs and outputs of products are clamped.
    _gemma4v(file, 128, 2)
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down"):
            for limit, value in (("input", 1.5), ("output", 2.0)):
                file.tensor(f"v.blk.{i}.{name}.{limit}_max", 1, mean=value, gain=0.0)
                file.tensor(f"v.blk.{i}.{name}.{limit}_min", 1, mean=-value, gain=0.0)


def _gemma4v_large(file: TowerFile) -> None:
    # The size of a head is no power of two, and the output is standardised.
    _gemma4v(file, 144, 2)
    file.tensor("v.std_bias", 144)
    file.tensor("v.std_scale", 144, mean=1.0)


def gemma4uv(file: TowerFile) -> None:
    # No layers: patches are embedded in the language model's width.
    patch, merged = 8, 3  # the second number is libmtmd's default
    n_inputs = 3 * (patch * merged) ** 2
    file.mixed()
    _gemma_colours(file)
    file.keys(image_size=224, patch_size=patch, embedding_length=N_EMBD, feed_forward_length=0, block_count=0)
    file.key("attention.head_count", 0)
    file.weights("v.patch_embd", n_inputs, N_EMBD, bias=True)
    file.tensor("v.position_embd.weight", N_EMBD, 256, 2)
    file.norm("v.patch_norm.1", n_inputs)
    file.norm("v.patch_norm.2", N_EMBD)
    file.norm("v.patch_norm.3", N_EMBD)
    file.weights("mm.input_projection", N_EMBD, N_EMBD)


def _conv(file: TowerFile, name: str, side: int, n_in: int, n_out: int, *, norm: str = "", kind: str = "F16") -> None:
    """A convolution with a square kernel, and its norm. The kernels of a depthwise one have one input each."""
    file.weights(name, side, side, n_in, n_out, kind=kind)
    if norm:
        file.norm(norm, n_out, bias=False)


def _edge_residual(file: TowerFile, block: str, n_in: int, n_out: int) -> None:
    _conv(file, f"{block}.conv_exp", 3, n_in, 4 * n_in, norm=f"{block}.bn1")
    _conv(file, f"{block}.conv_pwl", 1, 4 * n_in, n_out, norm=f"{block}.bn2")


def _inverted_residual(file: TowerFile, block: str, n_in: int, n_out: int, first: int, middle: int) -> None:
    """:param first: the side of the first depthwise kernel, or 0 for none. ``middle`` is that of the second one."""
    wide = 4 * n_in
    if first:
        _conv(file, f"{block}.dw_start.conv", first, 1, n_in, norm=f"{block}.dw_start.bn")
    _conv(file, f"{block}.pw_exp.conv", 1, n_in, wide, norm=f"{block}.pw_exp.bn")
    if middle:
        _conv(file, f"{block}.dw_mid.conv", middle, 1, wide, norm=f"{block}.dw_mid.bn")
    _conv(file, f"{block}.pw_proj.conv", 1, wide, n_out, norm=f"{block}.pw_proj.bn")
    file.tensor(f"{block}.layer_scale.gamma", 1, 1, n_out, 1, mean=0.5)


def _mobile_attention(file: TowerFile, block: str, width: int, heads: int, head_dim: int, *, smaller: bool) -> None:
    """All heads share one key and one value. :param smaller: of a quarter of the patches."""
    file.norm(f"{block}.norm", width, bias=False)
    _conv(file, f"{block}.attn.query.proj", 1, width, heads * head_dim)
    for part in ("key", "value"):
        if smaller:
            _conv(file, f"{block}.attn.{part}.down_conv", 3, 1, width, norm=f"{block}.attn.{part}.norm")
        _conv(file, f"{block}.attn.{part}.proj", 1, width, head_dim)
    _conv(file, f"{block}.attn.output.proj", 1, heads * head_dim, width)
    file.tensor(f"{block}.layer_scale.gamma", 1, 1, width, 1, mean=0.5)


def _gemma3nv(file: TowerFile) -> None:
    # MobileNetV5: five times half the side. Both of the last two stages are used. Tokens are always 16 x 16. libmtmd
    # demands that the tower is as wide as the language model.
    side, stem, widths, out = 512, 8, (16, 24, 32, 48), N_EMBD
    file.mixed()
    _gemma_colours(file)
    file.keys(image_size=side, patch_size=side // 256, embedding_length=out, feed_forward_length=4 * out)
    file.key("block_count", 128)  # as in real files, where it means nothing
    file.key("attention.head_count", 8)
    _conv(file, "v.conv_stem.conv", 3, 3, stem, norm="v.conv_stem.bn", kind="F32")
    file.tensor("v.conv_stem.conv.bias", 1, 1, stem, 1)
    _edge_residual(file, "v.blk.0.0", stem, widths[0])
    _edge_residual(file, "v.blk.0.1", widths[0], widths[0])
    _inverted_residual(file, "v.blk.1.0", widths[0], widths[1], 3, 5)
    _inverted_residual(file, "v.blk.1.1", widths[1], widths[1], 3, 0)
    _inverted_residual(file, "v.blk.2.0", widths[1], widths[2], 5, 5)
    _mobile_attention(file, "v.blk.2.1", widths[2], 3, 16, smaller=True)
    _inverted_residual(file, "v.blk.2.2", widths[2], widths[2], 0, 0)
    _inverted_residual(file, "v.blk.3.0", widths[2], widths[3], 5, 5)
    _mobile_attention(file, "v.blk.3.1", widths[3], 4, 24, smaller=False)
    _inverted_residual(file, "v.blk.3.2", widths[3], widths[3], 0, 0)
    _conv(file, "v.msfa.ffn.pw_exp.conv", 1, widths[2] + widths[3], 2 * out, norm="v.msfa.ffn.pw_exp.bn")
    _conv(file, "v.msfa.ffn.pw_proj.conv", 1, 2 * out, out, norm="v.msfa.ffn.pw_proj.bn")
    file.norm("v.msfa.norm", out, bias=False)
    file.norm("mm.soft_emb_norm", out, bias=False)
    file.weights("mm.input_projection", out, N_EMBD)


TOWERS: dict[str, Tower] = {
    "gemma3": Tower("a fixed size, pooled, a projection that is transposed", "gemma3", _gemma3),
    "idefics3": Tower("tiles and the whole image, 16 patches in one token", "idefics3", _idefics3_whole),
    "idefics3-cut": Tower("as idefics3, with 9 patches in one token", "idefics3", _idefics3_cut),
    "gemma4v": Tower("any size, gates, rotary and learned positions, clamped", "gemma4v", gemma4v_small),
    "gemma4v-large": Tower("as gemma4v, standardised instead of clamped", "gemma4v", _gemma4v_large),
    "gemma3nv": Tower("convolutions, few attention layers", "gemma3nv", _gemma3nv),
    "lfm2": Tower("any size, positions are interpolated", "lfm2", _lfm2),
    "lfm2.5": Tower("as lfm2, without a norm before the projector", "lfm2", _lfm25),
    "janus_pro": Tower("a fixed size, padded", "janus_pro", _janus_pro),
    "phi4": Tower("any size, positions are interpolated, patches are not merged", "phi4", _phi4),
    "gemma4uv": Tower("no layers", "gemma4uv", gemma4uv),
    "youtuvl": Tower("any size, attention in windows", "youtuvl", _youtuvl),
}
