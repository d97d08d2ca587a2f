"""Towers of plain transformer layers."""

from __future__ import annotations

from tiny_towers.file import N_EMBD, Tower, TowerFile

WIDTH, FF, LAYERS, HEADS, PATCH = 128, 512, 3, 4, 14


def layers(file: TowerFile, *, swapped: bool = False) -> None:
    """The keys and tensors of plain layers: two norms, attention, and a feed-forward network without a gate.

    :param swapped: what goes up is named down, as in the files of the oldest converters.
    """
    up, down = ("ffn_down", "ffn_up") if swapped else ("ffn_up", "ffn_down")
    file.keys(embedding_length=WIDTH, feed_forward_length=FF, block_count=LAYERS, patch_size=PATCH)
    file.key("attention.head_count", HEADS)
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v"):
            file.weights(f"v.blk.{i}.{name}", WIDTH, WIDTH, bias=True)
        file.weights(f"v.blk.{i}.attn_out", WIDTH, WIDTH, bias=True)
        file.weights(f"v.blk.{i}.{up}", WIDTH, FF, bias=True)
        file.weights(f"v.blk.{i}.{down}", FF, WIDTH, bias=True)
        file.norm(f"v.blk.{i}.ln1", WIDTH)
        file.norm(f"v.blk.{i}.ln2", WIDTH)


def _internvl(file: TowerFile) -> None:
    side, merged = 224, 2
    file.plain_key("clip.use_gelu", True)
    layers(file)
    file.keys(image_size=side, preproc_min_tiles=1, preproc_max_tiles=4)
    file.key("projector.scale_factor", merged)
    file.tensor("v.class_embd", WIDTH)
    file.weights("v.patch_embd", PATCH, PATCH, 3, WIDTH, bias=True)
    file.tensor("v.position_embd.weight", WIDTH, (side // PATCH) ** 2 + 1)
    for i in range(LAYERS):
        for name in ("ls1", "ls2"):
            file.tensor(f"v.blk.{i}.{name}.weight", WIDTH, mean=1.0)
    file.norm("v.post_ln", WIDTH)
    file.norm("mm.model.mlp.0", merged**2 * WIDTH)
    file.weights("mm.model.mlp.1", merged**2 * WIDTH, N_EMBD, bias=True)
    file.weights("mm.model.mlp.3", N_EMBD, N_EMBD, gain=0.2, bias=True)


TOWERS: dict[str, Tower] = {
    "internvl": Tower("tiles of one size, four patches in one token", "internvl", _internvl),
}
