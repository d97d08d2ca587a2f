"""The world of the flight: cells of city and field along a road, and what each of them holds.

A game chooses its detail by the VRAM that it has. So does this one: its streets take `CITY_SHARE` of what the game and
the sidecar share.
"""

from __future__ import annotations

from dataclasses import dataclass

Cell = tuple[int, int]
"""Its column along the road, and its row across it; row 0 has the road."""

CELL_M = 100.0
AHEAD, ASIDE = 5, 2
"""So many columns before the camera, and rows to its left and right, are in view."""

DISTRICT = 8
"""Columns of each city and of each field."""

CITY_SHARE = 0.78
SOON = 1
"""So many columns are wanted before they come into view. The time that it takes to fly over a column is enough for the
sidecar to shrink, and for the pool to load."""

DENSITY = {"city": 1.0, "field": 0.12}
SIZES = (2048, 1024, 512, 256, 128)
LEAST_LAYERS, MOST_LAYERS = 8, 64


def texture_bytes(size: int, layers: int) -> int:
    """VRAM of an array of square RGBA textures with all mip levels."""
    total = 0
    while size:
        total += 4 * size * size * layers
        size //= 2
    return total


@dataclass(frozen=True)
class World:
    """The size of a texture in pixels, and how many a cell of each kind has."""

    size: int
    layers: dict[str, int]
    seconds: float

    @classmethod
    def of(cls, game_bytes: int, seconds: float) -> World:
        """The world whose streets take their share of `game_bytes`."""
        cell_bytes = CITY_SHARE * game_bytes / ((AHEAD + 1 + SOON) * (2 * ASIDE + 1))
        size = next((size for size in SIZES if texture_bytes(size, LEAST_LAYERS) <= cell_bytes), SIZES[-1])
        city = max(1, min(MOST_LAYERS, int(cell_bytes // texture_bytes(size, 1))))
        return cls(size, {kind: max(1, round(share * city)) for kind, share in DENSITY.items()}, seconds)

    @property
    def n_districts(self) -> int:
        """City, field, city, and so on; it begins and ends in a city."""
        return 2 * max(1, round(self.seconds / 24)) + 1

    @property
    def columns_per_s(self) -> float:
        return (self.n_districts * DISTRICT - AHEAD) / self.seconds

    def column_at(self, second: float) -> float:
        return second * self.columns_per_s

    def borders_s(self) -> list[float]:
        """When the camera flies from one district into the next."""
        return [border * DISTRICT / self.columns_per_s for border in range(1, self.n_districts)]

    def cells(self) -> list[Cell]:
        """All cells that are wanted in the flight."""
        columns = int(self.column_at(self.seconds)) + AHEAD + SOON + 1
        return [(i, j) for i in range(columns) for j in range(-ASIDE, ASIDE + 1)]

    def kind(self, cell: Cell) -> str:
        district = min(cell[0] // DISTRICT, self.n_districts - 1)
        return "city" if district % 2 == 0 else "field"

    def bytes_of(self, cell: Cell) -> int:
        return texture_bytes(self.size, self.layers[self.kind(cell)])

    def in_view(self, second: float) -> list[Cell]:
        """The cells in view, nearest first."""
        column = self.column_at(second)
        cells = ((int(column) + i, j) for i in range(AHEAD + 1) for j in range(-ASIDE, ASIDE + 1))
        return sorted(cells, key=lambda cell: distance(cell, column))

    def soon(self, second: float) -> list[Cell]:
        """The cells that come into view next."""
        first = int(self.column_at(second)) + AHEAD + 1
        return [(first + i, j) for i in range(SOON) for j in range(-ASIDE, ASIDE + 1)]


def distance(cell: Cell, column: float) -> float:
    """How far a cell lies from the camera, in cells. What lies behind it counts more."""
    ahead = cell[0] + 0.5 - column
    return float(abs(cell[1]) + (ahead if ahead > -0.5 else 1.0 - 2.0 * ahead))
