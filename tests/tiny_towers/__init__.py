"""Tiny towers with random weights: one for each kind that the pinned libmtmd reads.

Their embeddings have no meaning, but different images or sounds give different ones. They fit the tiny llama of
:mod:`tiny_models`, with :data:`~tiny_towers.file.N_EMBD` numbers in an embedding. The same name always gives the same
bytes.
"""

from __future__ import annotations

from pathlib import Path

from tiny_towers import both, llava, pixtral, plain, qwen, siglip, sounds
from tiny_towers.file import Tower, TowerFile

TOWERS: dict[str, Tower] = {
    **plain.TOWERS,
    **llava.TOWERS,
    **siglip.TOWERS,
    **qwen.TOWERS,
    **pixtral.TOWERS,
    **sounds.TOWERS,
    **both.TOWERS,
}


MARKS = dict.fromkeys(
    (
        "\n\n",
        "<image>",
        "</image>",
        "<slice>",
        "</slice>",
        "<fake_token_around_image>",
        "<global-img>",
        "<im_start>",
        "<im_end>",
        "<patch_start>",
        "<patch_end>",
        "<patch_newline>",
        "<|img_thumbnail|>",
    ),
    4,
)
"""The tokens that some towers put around images, for :func:`tiny_models.make`. libmtmd demands them."""


def make(name: str, path: Path) -> None:
    """Writes the tower ``name`` of :data:`TOWERS` to ``path``."""
    tower = TOWERS[name]
    file = TowerFile(name, path, "audio" if tower.kind == "audio" else "vision", tower.projector)
    tower.fill(file)
    file.close()
