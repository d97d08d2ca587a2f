"""Towers that hear."""

from __future__ import annotations

from collections.abc import Callable

from tiny_towers.file import N_EMBD, Tower, TowerFile

WIDTH, FF, LAYERS, HEADS = 64, 256, 2, 4
HIDDEN = 128  # of projectors
CHANNELS = 16  # of two-dimensional convolutions
MELS = 128


def _keys(file: TowerFile, *, layers: int = LAYERS, mels: int = MELS, ff: int = FF) -> None:
    file.keys(embedding_length=WIDTH, feed_forward_length=ff, block_count=layers, num_mel_bins=mels)
    file.key("attention.head_count", HEADS)
    file.key("attention.layer_norm_epsilon", 1e-5)


def _matrices(file: TowerFile, prefix: str, names: str, *, inputs: int = WIDTH, bias: bool = True) -> None:
    """Matrices that make a state of the tower's width from ``inputs`` numbers."""
    for name in names.split():
        file.weights(f"{prefix}.{name}", inputs, WIDTH, bias=bias)


def _feed_forward(file: TowerFile, prefix: str, *, number: str = "", gate: bool = False, bias: bool = True) -> None:
    for name in ("ffn_up", "ffn_gate")[: 1 + gate]:
        file.weights(f"{prefix}.{name}{number}", WIDTH, FF, bias=bias)
    file.weights(f"{prefix}.ffn_down{number}", FF, WIDTH, bias=bias)


def _norms(file: TowerFile, prefix: str, names: str, *, bias: bool = True) -> None:
    for name in names.split():
        file.norm(f"{prefix}.{name}", WIDTH, bias=bias)


# --------------------------------------------------------------------------------------------------- Whisper's encoder


def _whisper(file: TowerFile, *, layers: int = LAYERS, conv: str = "F16", post_norm: bool = True) -> None:
    """Two convolutions and plain layers, whose keys have no bias. A sound is cut into parts of 30 s, 1500 positions."""
    _keys(file, layers=layers)
    for index, channels in ((1, MELS), (2, WIDTH)):
        file.weights(f"a.conv1d.{index}", 3, channels, WIDTH, kind=conv)
        file.tensor(f"a.conv1d.{index}.bias", 1, WIDTH)
    file.tensor("a.position_embd.weight", WIDTH, 1500)
    for i in range(layers):
        _matrices(file, f"a.blk.{i}", "attn_q attn_v attn_out")
        _matrices(file, f"a.blk.{i}", "attn_k", bias=False)
        _feed_forward(file, f"a.blk.{i}")
        _norms(file, f"a.blk.{i}", "ln1 ln2")
    if post_norm:
        file.norm("a.post_ln", WIDTH)


def _mlp(file: TowerFile, inputs: int, *, bias: bool, second: int = 2) -> None:
    file.weights("mm.a.mlp.1", inputs, HIDDEN, bias=bias)
    file.weights(f"mm.a.mlp.{second}", HIDDEN, N_EMBD, bias=bias)


def _ultravox(file: TowerFile) -> None:
    """Four positions become one token. With Ultravox' own number, 8, the pinned libmtmd ends the process: it expects
    187 tokens and computes 188."""
    stack = 4
    _whisper(file)
    file.key("projector.stack_factor", stack)
    file.norm("mm.a.norm_pre", stack * WIDTH, bias=False)
    file.weights("mm.a.mlp.1", stack * WIDTH, 2 * HIDDEN)
    file.norm("mm.a.norm_mid", HIDDEN, bias=False)
    file.weights("mm.a.mlp.2", HIDDEN, N_EMBD)


def qwen2a(file: TowerFile) -> None:
    _whisper(file)
    file.weights("mm.a.fc", WIDTH, N_EMBD, bias=True)


def _voxtral(file: TowerFile) -> None:
    """Two means become one token. With Voxtral's own number, 4, the pinned libmtmd ends the process."""
    stack = 2
    _whisper(file)
    file.key("projector.stack_factor", stack)
    _mlp(file, stack * WIDTH, bias=False)


def _glma(file: TowerFile) -> None:
    stack = 4
    _whisper(file, post_norm=False)
    file.key("projector.stack_factor", stack)
    file.norm("mm.a.norm_pre", WIDTH)
    _mlp(file, stack * WIDTH, bias=True)
    for name in ("v.boi", "v.eoi"):
        file.tensor(name, N_EMBD)


