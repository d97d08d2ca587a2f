"""Makes a tower with random weights that hears, for the tiny llama. Its embeddings have no meaning, but different
sounds give different answers.

It has an encoder like Whisper's and Ultravox' projector. 30 s of sound, or less, are 375 tokens.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, FF, LAYERS, MELS, N_POS, HIDDEN, N_EMBD = 128, 512, 3, 80, 1500, 512, 256
STACK = 4
"""Positions that become one token. With Ultravox' own number, 8, the pinned libmtmd ends the process: it expects 187
tokens and computes 188."""


def make(path: Path, *, stack: int = STACK) -> None:
    """Writes the mmproj file."""
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_string("general.type", "mmproj")
    writer.add_name("random ear")
    writer.add_bool("clip.has_audio_encoder", True)
    writer.add_string("clip.projector_type", "ultravox")
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "embedding_length": WIDTH,
        "feed_forward_length": FF,
        "block_count": LAYERS,
        "projection_dim": N_EMBD,
        "attention.head_count": 4,
        "num_mel_bins": MELS,
        "projector.stack_factor": stack,
    }.items():
        writer.add_uint32(f"clip.audio.{key}", value)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)

    def weights(name: str, *shape: int, gain: float = 1.0) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * gain / np.prod(shape[1:]) ** 0.5
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))

    def vector(name: str, *shape: int, mean: float = 0.0) -> None:
        writer.add_tensor(name, (mean + 0.1 * rng.standard_normal(shape)).astype(np.float32))

    for index, channels in ((1, MELS), (2, WIDTH)):
        weights(f"a.conv1d.{index}", WIDTH, channels, 3)
        vector(f"a.conv1d.{index}.bias", WIDTH, 1)
    vector("a.position_embd.weight", N_POS, WIDTH)
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            weights(f"a.blk.{i}.{name}", WIDTH, WIDTH)
            if name != "attn_k":
                vector(f"a.blk.{i}.{name}.bias", WIDTH)
        for name, rows, columns in (("ffn_up", FF, WIDTH), ("ffn_down", WIDTH, FF)):
            weights(f"a.blk.{i}.{name}", rows, columns)
            vector(f"a.blk.{i}.{name}.bias", rows)
        for name in ("ln1", "ln2"):
            vector(f"a.blk.{i}.{name}.weight", WIDTH, mean=1.0)
            vector(f"a.blk.{i}.{name}.bias", WIDTH)
    vector("a.post_ln.weight", WIDTH, mean=1.0)
    vector("a.post_ln.bias", WIDTH)
    vector("mm.a.norm_pre.weight", WIDTH * stack, mean=1.0)
    weights("mm.a.mlp.1", HIDDEN, WIDTH * stack)
    vector("mm.a.norm_mid.weight", HIDDEN // 2, mean=1.0)
    weights("mm.a.mlp.2", N_EMBD, HIDDEN // 2, gain=0.2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
