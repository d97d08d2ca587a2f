"""Towers of images of any size, with rotated positions, and the towers of documents (OCR)."""

from __future__ import annotations

from tiny_towers.file import N_EMBD, Tower, TowerFile

WIDTH, FF, LAYERS, HEADS = 128, 320, 3, 4


def _layers(
    file: TowerFile,
    *,
    rms: bool = False,
    bias: bool = True,
    gate: bool = False,
    fused: bool = False,
    post_ln: bool = True,
) -> None:
    """The keys and tensors of transformer layers.

    :param rms: norms have no bias.
    :param fused: one matrix for queries, keys and values.
    """
    _layer_keys(file, LAYERS)
    if post_ln:
        file.norm("v.post_ln", WIDTH, bias=not rms)
    for i in range(LAYERS):
        _attention(file, f"v.blk.{i}", bias=bias, fused=fused)
        for name in ("ln1", "ln2"):
            file.norm(f"v.blk.{i}.{name}", WIDTH, bias=not rms)
        _feed_forward(file, f"v.blk.{i}", bias=bias, gate=gate)


def _layer_keys(file: TowerFile, n_layer: int) -> None:
    file.keys(embedding_length=WIDTH, feed_forward_length=FF, block_count=n_layer)
    file.key("attention.head_count", HEADS)


def _attention(file: TowerFile, block: str, *, bias: bool, fused: bool) -> None:
    if fused:
        file.weights(f"{block}.attn_qkv", WIDTH, 3 * WIDTH, bias=bias)
    else:
        for name in ("attn_q", "attn_k", "attn_v"):
            file.weights(f"{block}.{name}", WIDTH, WIDTH, bias=bias)
    file.weights(f"{block}.attn_out", WIDTH, WIDTH, bias=bias)


def _feed_forward(file: TowerFile, block: str, *, bias: bool, gate: bool) -> None:
    for name in ("ffn_gate", "ffn_up") if gate else ("ffn_up",):
        file.weights(f"{block}.{name}", WIDTH, FF, bias=bias)
    file.weights(f"{block}.ffn_down", FF, WIDTH, bias=bias)


def _patches(file: TowerFile, patch: int, *, bias: bool) -> None:
    file.key("patch_size", patch)
    file.weights("v.patch_embd", patch, patch, 3, WIDTH, bias=bias)


def _pixtral_layers(file: TowerFile, patch: int, side: int) -> None:
    """Layers without any bias. The only norm beside them is before the first layer."""
    file.plain_key("clip.use_silu", True)
    file.key("attention.layer_norm_epsilon", 1e-5)
    file.key("image_size", side)
    _patches(file, patch, bias=False)
    file.norm("v.pre_ln", WIDTH, bias=False)
    _layers(file, rms=True, bias=False, gate=True, post_ln=False)


def _patch_merger(file: TowerFile, merged: int) -> None:
    file.key("spatial_merge_size", merged)
    file.norm("mm.input_norm", WIDTH, bias=False)
    file.weights("mm.patch_merger", merged**2 * WIDTH, WIDTH)


def _pixtral(file: TowerFile) -> None:
    _pixtral_layers(file, 16, 1024)
    file.weights("mm.1", WIDTH, N_EMBD, bias=True)
    file.weights("mm.2", N_EMBD, N_EMBD, bias=True)
    file.tensor("v.token_embd.img_break", N_EMBD)


def _mistral3(file: TowerFile) -> None:
    _merged_pixtral(file, 1540)
    file.tensor("v.token_embd.img_break", N_EMBD)


def _lightonocr(file: TowerFile) -> None:
    _merged_pixtral(file, 560)


def _merged_pixtral(file: TowerFile, side: int) -> None:
    _pixtral_layers(file, 14, side)
    _patch_merger(file, 2)
    file.weights("mm.1", WIDTH, N_EMBD)
    file.weights("mm.2", N_EMBD, N_EMBD)