def _meralion(file: TowerFile) -> None:
    stack = 15
    _whisper(file)
    file.key("projector.stack_factor", stack)
    file.norm("mm.a.norm_pre", stack * WIDTH)
    file.weights("mm.a.mlp.0", stack * WIDTH, HIDDEN, bias=True)
    for index, outputs in ((1, HIDDEN), (2, HIDDEN), (3, N_EMBD)):
        file.weights(f"mm.a.mlp.{index}", HIDDEN, outputs, bias=True)


def _music_flamingo(file: TowerFile) -> None:
    _whisper(file, conv="F32")
    _mlp(file, WIDTH, bias=True)


# ------------------------------------------------------------------------- plain layers after other first convolutions


def _conv2d(file: TowerFile, kind: str) -> None:
    """Three convolutions. Each halves the frames and the bands."""
    for index, channels in ((1, 1), (2, CHANNELS), (3, CHANNELS)):
        file.weights(f"a.conv2d.{index}", 3, 3, channels, CHANNELS, kind=kind)
        file.tensor(f"a.conv2d.{index}.bias", 1, 1, CHANNELS)
    file.weights("a.conv_out", CHANNELS * MELS // 8, WIDTH, kind=kind)


def _qwen3a(file: TowerFile) -> None:
    """Each second of a sound begins again at position 0."""
    _keys(file)
    _conv2d(file, "F16")
    file.tensor("a.position_embd.weight", WIDTH, 1500)
    for i in range(LAYERS):
        _matrices(file, f"a.blk.{i}", "attn_q attn_k attn_v attn_out")
        _feed_forward(file, f"a.blk.{i}")
        _norms(file, f"a.blk.{i}", "ln1 ln2")
    file.norm("a.post_ln", WIDTH)
    file.weights("mm.a.mlp.1", WIDTH, WIDTH, bias=True)
    file.weights("mm.a.mlp.2", WIDTH, N_EMBD, bias=True)


def _dots3note(file: TowerFile) -> None:
    """A gated feed-forward network, norms without bias, rotation of half of each head."""
    file.plain_key("clip.use_silu", True)
    _keys(file)
    _conv2d(file, "F32")
    for i in range(LAYERS):
        _matrices(file, f"a.blk.{i}", "attn_q attn_v attn_out")
        _matrices(file, f"a.blk.{i}", "attn_k", bias=False)
        _feed_forward(file, f"a.blk.{i}", gate=True)
        _norms(file, f"a.blk.{i}", "ln1 ln2", bias=False)
    file.norm("a.post_ln", WIDTH, bias=False)
    file.norm("mm.a.norm_pre", WIDTH)
    _mlp(file, WIDTH, bias=True, second=3)


def _mimo(file: TowerFile) -> None:
    """Attention windows in some layers, the nearest rows of codebooks, and a second transformer over groups."""
    layers, window, group, bins = 4, 32, 4, (64, 32)
    _keys(file, layers=layers)
    file.key("window_size", window)
    file.key("wa_pattern_mode", [0, -1, 0, -1])
    file.key("rvq.num_quantizers", len(bins))
    file.key("rvq.codebook_size", bins)
    file.keys(local_block_count=LAYERS, local_group_size=group)
    for index, channels in ((1, MELS), (2, WIDTH)):
        file.weights(f"a.conv1d.{index}", 3, channels, WIDTH, kind="F32")
        file.tensor(f"a.conv1d.{index}.bias", 1, WIDTH)
    for i in range(layers):
        _matrices(file, f"a.blk.{i}", "attn_q attn_v attn_out")
        _matrices(file, f"a.blk.{i}", "attn_k", bias=False)
        _feed_forward(file, f"a.blk.{i}")
        _norms(file, f"a.blk.{i}", "ln1 ln2")
    file.norm("a.post_ln", WIDTH)
    file.weights("a.downsample.conv", 2, WIDTH, WIDTH, kind="F32")
    file.norm("a.downsample.norm", WIDTH)
    file.tensor("a.rvq.codebook.weight", WIDTH, max(bins), len(bins), gain=1.0)
    file.tensor("mm.a.code_embd.weight", WIDTH, max(bins), len(bins), gain=1.0)
    for i in range(LAYERS):
        _matrices(file, f"mm.a.local_blk.{i}", "attn_q attn_k attn_v")
        _matrices(file, f"mm.a.local_blk.{i}", "attn_out", bias=False)
        _feed_forward(file, f"mm.a.local_blk.{i}", gate=True, bias=False)
        _norms(file, f"mm.a.local_blk.{i}", "ln1 ln2", bias=False)
    file.norm("mm.a.local_norm", WIDTH, bias=False)
    _mlp(file, group * WIDTH, bias=False)


# ---------------------------------------------------------------------------------------------------------- conformers


def _halves(file: TowerFile, prefix: str, *, bias: bool) -> None:
    """A conformer's two feed-forward networks, and the matrices of its convolution."""
    for number in ("", "_1"):
        _feed_forward(file, prefix, number=number, bias=bias)
    file.weights(f"{prefix}.conv_pw1", WIDTH, 2 * WIDTH, bias=bias)
    file.weights(f"{prefix}.conv_pw2", WIDTH, WIDTH, bias=bias)


def _subsample(file: TowerFile) -> None:
    """Convolutions over all channels or within each one. Eight frames become one position."""
    for index, side, channels in ((0, 3, 1), (2, 3, 1), (3, 1, CHANNELS), (5, 3, 1), (6, 1, CHANNELS)):
        file.weights(f"a.conv1d.{index}", side, side, channels, CHANNELS, kind="F32")
        file.tensor(f"a.conv1d.{index}.bias", 1, 1, CHANNELS)
    file.weights("a.pre_encode.out", CHANNELS * MELS // 8, WIDTH, bias=True)


def _relative(file: TowerFile, prefix: str, positions: int) -> None:
    for name in ("pos_bias_u", "pos_bias_v"):
        file.tensor(f"{prefix}.{name}", WIDTH // HEADS, HEADS)
    file.weights(f"{prefix}.linear_pos", positions, WIDTH)


def _lfm2a(file: TowerFile) -> None:
    """Positions are always 512 numbers. The table of positions, which real files have for the sound they generate,
    serves only for its width."""
    _keys(file, ff=WIDTH)
    file.tensor("a.position_embd.weight", N_EMBD, 1024)
    _subsample(file)
    for i in range(LAYERS):
        prefix = f"a.blk.{i}"
        _halves(file, prefix, bias=True)
        _matrices(file, prefix, "attn_q attn_k attn_v attn_out")
        _relative(file, prefix, 512)
        _norms(file, prefix, "ffn_norm ffn_norm_1 ln1 ln2 norm_conv conv_norm")
        file.weights(f"{prefix}.conv_dw", 9, WIDTH, kind="F32", bias=True)
    file.norm("mm.a.mlp.0", WIDTH)
    _mlp(file, WIDTH, bias=True, second=3)


def _parakeet(file: TowerFile) -> None:
    """The mel filters and the window are in the file."""
    kernel, n_fft, window = 9, 512, 400
    _keys(file)
    file.keys(subsampling_factor=8, conv_kernel_size=kernel)
    file.tensor("a.mel_filters", n_fft // 2 + 1, MELS, mean=0.02, gain=0.004)
    file.tensor("a.window", window, mean=0.5)
    _subsample(file)
    for i in range(LAYERS):
        prefix = f"a.blk.{i}"
        _halves(file, prefix, bias=False)
        _matrices(file, prefix, "attn_q attn_k attn_v attn_out", bias=False)
        _relative(file, prefix, WIDTH)
        _norms(file, prefix, "ffn_norm ffn_norm_1 ln1 ln2 norm_conv conv_norm")
        file.weights(f"{prefix}.conv_dw", kernel, WIDTH, kind="F32")
        file.tensor(f"{prefix}.conv_norm_mean", WIDTH)
        file.tensor(f"{prefix}.conv_norm_var", WIDTH, mean=1.0)
    file.norm("mm.a.norm_pre", WIDTH, bias=False)
    _mlp(file, WIDTH, bias=False)
    for index in (0, 1, 3):  # the projector of the images in the same file: libmtmd demands it
        file.weights(f"mm.model.mlp.{index}", WIDTH, WIDTH)


def gemma4a(file: TowerFile) -> None:
    """Attention within blocks of 12 positions and the 12 before. Inputs and outputs of products are clamped."""
    outputs = 96
    _keys(file)
    for index, channels, made in ((0, 1, 32), (1, 32, CHANNELS)):
        file.weights(f"a.conv1d.{index}", 3, 3, channels, made, kind="F32")
        file.norm(f"a.conv1d.{index}.norm", made, bias=False)
    file.weights("a.input_projection", CHANNELS * MELS // 4, WIDTH)
    for i in range(LAYERS):
        prefix = f"a.blk.{i}"
        _halves(file, prefix, bias=False)
        _matrices(file, prefix, "attn_q attn_k attn_v attn_out attn_k_rel", bias=False)
        norms = "ffn_norm ffn_post_norm ffn_norm_1 ffn_post_norm_1 attn_pre_norm attn_post_norm ln2 norm_conv conv_norm"
        _norms(file, prefix, norms, bias=False)
        file.weights(f"{prefix}.conv_dw", 5, WIDTH, kind="F32")
        file.norm(f"{prefix}.per_dim_scale", WIDTH // HEADS, bias=False)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down", "ffn_up_1", "conv_pw1"):
            for end, limit in (("input_max", 2.0), ("input_min", -2.0), ("output_max", 3.0), ("output_min", -3.0)):
                file.tensor(f"{prefix}.{name}.{end}", 1, mean=limit)
    file.weights("a.pre_encode.out", WIDTH, outputs, bias=True)
    file.weights("mm.a.input_projection", outputs, N_EMBD)


def gemma4ua(file: TowerFile) -> None:
    """One product with 640 samples: there are no layers."""
    samples = 640
    file.keys(embedding_length=samples, feed_forward_length=0, block_count=0, num_mel_bins=MELS)
    file.key("attention.head_count", 0)
    file.weights("mm.a.input_projection", samples, N_EMBD)


def _granite(file: TowerFile, features: tuple[int, ...] = ()) -> None:
    """Attention within blocks, then queries that look at windows of 15 positions.

    :param features: the layers whose results are appended to those of the last one.
    """
    block, kernel, far, window, rate, letters = 100, 15, 128, 15, 5, 96
    _keys(file, mels=2 * 80)
    file.keys(chunk_size=block, conv_kernel_size=kernel, max_pos_emb=far)
    for name, value in (("window_size", window), ("downsample_rate", rate), ("head_count", HEADS)):
        file.key(f"projector.{name}", value)
    if features:
        file.key("feature_layer", features)
    _matrices(file, "a", "input_projection", inputs=2 * 80)
    file.weights("a.enc_ctc_out", WIDTH, letters, bias=True)
    _matrices(file, "a", "enc_ctc_out_mid", inputs=letters)
    for i in range(LAYERS):
        prefix = f"a.blk.{i}"
        _halves(file, prefix, bias=True)
        _matrices(file, prefix, "attn_q attn_k attn_v", bias=False)
        _matrices(file, prefix, "attn_out")
        file.tensor(f"{prefix}.attn_rel_pos_emb", WIDTH // HEADS, 2 * far + 1, kind="F16", gain=0.3)
        _norms(file, prefix, "ffn_norm ffn_norm_1 ln1 ln2 norm_conv conv_norm")
        file.weights(f"{prefix}.conv_dw", kernel, WIDTH, kind="F32")
    file.tensor("a.proj_query", WIDTH, window // rate, gain=1.0)
    file.norm("a.proj_norm", WIDTH)
    file.weights("a.proj_linear", WIDTH, N_EMBD, bias=True)
    for i in range(2):
        prefix = f"a.proj_blk.{i}"
        _matrices(file, prefix, "self_attn_q self_attn_k self_attn_v self_attn_out cross_attn_q cross_attn_out")
        _matrices(file, prefix, "cross_attn_k cross_attn_v", inputs=WIDTH * (1 + len(features)))
        _feed_forward(file, prefix)
        _norms(file, prefix, "self_attn_norm cross_attn_norm ffn_norm")


def _granite_plus(file: TowerFile) -> None:
    _granite(file, (1,))


def _tower(about: str, projector: str, fill: Callable[[TowerFile], None]) -> Tower:
    return Tower(about, projector, fill, kind="audio")


TOWERS: dict[str, Tower] = {
    "ultravox": _tower("Whisper's encoder, four positions in one token", "ultravox", _ultravox),
    "qwen2a": _tower("Whisper's encoder, the means of pairs", "qwen2a", qwen2a),
    "voxtral": _tower("Whisper's encoder, two means in one token", "voxtral", _voxtral),
    "glma": _tower("Whisper's encoder, marks before and after", "glma", _glma),
    "meralion": _tower("Whisper's encoder, fifteen positions in one token", "meralion", _meralion),
    "musicflamingo": _tower("Whisper's encoder, two products", "musicflamingo", _music_flamingo),
    "qwen3a": _tower("batches of seconds in the convolutions", "qwen3a", _qwen3a),
    "lfm2a": _tower("conformer, relative positions", "lfm2a", _lfm2a),
    "gemma4a": _tower("conformer, blocks that overlap", "gemma4a", gemma4a),
    "gemma4ua": _tower("no layers", "gemma4ua", gemma4ua),
    "granite-speech": _tower("conformer, blocks, queries", "granite_speech", _granite),
    "granite-speech-plus": _tower("results of several layers", "granite_speech", _granite_plus),
    "mimo-audio": _tower("windows, codebooks, two transformers", "mimo_audio", _mimo),
    "parakeet": _tower("conformer, filters in the file", "parakeet", _parakeet),
    "dots3note-audio": _tower("rotation, norms without bias", "dots3note_a", _dots3note),
}
