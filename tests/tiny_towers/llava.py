"""Towers of LLaVA and its kin: MobileVLM, GLM-Edge, MiniCPM-V, CogVLM; and that of Reka, which is of convolutions."""

from __future__ import annotations

from functools import partial

from tiny_towers.file import N_EMBD, Tower, TowerFile
from tiny_towers.plain import FF, HEADS, LAYERS, PATCH, WIDTH, layers

_SIDE = 112
_N_PATCHES = (_SIDE // PATCH) ** 2
_MOBILE_SIDE = 24 * PATCH  # libmtmd knows MobileVLM's grid of 24x24 patches by heart
# With the real numbers of patches the shard device computes products some rows, and attention some windows, at a time.
_EDGE_SIDE = 48 * PATCH
_WINDOWS_SIDE = 32 * PATCH
_BUCKETS = 70  # the places that SigLIP's positions have along one side, in MiniCPM-V
_MERGED = 4  # patches that become one token in a merger


def _clip(file: TowerFile, *, side: int = _SIDE) -> None:
    """OpenAI's CLIP: a class token, and a norm before the layers, but none after them."""
    file.plain_key("clip.use_gelu", False)
    file.key("image_size", side)
    layers(file, swapped=True)
    file.tensor("v.class_embd", WIDTH)
    file.weights("v.patch_embd", PATCH, PATCH, 3, WIDTH)
    file.tensor("v.position_embd.weight", WIDTH, (side // PATCH) ** 2 + 1, kind="F16")
    file.norm("v.pre_ln", WIDTH)


def _siglip(
    file: TowerFile, *, side: int = _SIDE, positions: int = _N_PATCHES, old: bool = True, post_norm: bool = True
) -> None:
    """SigLIP: no class token, and a norm after the layers, which some converters leave out.

    :param old: as the oldest converters write it.
    """
    file.plain_key("clip.use_gelu", True)
    file.key("image_size", side)
    layers(file, swapped=old)
    file.weights("v.patch_embd", PATCH, PATCH, 3, WIDTH, bias=True)
    file.tensor("v.position_embd.weight", WIDTH, positions, kind="F16" if old else "F32")
    if post_norm:
        file.norm("v.post_ln", WIDTH)


def _mlp(file: TowerFile, n_features: int = 1) -> None:
    file.weights("mm.0", n_features * WIDTH, N_EMBD, bias=True)
    file.weights("mm.2", N_EMBD, N_EMBD, gain=2.0, bias=True)


def _tiles(file: TowerFile) -> None:
    """Large images are also cut into tiles, on the grid that wastes the least."""
    grids = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    file.key("image_grid_pinpoints", [_SIDE * count for grid in grids for count in grid])
    file.keys(mm_patch_merge_type="spatial_unpad")
    file.tensor("model.image_newline", N_EMBD)  # libmtmd does not read it


def _llava(file: TowerFile) -> None:
    # Nothing says which layer to take. libmtmd then leaves out the last one.
    _clip(file)
    _mlp(file)


def _llava_next(file: TowerFile) -> None:
    _clip(file)
    _tiles(file)
    file.key("feature_layer", [LAYERS])
    _mlp(file)


def _moondream(file: TowerFile) -> None:
    _siglip(file)
    _mlp(file)


def _granite(file: TowerFile) -> None:
    features = [1, 2, LAYERS]
    _siglip(file, post_norm=False)
    _tiles(file)
    file.key("feature_layer", features)
    _mlp(file, len(features))


def _yi(file: TowerFile) -> None:
    # libmtmd tells it from LLaVA's by mm.3, and calls it mlp_norm.
    _clip(file)
    file.weights("mm.0", WIDTH, N_EMBD, bias=True)
    file.norm("mm.1", N_EMBD)
    file.weights("mm.3", N_EMBD, N_EMBD, gain=2.0, bias=True)
    file.norm("mm.4", N_EMBD)


def _ldp(file: TowerFile) -> None:
    _clip(file, side=_MOBILE_SIDE)
    file.weights("mm.model.mlp.1", WIDTH, N_EMBD, bias=True)
    file.weights("mm.model.mlp.3", N_EMBD, N_EMBD, gain=2.0, bias=True)
    for i in (1, 2):
        block = f"mm.model.mb_block.{i}.block"
        file.weights(f"{block}.0.0", 3, 3, N_EMBD)
        file.norm(f"{block}.0.1", N_EMBD)
        file.weights(f"{block}.1.fc1", N_EMBD, N_EMBD // 4, bias=True)
        file.weights(f"{block}.1.fc2", N_EMBD // 4, N_EMBD, bias=True)
        file.weights(f"{block}.2.0", N_EMBD, N_EMBD)
        file.norm(f"{block}.2.1", N_EMBD)


def _ldpv2(file: TowerFile) -> None:
    _clip(file, side=_MOBILE_SIDE)
    file.weights("mm.model.mlp.0", WIDTH, N_EMBD, bias=True)
    file.weights("mm.model.mlp.2", N_EMBD, N_EMBD, gain=2.0, bias=True)
    file.tensor("mm.model.peg.0.weight", 3, 3, N_EMBD, kind="F16", gain=0.3)
    file.tensor("mm.model.peg.0.bias", N_EMBD)


def _glm_edge(file: TowerFile) -> None:
    _siglip(file, side=_EDGE_SIDE, positions=(_EDGE_SIDE // PATCH) ** 2)
    file.key("projection_dim", 0)
    file.weights("adapter.conv", 2, 2, WIDTH, N_EMBD, bias=True)
    file.weights("adapter.linear.linear", N_EMBD, N_EMBD)
    file.norm("adapter.linear.norm1", N_EMBD)
    file.weights("adapter.linear.dense_h_to_4h", N_EMBD, FF)
    file.weights("adapter.linear.gate", N_EMBD, FF)
    file.weights("adapter.linear.dense_4h_to_h", FF, N_EMBD)
    for name in ("boi", "eoi"):
        file.tensor(f"adapter.{name}", N_EMBD)


def _minicpmv(file: TowerFile, version: int, n_queries: int, *, told: bool = False, one_more: bool = False) -> None:
    """A resampler: learned questions to the patches, whose positions are of sines. An image may have any shape.

    :param told: the file says how many questions there are. Else libmtmd knows it from the version.
    :param one_more: there is a layer more than the file says, as in those of the first converter.
    """
    _siglip(file, positions=_BUCKETS**2)
    if one_more:
        file.key("block_count", LAYERS - 1)
    file.key("projection_dim", 0)
    file.signed_key("clip.minicpmv_version", version)
    file.plain_key("clip.minicpmv_query_num", n_queries if told else 0)
    file.tensor("resampler.query", N_EMBD, n_queries, gain=1.0)
    file.tensor("resampler.pos_embed_k", N_EMBD, 16)  # libmtmd reads it and does not use it
    file.weights("resampler.kv", WIDTH, N_EMBD)
    file.weights("resampler.proj", N_EMBD, N_EMBD)
    for name in ("q", "k", "v", "out"):
        file.weights(f"resampler.attn.{name}", N_EMBD, N_EMBD, bias=True)
    for name in ("q", "kv", "post"):
        file.norm(f"resampler.ln_{name}", N_EMBD)


def _minicpmv4_6(file: TowerFile, *, merged_in_layers: bool) -> None:
    """Four patches become one token after the layers, and also in the middle of them.

    :param merged_in_layers: false for a converter that was asked for four times as many tokens.
    """
    _siglip(file, side=_WINDOWS_SIDE, positions=_BUCKETS**2, old=False)
    file.key("projector.scale_factor", 4 if merged_in_layers else 2)
    file.key("wa_layer_indexes", [1])
    if merged_in_layers:
        file.norm("v.vit_merger.ln1", WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            file.weights(f"v.vit_merger.{name}", WIDTH, WIDTH, bias=True)
        file.norm("v.vit_merger.ds_ln", _MERGED * WIDTH)
        file.weights("v.vit_merger.ds_ffn_up", _MERGED * WIDTH, _MERGED * FF, bias=True)
        file.weights("v.vit_merger.ds_ffn_down", _MERGED * FF, WIDTH, bias=True)
    file.norm("mm.input_norm", _MERGED * WIDTH)
    file.weights("mm.up", _MERGED * WIDTH, _MERGED * WIDTH, bias=True)
    file.weights("mm.down", _MERGED * WIDTH, N_EMBD, bias=True)


def _cogvlm(file: TowerFile) -> None:
    """The norms come after attention and after the feed-forward network, and not before them."""
    file.keys(embedding_length=WIDTH, feed_forward_length=FF, block_count=LAYERS, patch_size=PATCH, image_size=_SIDE)
    file.key("attention.head_count", HEADS)
    file.tensor("v.class_embd", WIDTH, 1)
    file.weights("v.patch_embd", PATCH, PATCH, 3, WIDTH, bias=True)
    file.tensor("v.position_embd.weight", WIDTH, _N_PATCHES + 1)
    for i in range(LAYERS):
        file.weights(f"v.blk.{i}.attn_qkv", WIDTH, 3 * WIDTH, bias=True)
        file.weights(f"v.blk.{i}.attn_out", WIDTH, WIDTH, bias=True)
        file.weights(f"v.blk.{i}.ffn_up", WIDTH, FF, bias=True)
        file.weights(f"v.blk.{i}.ffn_down", FF, WIDTH, bias=True)
        file.norm(f"v.blk.{i}.ln1", WIDTH)
        file.norm(f"v.blk.{i}.ln2", WIDTH)
    file.weights("mm.model.fc", WIDTH, N_EMBD)
    file.norm("mm.post_fc_norm", N_EMBD)
    file.weights("mm.up", N_EMBD, FF)
    file.weights("mm.gate", N_EMBD, FF)
    file.weights("mm.down", FF, N_EMBD)
    for name in ("boi", "eoi"):
        file.tensor(f"v.{name}", N_EMBD, 1, 1)


def _yasa2(file: TowerFile) -> None:
    """ConvNeXt V2: stages of convolutions, each with half the side of the last one. An image becomes 8x8 tokens."""
    side, patch, kernel, n_blocks = 512, 4, 7, 1
    widths = (16, 32, 64, 128)
    file.keys(embedding_length=widths[-1], feed_forward_length=4 * widths[-1], block_count=0)
    file.keys(patch_size=patch, image_size=side)
    file.key("attention.head_count", 0)
    file.weights("v.patch_embd", patch, patch, 3, widths[0], bias=True)
    file.norm("v.patch_ln", widths[0])
    file.norm("v.backbone_ln", widths[-1])  # libmtmd reads it and does not use it
    for i, width in enumerate(widths):
        stage = f"v.stage.{i}"
        if i:
            file.norm(f"{stage}.down.ln", widths[i - 1])
            file.weights(f"{stage}.down.conv", 2, 2, widths[i - 1], width, bias=True)
        for block in range(n_blocks):
            name = f"{stage}.blk.{block}"
            file.tensor(f"{name}.dw.weight", kernel, kernel, 1, width, kind="F16", gain=1 / kernel)
            file.tensor(f"{name}.dw.bias", width)
            file.norm(f"{name}.ln", width)
            file.weights(f"{name}.pw1", width, 4 * width, bias=True)
            file.norm(f"{name}.grn", 4 * width)
            file.weights(f"{name}.pw2", 4 * width, width, bias=True)
    file.tensor("v.vision_pos_embed", widths[-1], (side // patch // 2 ** (len(widths) - 1)) ** 2)
    file.weights("mm.0", widths[-1], N_EMBD, bias=True)
    file.weights("mm.2", N_EMBD, N_EMBD, gain=2.0, bias=True)


TOWERS: dict[str, Tower] = {
    "llava": Tower("CLIP and two products", "mlp", _llava),
    "llava_next": Tower("LLaVA with tiles, and with the layer that it takes", "mlp", _llava_next),
    "moondream": Tower("SigLIP and two products", "mlp", _moondream),
    "granite": Tower("SigLIP of which several layers are joined, with tiles", "mlp", _granite),
    "yi": Tower("LLaVA with norms in its projector", "mlp", _yi),
    "minicpmv2_5": Tower("a resampler with 96 questions", "resampler", partial(_minicpmv, version=2, n_queries=96)),
    "minicpmv2_6": Tower(
        "a resampler, and a layer of no use", "resampler", partial(_minicpmv, version=3, n_queries=64, one_more=True)
    ),
    "minicpmv4": Tower(
        "a resampler with 64 questions", "resampler", partial(_minicpmv, version=5, n_queries=64, told=True)
    ),
    "minicpmv4_6": Tower("merges patches in windows", "minicpmv4_6", partial(_minicpmv4_6, merged_in_layers=True)),
    "minicpmv4_6_4x": Tower("merges patches once", "minicpmv4_6", partial(_minicpmv4_6, merged_in_layers=False)),
    "adapter": Tower("GLM-Edge: a convolution, and tokens of its own around", "adapter", _glm_edge),
    "ldp": Tower("MobileVLM: depthwise convolutions", "ldp", _ldp),
    "ldpv2": Tower("MobileVLM 2: pooling, and a depthwise convolution", "ldpv2", _ldpv2),
    "cogvlm": Tower("norms after, and tokens of its own around", "cogvlm", _cogvlm),
    "yasa2": Tower("Reka's ConvNeXt", "yasa2", _yasa2),
}
