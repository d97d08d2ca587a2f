"""Makes a vision tower with random weights for SmolLM2. Its embeddings have no meaning, but different images give
different answers.

It has 8 MiB in 4 layers, and a step takes about 2 MiB, so it is streamed within a small budget.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, FF, LAYERS, PATCH, SIDE, N_EMBD = 256, 1024, 4, 14, 224, 576


def make(path: Path) -> None:
    """Writes the mmproj file: 224 x 224 pixels are 64 tokens."""
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_string("general.type", "mmproj")
    writer.add_name("random tower")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "internvl")
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "image_size": SIDE,
        "patch_size": PATCH,
        "embedding_length": WIDTH,
        "feed_forward_length": FF,
        "block_count": LAYERS,
        "projection_dim": N_EMBD,
        "attention.head_count": 4,
        "projector.scale_factor": 2,
        "preproc_min_tiles": 1,
        "preproc_max_tiles": 1,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        values = rng.standard_normal((rows, columns), dtype=np.float32) * gain / columns**0.5
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))
        vector(f"{name}.bias", rows, 0.0)

    def vector(name: str, size: int, mean: float) -> None:
        writer.add_tensor(name, (mean + 0.1 * rng.standard_normal(size)).astype(np.float32))

    n_patches = (SIDE // PATCH) ** 2
    vector("v.class_embd", WIDTH, 0.0)
    patches = rng.standard_normal((WIDTH, 3, PATCH, PATCH), dtype=np.float32) / (3 * PATCH**2) ** 0.5
    writer.add_tensor("v.patch_embd.weight", patches.astype(np.float16))
    vector("v.patch_embd.bias", WIDTH, 0.0)
    writer.add_tensor("v.position_embd.weight", 0.1 * rng.standard_normal((n_patches + 1, WIDTH), dtype=np.float32))
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            matrix(f"v.blk.{i}.{name}", WIDTH, WIDTH)
        matrix(f"v.blk.{i}.ffn_up", FF, WIDTH)
        matrix(f"v.blk.{i}.ffn_down", WIDTH, FF)
        for name in ("ln1", "ln2"):
            vector(f"v.blk.{i}.{name}.weight", WIDTH, 1.0)
            vector(f"v.blk.{i}.{name}.bias", WIDTH, 0.0)
        for name in ("ls1", "ls2"):
            vector(f"v.blk.{i}.{name}.weight", WIDTH, 1.0)
    vector("v.post_ln.weight", WIDTH, 1.0)
    vector("v.post_ln.bias", WIDTH, 0.0)
    vector("mm.model.mlp.0.weight", 4 * WIDTH, 1.0)
    vector("mm.model.mlp.0.bias", 4 * WIDTH, 0.0)
    matrix("mm.model.mlp.1", N_EMBD, 4 * WIDTH)
    matrix("mm.model.mlp.3", N_EMBD, N_EMBD, gain=0.2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
