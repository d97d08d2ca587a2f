"""Paints the textures and builds the meshes of the world, in host memory. A real game reads them from its files."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from world import CELL_M, Cell

Pixels = npt.NDArray[np.uint8]
Vertices = npt.NDArray[np.float32]

N_PAINTED = 6
"""So many different textures of each sort are painted; cells hold copies of them."""

LOTS = 4
"""A cell of a city has so many lots in each direction; their outer edges are streets."""

GROUND, WALL, PLANT, ROAD = 0.0, 1.0, 2.0, 3.0
"""What a vertex belongs to, for the shader."""


@dataclass(frozen=True)
class Mesh:
    """The triangles of a cell, in the order of their textures."""

    vertices: Vertices
    """Shape [vertices, 9]: position in metres, normal, texture coordinates, and what the vertex belongs to."""

    parts: list[range]
    """The vertices of each texture."""


def seed_of(cell: Cell) -> int:
    return zlib.crc32(repr(cell).encode())


@cache
def facade(size: int, which: int) -> Pixels:
    """A wall with windows, some of them lit."""
    random = np.random.default_rng(which)
    base = np.array(
        [(150, 120, 100), (120, 125, 135), (165, 150, 125), (110, 95, 90), (140, 140, 145), (125, 110, 120)]
    )
    picture = np.empty((size, size, 4), np.uint8)
    picture[..., :3] = np.clip(base[which % len(base)] + random.normal(0, 7, (size, size, 1)), 0, 255)
    picture[..., 3] = 0  # alpha says how much light comes from within
    step = size // 8
    lit = random.random((8, 8)) < 0.35
    for row in range(8):
        picture[row * step : row * step + max(1, step // 16), :, :3] //= 2
        for column in range(8):
            top, left = row * step + step // 4, column * step + step // 4
            pane = picture[top : top + step // 2, left : left + step // 2]
            pane[..., :3] = (255, 205, 120) if lit[row, column] else (45, 58, 78)
            pane[..., 3] = 255 * lit[row, column]
    return picture


@cache
def ground(size: int, kind: str, which: int) -> Pixels:
    """Paving, or a field with furrows."""
    random = np.random.default_rng(100 + which)
    noise = random.normal(0, 6, (size, size, 1))
    picture = np.zeros((size, size, 4), np.uint8)
    if kind == "city":
        picture[..., :3] = np.clip(np.array((92, 92, 96)) + noise, 0, 255)
        slab = max(2, size // 32)
        picture[::slab, :, :3] -= 14
        picture[:, ::slab, :3] -= 14
    else:
        crops = np.array(
            [(112, 138, 62), (168, 150, 72), (92, 124, 66), (134, 110, 70), (146, 158, 84), (104, 142, 84)]
        )
        furrows = 14 * np.sin(np.arange(size) * 2 * np.pi * 24 / size)[:, None, None]
        picture[..., :3] = np.clip(crops[which % len(crops)] + furrows + noise, 0, 255)
    return picture


def layer(cell: Cell, kind: str, size: int, at: int) -> Pixels:
    """The texture number `at` of a cell, shape [size, size, 4]. The first is the ground."""
    which = (seed_of(cell) + at) % N_PAINTED
    return ground(size, kind, which) if at == 0 or kind == "field" else facade(size, which)


@cache
def mesh(cell: Cell, kind: str, layers: int) -> Mesh:
    """The triangles of a cell with so many textures."""
    random = np.random.default_rng(seed_of(cell))
    x, z = cell[0] * CELL_M, (cell[1] - 0.5) * CELL_M
    parts = [_quad((x, 0, z), (CELL_M, 0, 0), (0, 0, CELL_M), (0, 1, 0), (4, 4), 0, GROUND)]
    if cell[1] == 0:
        parts.append(_quad((x, 0.15, -7), (CELL_M, 0, 0), (0, 0, 14), (0, 1, 0), (8, 1), 0, ROAD))
    lot = CELL_M / LOTS
    for i in range(LOTS):
        for j in range(LOTS):
            left, near = x + i * lot, z + j * lot
            if abs(near + lot / 2) < 14:
                continue  # the road
            if kind == "city":
                high = float(random.gamma(3.0, 9.0)) + 8
                parts += _house(left + 3, near + 3, lot - 6, high, 1 + (i * LOTS + j) % max(1, layers - 1), layers)
            elif random.random() < 0.3:
                parts += _tree(
                    left + random.uniform(4, lot - 4), near + random.uniform(4, lot - 4), random.uniform(6, 13)
                )
    rows = np.concatenate(parts)
    rows = rows[np.argsort(rows[:, 8], kind="stable")]
    starts = np.searchsorted(rows[:, 8], np.arange(layers + 1)).tolist()
    return Mesh(np.delete(rows, 8, axis=1).astype(np.float32), list(map(range, starts, starts[1:])))


def _quad(
    at: tuple[float, float, float],
    right: tuple[float, float, float],
    up: tuple[float, float, float],
    normal: tuple[float, float, float],
    repeats: tuple[float, float],
    layer: int,
    sort: float,
) -> Vertices:
    corner, right_, up_ = np.array(at), np.array(right), np.array(up)
    rows = []
    for s, t in ((0, 0), (1, 0), (1, 1), (0, 0), (1, 1), (0, 1)):
        position = corner + s * right_ + t * up_
        rows.append([*position, *normal, s * repeats[0], t * repeats[1], layer, sort])
    return np.array(rows)


def _house(x: float, z: float, wide: float, high: float, layer: int, layers: int) -> list[Vertices]:
    layer = min(layer, layers - 1)
    repeats = (1.0, max(1.0, round(high / wide)))
    return [
        _quad((x, 0, z), (wide, 0, 0), (0, high, 0), (0, 0, -1), repeats, layer, WALL),
        _quad((x, 0, z + wide), (wide, 0, 0), (0, high, 0), (0, 0, 1), repeats, layer, WALL),
        _quad((x, 0, z), (0, 0, wide), (0, high, 0), (-1, 0, 0), repeats, layer, WALL),
        _quad((x + wide, 0, z), (0, 0, wide), (0, high, 0), (1, 0, 0), repeats, layer, WALL),
        _quad((x, high, z), (wide, 0, 0), (0, 0, wide), (0, 1, 0), (1, 1), 0, GROUND),
    ]


def _tree(x: float, z: float, high: float) -> list[Vertices]:
    """Two pyramids that have two sides each, seen from all around."""
    parts = []
    half = 0.35 * high
    for dx, dz in ((half, 0.0), (0.0, half)):
        rows = [
            [x - dx, 0, z - dz, dz, 0.4, dx, 0, 0, 0, PLANT],
            [x + dx, 0, z + dz, dz, 0.4, dx, 1, 0, 0, PLANT],
            [x, high, z, dz, 0.4, dx, 0.5, 1, 0, PLANT],
        ]
        parts.append(np.array(rows))
    return parts
