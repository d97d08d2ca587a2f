"""The streaming pool: textures and meshes of cells in GL memory, within a limit that changes from frame to frame."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import moderngl
import paint
from world import Cell, World, distance, texture_bytes

BAND_ROWS = 256
"""So many rows of a texture are copied at once: 2 MiB at most."""


@dataclass
class Resident:
    """A cell in GL memory. It can be drawn when all its textures are there."""

    vertices: moderngl.Buffer
    array: moderngl.VertexArray
    parts: list[range]
    """The vertices of each texture."""
    n_bytes: int
    """Of the whole cell, also if some textures are still to be begun."""
    blank: list[moderngl.Texture]
    """Textures that were taken over from other cells."""
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
        """VRAM of all cells, also of those that are loaded in part, and of spare textures."""
        self._spare: list[moderngl.Texture] = []
        """Textures of evicted cells. Copying to one takes a quarter of the time that copying to a new one takes."""
        self._texture_bytes = texture_bytes(world.size, 1)
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
    ) -> bool:
        """Evicts down to the limit, then loads.

        :param in_view: is loaded first, in this order.
        :param column: where the camera is.
        :param seconds: no further step begins after this time. Drivers take milliseconds to free a cell, so a frame
            that evicted or loaded all at once would be late. The next frame goes on.
        :returns: whether all is there that has room.
        """
        due = time.perf_counter() + seconds
        return all(time.perf_counter() < due for _ in self._steps(limit_bytes, [*in_view, *soon], column))

    def _steps(self, limit_bytes: int, wanted: list[Cell], column: float) -> Iterator[None]:
        """Does all that is to be done, and stops after each step."""
        keep = set(wanted)
        while self.held_bytes > limit_bytes:
            if not (self._release() or self._evict(keep, column) or self._evict(set(), column)):
                return
            yield
        for cell in wanted:
            if cell not in self.cells:
                while self.held_bytes + self._extra_bytes(cell) > limit_bytes:
                    if not (self._evict(keep, column) or self._release()):
                        break
                    yield
                if self.held_bytes + self._extra_bytes(cell) > limit_bytes:
                    continue
                self._take(cell)
            while not self.cells[cell].ready:
                self._load(cell)
                yield

    def _evict(self, keep: Collection[Cell], column: float) -> bool:
        """Evicts the cell that is farthest from the camera, and none of `keep`. False: there is none. Its textures are
        spare then."""
        others = self.cells.keys() - keep
        if not others:
            return False
        resident = self.cells.pop(max(others, key=lambda cell: distance(cell, column)))
        resident.array.release()
        resident.vertices.release()
        textures = resident.blank + resident.textures
        self._spare += textures
        self.held_bytes -= resident.n_bytes - len(textures) * self._texture_bytes
        return True

    def _release(self) -> bool:
        """Frees a spare texture. False: there is none."""
        if not self._spare:
            return False
        self._spare.pop().release()
        self.held_bytes -= self._texture_bytes
        return True

    def _n_taken_over(self, cell: Cell) -> int:
        """So many spare textures will be the cell's."""
        return min(len(self._spare), self._world.layers[self._world.kind(cell)])

    def _extra_bytes(self, cell: Cell) -> int:
        """By so much a cell that is not there adds to what the pool holds."""
        return self._bytes_of(cell) - self._n_taken_over(cell) * self._texture_bytes

    def _bytes_of(self, cell: Cell) -> int:
        there = self.cells.get(cell)
        return there.n_bytes if there else self._world.bytes_of(cell) + self._mesh(cell).vertices.nbytes

    def _mesh(self, cell: Cell) -> paint.Mesh:
        kind = self._world.kind(cell)
        return paint.mesh(cell, kind, self._world.layers[kind])

    def _take(self, cell: Cell) -> None:
        """Counts the memory of a cell, takes that of its mesh, and takes over spare textures."""
        self.held_bytes += self._extra_bytes(cell)
        n_bytes, mesh, n_spare = self._bytes_of(cell), self._mesh(cell), len(self._spare) - self._n_taken_over(cell)
        vertices = self._context.buffer(mesh.vertices.tobytes())
        names = ("position", "normal", "at", "sort")
        array = self._context.vertex_array(self._program, [(vertices, "3f 3f 2f 1f", *names)])
        self.cells[cell] = Resident(vertices, array, mesh.parts, n_bytes, self._spare[n_spare:])
        del self._spare[n_spare:]

    def _load(self, cell: Cell) -> None:
        """Begins the next texture of a cell, or copies the next rows of one."""
        size, resident = self._world.size, self.cells[cell]
        if resident.n_rows == 0:
            resident.textures.append(resident.blank.pop() if resident.blank else self._new_texture())
        row, n_rows = resident.n_rows, min(BAND_ROWS, size - resident.n_rows)
        pixels = paint.layer(cell, self._world.kind(cell), size, len(resident.textures) - 1)[row : row + n_rows]
        resident.textures[-1].write(pixels, viewport=(0, row, size, n_rows))
        resident.n_rows += n_rows
        if resident.n_rows == size:
            resident.textures[-1].build_mipmaps()
            resident.n_rows = 0
            resident.ready = len(resident.textures) == len(resident.parts)

    def _new_texture(self) -> moderngl.Texture:
        texture = self._context.texture((self._world.size, self._world.size), 4)
        # A driver that learns of the mip levels later moves the texture, which takes 7 ms instead of 2.
        texture.build_mipmaps()
        texture.filter = (moderngl.LINEAR_MIPMAP_LINEAR, moderngl.LINEAR)
        return texture

    def close(self) -> None:
        while self._evict(set(), 0.0) or self._release():
            pass