def _llama4(file: TowerFile) -> None:
    side, patch, merged = 224, 14, 2
    file.plain_key("clip.use_gelu", True)
    file.keys(image_size=side, patch_size=patch)
    file.key("projector.scale_factor", merged)
    file.tensor("v.class_embd", WIDTH)
    file.weights("v.patch_embd", patch * patch * 3, WIDTH)
    file.tensor("v.position_embd.weight", WIDTH, (side // patch) ** 2 + 1)
    file.norm("v.pre_ln", WIDTH)
    _layers(file)
    file.weights("mm.model.mlp.1", merged**2 * WIDTH, 256)
    file.weights("mm.model.mlp.2", 256, 256)
    file.weights("mm.model.fc", 256, N_EMBD)


def _merger(file: TowerFile, merged: int, first: str) -> None:
    """A norm of patches, and two products of patches that are merged."""
    file.norm("mm.input_norm", WIDTH)
    file.weights(first, merged**2 * WIDTH, merged**2 * WIDTH, bias=True)
    file.weights("mm.2", merged**2 * WIDTH, N_EMBD, bias=True)


def _kimivl(file: TowerFile) -> None:
    grid, patch, merged = 16, 14, 2
    file.plain_key("clip.use_gelu", True)
    file.key("attention.layer_norm_epsilon", 1e-5)
    file.key("image_size", grid * patch)
    file.key("projector.scale_factor", merged)
    _patches(file, patch, bias=True)
    file.tensor("v.position_embd.weight", WIDTH, grid**2)
    _layers(file)
    _merger(file, merged, "mm.1")


def _kimik25(file: TowerFile) -> None:
    grid, patch, merged = 16, 14, 2
    file.plain_key("clip.use_gelu", True)
    file.key("attention.layer_norm_epsilon", 1e-5)
    file.keys(image_size=grid * patch, image_min_pixels=8 * patch**2, image_max_pixels=4096 * patch**2)
    for name, value in (("height", grid), ("width", grid), ("time", 4)):
        file.plain_key(f"vision.pos_emb_{name}", value)
    file.key("projector.scale_factor", merged)
    _patches(file, patch, bias=True)
    file.tensor("v.position_embd.weight", WIDTH, grid, grid)
    _layers(file, fused=True)
    _merger(file, merged, "mm.1")


def _hunyuanvl(file: TowerFile) -> None:
    """The projector is two convolutions. Each row of tokens has one more at its end."""
    grid, patch, merged = 16, 16, 2
    file.plain_key("clip.use_gelu", True)
    file.key("attention.layer_norm_epsilon", 1e-5)
    file.keys(image_size=grid * patch, image_min_pixels=128**2, image_max_pixels=512**2, spatial_merge_size=merged)
    _patches(file, patch, bias=True)
    file.tensor("v.position_embd.weight", WIDTH, grid**2)
    _layers(file, post_ln=False)
    file.norm("mm.pre_norm", WIDTH, bias=False)
    file.weights("mm.0", merged, merged, WIDTH, 2 * WIDTH, bias=True)
    file.tensor("mm.2.weight", 1, 1, 2 * WIDTH, 4 * WIDTH, kind="F16")
    file.tensor("mm.2.bias", 4 * WIDTH)
    file.weights("mm.model.fc", 4 * WIDTH, N_EMBD, bias=True)
    file.norm("mm.post_norm", N_EMBD, bias=False)
    file.tensor("v.image_newline", 4 * WIDTH)
    for name in ("mm.image_begin", "mm.image_end", "v.view_seperator"):
        file.tensor(name, N_EMBD)


def _nemotron_v2_vl(file: TowerFile) -> None:
    """Several class embeddings. Only the squares of positive numbers pass in the projector."""
    side, patch, merged, registers = 224, 16, 2, 10
    file.plain_key("clip.use_gelu", True)
    file.key("image_size", side)
    file.key("projector.scale_factor", merged)
    _patches(file, patch, bias=False)
    file.tensor("v.class_embd", WIDTH, registers)
    file.tensor("v.position_embd.weight", WIDTH, (side // patch) ** 2)
    _layers(file, fused=True, post_ln=False)
    file.norm("mm.model.mlp.0", merged**2 * WIDTH, bias=False)
    file.weights("mm.model.mlp.1", merged**2 * WIDTH, 512)
    file.weights("mm.model.mlp.3", 512, N_EMBD)


def _dots_keys(file: TowerFile, patch: int) -> None:
    """``image_size`` is 0, because images of any size are read."""
    file.plain_key("clip.use_silu", True)
    file.key("attention.layer_norm_epsilon", 1e-5)
    file.keys(image_size=0, image_min_pixels=3136, image_max_pixels=4096 * patch**2)


def _dots_ocr(file: TowerFile) -> None:
    patch, merged = 14, 2
    _dots_keys(file, patch)
    file.key("projector.scale_factor", merged)
    _patches(file, patch, bias=True)
    file.norm("v.pre_ln", WIDTH, bias=False)
    _layers(file, rms=True, bias=False, gate=True, fused=True, post_ln=False)
    file.norm("mm.post_norm", WIDTH, bias=False)
    _merger(file, merged, "mm.0")


def _deepseek4v(file: TowerFile) -> None:
    """The tower makes the tokens at begin and end of image and rows too, and the rows are interleaved by twos."""
    patch, merged = 14, 3
    file.plain_key("clip.use_silu", True)
    file.keys(image_size=patch * merged * 16, image_min_pixels=(patch * merged * 4) ** 2)
    file.key("projector.scale_factor", merged)
    _patches(file, patch, bias=True)
    _layers(file, rms=True, bias=False, gate=True, fused=True)
    file.weights("mm.1", merged**2 * WIDTH, 256, bias=True)
    file.weights("mm.2", 256, N_EMBD, bias=True)
    for name in ("v.image_newline", "v.token_embd.img_start", "v.token_embd.img_end", "v.token_embd.img_pad"):
        file.tensor(name, N_EMBD)


def _dots3note_v(file: TowerFile) -> None:
    """Most layers have experts, and not the same number each; the first layer has none."""
    patch, merged, ff = 14, 2, 96
    experts = (0, 4, 8)
    _dots_keys(file, patch)
    file.keys(spatial_merge_size=merged, expert_count_per_layer=experts, expert_used_count=2)
    _patches(file, patch, bias=False)
    file.norm("v.pre_ln", WIDTH, bias=False)
    _layer_keys(file, len(experts))
    for i, n_expert in enumerate(experts):
        block = f"v.blk.{i}"
        _attention(file, block, bias=False, fused=True)
        for name in ("attn_q_norm", "attn_k_norm"):
            file.norm(f"{block}.{name}", WIDTH // HEADS, bias=False)
        for name in ("ln1", "ln2"):
            file.norm(f"{block}.{name}", WIDTH, bias=False)
        if n_expert == 0:
            _feed_forward(file, block, bias=False, gate=True)
            continue
        file.weights(f"{block}.ffn_gate_inp", WIDTH, n_expert, kind="F32", gain=3.0)
        file.tensor(f"{block}.exp_probs_b.weight", n_expert)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            file.tensor(f"{block}.{name}.weight", WIDTH, ff, n_expert, kind="F16", gain=WIDTH**-0.5)
        file.tensor(f"{block}.ffn_down_exps.weight", ff, WIDTH, n_expert, kind="F16", gain=ff**-0.5)
    file.norm("mm.post_norm", WIDTH, bias=False)
    _merger(file, merged, "mm.0")


def _sam(file: TowerFile, out: int) -> None:
    """The tower before the tower: layers with windows, every third with all. Positions are added to the attention."""
    width, heads, n_layer, window, grid, patch = 64, 2, 3, 14, 64, 16
    file.key("sam.block_count", n_layer)
    file.key("sam.embedding_length", width)
    file.key("sam.head_count", heads)
    file.keys(window_size=window, image_size=1024, patch_size=patch)
    file.tensor("v.sam.pos_embd.weight", width, grid, grid)
    file.weights("v.sam.patch_embd", patch, patch, 3, width, bias=True)
    for i in range(n_layer):
        block = f"v.sam.blk.{i}"
        for name in ("pre_ln", "post_ln"):
            file.norm(f"{block}.{name}", width)
        file.weights(f"{block}.attn.qkv", width, 3 * width, bias=True)
        file.weights(f"{block}.attn.out", width, width, bias=True)
        for name in ("pos_h", "pos_w"):
            file.tensor(f"{block}.attn.{name}.weight", width // heads, 2 * (window if i % 3 < 2 else grid) - 1)
        file.weights(f"{block}.mlp.lin1", width, 4 * width, bias=True)
        file.weights(f"{block}.mlp.lin2", 4 * width, width, bias=True)
    for name, side, n_in in (("neck.0", 1, width), ("neck.2", 3, 64)):
        file.weights(f"v.sam.{name}", side, side, n_in, 64, kind="F32")
    for name in ("neck.1", "neck.3"):
        file.norm(f"v.sam.{name}", 64)
    file.weights("v.sam.net_2", 3, 3, 64, 96, kind="F32")
    file.weights("v.sam.net_3", 3, 3, 96, out, kind="F32")


def _deepseekocr(file: TowerFile) -> None:
    """Convolutions, then layers with a class embedding. The projector reads the outputs of both."""
    file.plain_key("clip.use_gelu", True)
    file.keys(preproc_min_tiles=2, preproc_max_tiles=9)
    _sam(file, WIDTH)
    file.tensor("v.class_embd", WIDTH)
    file.tensor("v.position_embd.weight", WIDTH, 16 * 16 + 1)
    file.norm("v.pre_ln", WIDTH)
    _layers(file, fused=True, post_ln=False)
    file.weights("mm.model.fc", 2 * WIDTH, N_EMBD, bias=True)
    file.tensor("v.image_newline", N_EMBD)
    file.tensor("v.view_seperator", N_EMBD, 1)


def _deepseekocr2(file: TowerFile) -> None:
    """The layers after the convolutions are those of a language model. They read learned queries after the patches."""
    n_kv = 2
    file.plain_key("clip.use_gelu", True)
    file.keys(preproc_min_tiles=2, preproc_max_tiles=6)
    _sam(file, WIDTH)
    _layer_keys(file, LAYERS)
    file.key("attention.head_count_kv", n_kv)
    for i in range(LAYERS):
        block = f"v.blk.{i}"
        for name, width in (("attn_q", WIDTH), ("attn_k", WIDTH // HEADS * n_kv), ("attn_v", WIDTH // HEADS * n_kv)):
            file.weights(f"{block}.{name}", WIDTH, width, bias=True)
        file.weights(f"{block}.attn_out", WIDTH, WIDTH)
        for name in ("ln1", "ln2"):
            file.norm(f"{block}.{name}", WIDTH, bias=False)
        _feed_forward(file, block, bias=False, gate=True)
    file.norm("v.post_ln", WIDTH, bias=False)
    for side, n in ((768, 144), (1024, 256)):
        file.tensor(f"v.resample_query_{side}.weight", WIDTH, n, gain=1.0)
    file.weights("mm.model.fc", WIDTH, N_EMBD, bias=True)
    file.tensor("v.view_seperator", N_EMBD, 1)


def _granite4_vision(file: TowerFile) -> None:
    """Four projectors, of the outputs of several layers, with attention in windows. An embedding is those of all."""
    side, patch, window, query, layers = 256, 16, 8, 4, (0, 1, 2, 2)
    file.plain_key("clip.use_gelu", True)
    file.keys(image_size=side, preproc_image_size=side, projection_dim=N_EMBD // len(layers), feature_layer=layers)
    file.key("projector.query_side", query)
    file.key("projector.window_side", window)
    file.key("projector.spatial_offsets", (-1, -1, 0, 3))
    sizes = ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3), (3, 2))
    file.key("image_grid_pinpoints", [side * n for size in sizes for n in size])
    _patches(file, patch, bias=True)
    file.tensor("v.position_embd.weight", WIDTH, (side // patch) ** 2)
    _layers(file)
    file.tensor("v.image_newline", N_EMBD // len(layers))
    for i in range(len(layers)):
        block = f"v.proj_blk.{i}"
        file.tensor(f"{block}.img_pos", WIDTH, window**2, 1)
        file.tensor(f"{block}.query", WIDTH, query**2, 1)
        file.weights(f"{block}.linear", WIDTH, N_EMBD // len(layers), bias=True)
        for name in ("norm", "post_norm", "self_attn_norm", "cross_attn_norm", "ffn_norm"):
            file.norm(f"{block}.{name}", WIDTH)
        for name in ("q", "k", "v", "out"):
            file.weights(f"{block}.self_attn_{name}", WIDTH, WIDTH, bias=True)
            file.weights(f"{block}.cross_attn_{name}", WIDTH, WIDTH, bias=True)
        _feed_forward(file, block, bias=True, gate=False)


TOWERS = {
    "pixtral": Tower("one token for each patch, and one at the end of each row", "pixtral", _pixtral),
    "mistral3": Tower("as pixtral, with four patches in one token", "pixtral", _mistral3),
    "llama4": Tower("tiles of one size and class embedding, patches are a product", "llama4", _llama4),
    "kimivl": Tower("learned positions are resized", "kimivl", _kimivl),
    "kimik25": Tower("as kimivl, with positions in three dimensions", "kimik25", _kimik25),
    "lightonocr": Tower("as mistral3, limited by the longest edge", "lightonocr", _lightonocr),
    "hunyuanvl": Tower("convolutions after the layers", "hunyuanvl", _hunyuanvl, model="qwen35moe"),
    "nemotron_v2_vl": Tower("several class embeddings", "nemotron_v2_vl", _nemotron_v2_vl),
    "dots_ocr": Tower("M-RoPE in the tower, and no size of images", "dots_ocr", _dots_ocr),
    "dots3note_v": Tower("as dots_ocr, with experts", "dots3note_v", _dots3note_v),
    "deepseekocr": Tower("two towers: positions in the attention, then a class embedding", "deepseekocr", _deepseekocr),
    "deepseekocr2": Tower("two towers: the second is causal, with learned queries", "deepseekocr2", _deepseekocr2),
    "deepseek4v": Tower("interleaved rows, and tokens around them", "deepseek4v", _deepseek4v),
    "granite4_vision": Tower("tiles, and several projectors", "granite4_vision", _granite4_vision),
}
