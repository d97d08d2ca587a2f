"""The streaming pool: textures and meshes of cells in GL memory, within a limit that changes from frame to frame."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import moderngl
import paint
from world import Cell, World, distance, texture_bytes

BAND_ROWS = 256
"""So many rows of a texture are copied at once. Copying 2 MiB takes about a quarter of a millisecond."""


@dataclass
class Resident:
    """A cell in GL memory. It can be drawn when all its textures are there."""

    vertices: moderngl.Buffer
    array: moderngl.VertexArray
    parts: list[range]
    """The vertices of each texture."""
    n_bytes: int
    textures: list[moderngl.Texture] = field(default_factory=list)
    """Those that were begun; the last one may not be complete."""
    n_rows: int = 0
    """Of the last texture, so many rows were copied."""
    ready: bool = False

    def draw(self) -> None:
        for texture, part in zip(self.textures, self.parts, strict=True):
            if part:
                texture.use()
                self.array.render(moderngl.TRIANGLES, vertices=len(part), first=part.start)


class Pool:
    """Loads what is in view and what comes soon, keeps the rest as long as there is room, and evicts by distance.

    Call :meth:`follow` once a frame.

    :param program: the shader that draws a cell.
    """

    def __init__(self, context: moderngl.Context, program: moderngl.Program, world: World) -> None:
        self.cells: dict[Cell, Resident] = {}
        self.held_bytes = 0
        """VRAM of all cells, also of those that are loaded or freed in part."""
        self._leaving: list[Resident] = []
        self._context, self._program, self._world = context, program, world

    def prepare(self) -> None:
        """Reads all textures and meshes into host memory, so that no frame waits for that."""
        for cell in self._world.cells():
            self._mesh(cell)
            kind = self._world.kind(cell)
            for at in range(self._world.layers[kind]):
                paint.layer(cell, kind, self._world.size, at)

    def wants(self, cells: Iterable[Cell]) -> int:
        """The bytes of these cells."""
        return sum(map(self._bytes_of, cells))

    def missing(self, cells: Iterable[Cell]) -> int:
        """How many of these cells cannot be drawn."""
        return sum(cell not in self.cells or not self.cells[cell].ready for cell in cells)

    def follow(
        self, limit_bytes: int, in_view: Collection[Cell], soon: Collection[Cell], column: float, seconds: float
    ) -> None:
        """Evicts down to the limit, then loads.

        :param in_view: is loaded first, in this order.
        :param column: where the camera is.
        :param seconds: no further step begins after this time. Drivers take milliseconds to free a cell, so a frame
            that evicted or loaded all at once would be late. The next frame goes on.
        """
        due = time.perf_counter() + seconds
        for _ in self._steps(limit_bytes, [*in_view, *soon], column):
            if time.perf_counter() >= due:
                return

    def _steps(self, limit_bytes: int, wanted: list[Cell], column: float) -> Iterator[None]:
        """Does all that is to be done, and stops after each step."""
        keep = set(wanted)
        while self.held_bytes > limit_bytes:
            if not (self._free(keep, column) or self._free(set(), column)):
                return
            yield
        for cell in wanted:
            if cell not in self.cells:
                room = limit_bytes - self._bytes_of(cell)
                while self.held_bytes > room and self._free(keep, column):
                    yield
                if self.held_bytes > room:
                    continue
                self._take(cell)
            while not self.cells[cell].ready:
                self._load(cell)
                yield

    def _free(self, keep: Collection[Cell], column: float) -> bool:
        """Frees a texture of the cell that is farthest from the camera, and none of `keep`. False: there is none."""
        if not self._leaving:
            others = self.cells.keys() - keep
            if not others:
                return False
            self._leaving.append(self.cells.pop(max(others, key=lambda cell: distance(cell, column))))
        resident = self._leaving[-1]
        n_bytes = resident.n_bytes
        if resident.textures:
            resident.textures.pop().release()
            n_bytes = texture_bytes(self._world.size, 1)
        else:
            resident.array.release()
            resident.vertices.release()
            self._leaving.pop()
        resident.n_bytes -= n_bytes
        self.held_bytes -= n_bytes
        return True

    def _bytes_of(self, cell: Cell) -> int:
        there = self.cells.get(cell)
        return there.n_bytes if there else self._world.bytes_of(cell) + self._mesh(cell).vertices.nbytes

    def _mesh(self, cell: Cell) -> paint.Mesh:
        kind = self._world.kind(cell)
        return paint.mesh(cell, kind, self._world.layers[kind])

    def _take(self, cell: Cell) -> None:
        """Counts the memory of a cell, and takes that of its mesh."""
        n_bytes, mesh = self._bytes_of(cell), self._mesh(cell)
        vertices = self._context.buffer(mesh.vertices.tobytes())
        names = ("position", "normal", "at", "sort")
        array = self._context.vertex_array(self._program, [(vertices, "3f 3f 2f 1f", *names)])
        self.cells[cell] = Resident(vertices, array, mesh.parts, n_bytes)
        self.held_bytes += n_bytes

    def _load(self, cell: Cell) -> None:
        """Begins the next texture of a cell, or copies the next rows of one."""
        size, resident = self._world.size, self.cells[cell]
        if resident.n_rows == 0:
            texture = self._context.texture((size, size), 4)
            # A driver that learns of the mip levels later moves the texture, which takes 7 ms instead of 2.
            texture.build_mipmaps()
            texture.filter = (moderngl.LINEAR_MIPMAP_LINEAR, moderngl.LINEAR)
            resident.textures.append(texture)
        row, n_rows = resident.n_rows, min(BAND_ROWS, size - resident.n_rows)
        pixels = paint.layer(cell, self._world.kind(cell), size, len(resident.textures) - 1)[row : row + n_rows]
        resident.textures[-1].write(pixels, viewport=(0, row, size, n_rows))
        resident.n_rows += n_rows
        if resident.n_rows == size:
            resident.textures[-1].build_mipmaps()
            resident.n_rows = 0
            resident.ready = len(resident.textures) == len(resident.parts)

    def close(self) -> None:
        while self._free(set(), 0.0):
            pass
