"""Files with two towers, one for images and one for sounds."""

from __future__ import annotations

from tiny_towers.file import Tower, TowerFile
from tiny_towers.qwen import qwen25vl
from tiny_towers.siglip import gemma4uv, gemma4v_small
from tiny_towers.sounds import gemma4a, gemma4ua, qwen2a


def _gemma4(file: TowerFile) -> None:
    gemma4v_small(file)
    file.also("audio")
    file.key("projector_type", "gemma4a")
    gemma4a(file)


def _gemma4_unified(file: TowerFile) -> None:
    gemma4uv(file)
    file.also("audio")
    file.key("projector_type", "gemma4ua")
    gemma4ua(file)


def _qwen25_omni(file: TowerFile) -> None:
    qwen25vl(file)
    file.also("audio")
    qwen2a(file)


TOWERS: dict[str, Tower] = {
    "gemma4": Tower("each tower has a projector of its own", "gemma4v", _gemma4, "both"),
    "gemma4-unified": Tower("neither tower has layers", "gemma4uv", _gemma4_unified, "both"),
    "qwen2.5o": Tower("one name for two projectors", "qwen2.5o", _qwen25_omni, "both"),
}
