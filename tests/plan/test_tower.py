"""The header of a vision tower: a correct one is read, a damaged one gives BadModel with a reason."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import mutants
import tiny_audio
import tiny_towers
from frameshard.errors import BadModel, ModelNotFound
from frameshard.plan.model import read_model
from frameshard.plan.tower import read_tower
from tiny_towers.file import TowerFile


def test_a_sound_tower(mmproj_path: Path) -> None:
    tower = read_tower(mmproj_path)
    assert (tower.projector, tower.n_layer, tower.side, tower.patch) == ("internvl", 4, 224, 14)


BAD: dict[str, tuple[str, Callable[[mutants.Gguf], object]]] = {
    "no vision": ("has_vision_encoder", lambda f: setattr(f.key("clip.has_vision_encoder"), "value", False)),
    "no projector": ("projector_type", lambda f: f.keys.remove(f.key("clip.projector_type"))),
    "patch": ("patch_size is 0, not from 1", lambda f: setattr(f.key("clip.vision.patch_size"), "value", 0)),
    "patch larger than the image": (
        "patch_size is 225, not from 1 to 224",
        lambda f: setattr(f.key("clip.vision.patch_size"), "value", 225),
    ),
    "image": ("image_size is 0", lambda f: setattr(f.key("clip.vision.image_size"), "value", 0)),
    "heads": ("head_count is 3", lambda f: setattr(f.key("clip.vision.attention.head_count"), "value", 3)),
    "no heads": ("head_count is 0", lambda f: setattr(f.key("clip.vision.attention.head_count"), "value", 0)),
    "layers": ("block_count is 513", lambda f: setattr(f.key("clip.vision.block_count"), "value", 513)),
    "a layer less": ("beyond the 3", lambda f: setattr(f.key("clip.vision.block_count"), "value", 3)),
    "scale": ("scale_factor is 0", lambda f: setattr(f.key("clip.vision.projector.scale_factor"), "value", 0)),
    "colours": ("image_std", lambda f: setattr(f.key("clip.vision.image_std"), "value", [0.5, 0.0, 0.5])),
    "two colours": ("image_mean", lambda f: setattr(f.key("clip.vision.image_mean"), "value", [0.5, 0.5])),
    "epsilon": (
        "epsilon is nan",
        lambda f: setattr(f.key("clip.vision.attention.layer_norm_epsilon"), "value", float("nan")),
    ),
    "tiles": ("preproc_min_tiles", lambda f: setattr(f.key("clip.vision.preproc_min_tiles"), "value", 9)),
    "missing": ("image_size is missing", lambda f: f.keys.remove(f.key("clip.vision.image_size"))),
    "a damaged name": (
        "v.blk.1.attn_q.weight is missing",
        lambda f: setattr(next(t for t in f.tensors if t.name == b"v.blk.1.attn_q.weight"), "name", b"v.blk.1.att_q"),
    ),
    "tensor twice": ("twice", lambda f: setattr(f.tensors[1], "name", f.tensors[0].name)),
    "offset": ("is at offset 7", lambda f: setattr(f.tensors[2], "offset", 7)),
    "truncated": ("truncated", lambda f: setattr(f, "cut", 0.7)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_towers_are_refused_in_words(case: str, mmproj_path: Path, tmp_path: Path) -> None:
    says, spoil = BAD[case]
    file = mutants.Gguf(mmproj_path)
    spoil(file)
    with pytest.raises(BadModel, match=says) as caught:
        read_tower(file.write(tmp_path / "bad.gguf"))
    assert caught.value.detail == {"path": str(tmp_path / "bad.gguf")}


@pytest.mark.parametrize("name", tiny_towers.TOWERS)
def test_every_kind_of_tower_is_read(name: str, tmp_path: Path) -> None:
    tiny_towers.make(name, tmp_path / "tower.gguf")
    assert read_tower(tmp_path / "tower.gguf").projector == tiny_towers.TOWERS[name].projector


# What libmtmd would end the process at in a job, or never end: the tower, a wrong key, and what the refusal says.
WRONG: dict[str, tuple[str, dict[str, int | list[int]], str]] = {
    "sizes of large images": (
        "llava_next",
        {"image_grid_pinpoints": [112, 150]},
        "150, which is not a number of tiles",
    ),
    "a size alone": ("llava_next", {"image_grid_pinpoints": [112]}, "not pairs"),
    "window": ("youtuvl", {"window_size": 16}, "more than half of a window of 16"),
    "patches as large as a window": ("qwen2.5vl", {"patch_size": 64}, "more than half of a window of 112"),
    "two layers more": ("minicpmv2_6", {"block_count": 1}, "beyond the 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_numbers_are_refused_in_words(case: str, tmp_path: Path) -> None:
    name, keys, says = WRONG[case]
    tower = tiny_towers.TOWERS[name]
    file = TowerFile(name, tmp_path / "wrong.gguf", tower.kind, tower.projector)
    tower.fill(file)
    file.keys(**keys)
    file.close()
    with pytest.raises(BadModel, match=says):
        read_tower(tmp_path / "wrong.gguf")


def test_a_tower_that_speaks_is_refused(tmp_path: Path) -> None:
    file = TowerFile("speaker", tmp_path / "speaker.gguf", "audio", "pockettts_spkenc")
    tiny_towers.TOWERS["qwen2a"].fill(file)
    file.close()
    with pytest.raises(BadModel, match="pockettts_spkenc, which speaks"):
        read_tower(tmp_path / "speaker.gguf")


def test_what_is_no_tower(tiny_model: Callable[[str], Path], mmproj_path: Path, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="'llama', and a vision tower is of clip"):
        read_tower(tiny_model("llama"))
    with pytest.raises(BadModel, match="give it as mmproj"):
        read_model(mmproj_path)
    with pytest.raises(ModelNotFound):
        read_tower(tmp_path / "none.gguf")


def test_mutants_are_read_or_refused(mmproj_path: Path, tmp_path: Path) -> None:
    sound, n_refused = mutants.Gguf(mmproj_path), 0
    for seed in range(200):
        print("seed", seed)  # shown if it fails
        file = copy.deepcopy(sound)
        mutants.mutate(file, random.Random(seed))
        try:
            read_tower(file.write(tmp_path / "mutant.gguf", sparse=True))
        except BadModel:
            n_refused += 1
    assert 0 < n_refused < 200


@pytest.mark.parametrize(
    ("says", "spoil"),
    [
        ("num_mel_bins is missing", lambda f: f.keys.remove(f.key("clip.audio.num_mel_bins"))),
        ("stack_factor is 0", lambda f: setattr(f.key("clip.audio.projector.stack_factor"), "value", 0)),
        ("does not divide", lambda f: setattr(f.key("clip.audio.attention.head_count"), "value", 5)),
        ("beyond the 2", lambda f: setattr(f.key("clip.audio.block_count"), "value", 2)),
        ("neither", lambda f: setattr(f.key("clip.has_audio_encoder"), "value", False)),
        (
            "a.blk.1.attn_q.weight is missing",
            lambda f: setattr(next(t for t in f.tensors if t.name == b"a.blk.1.attn_q.weight"), "name", b"a.blk.1.q"),
        ),
    ],
)
def test_bad_towers_for_sounds_are_refused_in_words(
    says: str, spoil: Callable[[mutants.Gguf], object], tmp_path: Path
) -> None:
    tiny_audio.make(tmp_path / "ear.gguf")
    assert read_tower(tmp_path / "ear.gguf").n_layer == tiny_audio.LAYERS
    file = mutants.Gguf(tmp_path / "ear.gguf")
    spoil(file)
    with pytest.raises(BadModel, match=says):
        read_tower(file.write(tmp_path / "bad.gguf"))
