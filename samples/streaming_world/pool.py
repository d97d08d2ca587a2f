"""The streaming pool: textures and meshes of cells in GL memory, within a limit that changes from frame to frame."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import moderngl
import paint
from world import Cell, World, distance


@dataclass
class Resident:
    """A cell in GL memory. It can be drawn when all its textures are there."""

    textures: moderngl.TextureArray
    vertices: moderngl.Buffer
    array: moderngl.VertexArray
    n_bytes: int
    n_layers: int
    n_loaded: int = 0

    @property
    def ready(self) -> bool:
        return self.n_loaded == self.n_layers


class Pool:
    """Loads what is in view and what comes soon, keeps the rest as long as there is room, and evicts by distance.

    Call :meth:`follow` once a frame.

    :param program: the shader that draws a cell.
    """

    def __init__(self, context: moderngl.Context, program: moderngl.Program, world: World) -> None:
        self.cells: dict[Cell, Resident] = {}
        self.held_bytes = 0
        """VRAM of all cells, also of those that are loaded in part."""
        self.n_evicted = 0
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
        self, limit_bytes: int, in_view: Collection[Cell], soon: Collection[Cell], column: float, upload_bytes: int
    ) -> None:
        """Evicts down to the limit, then loads.

        :param in_view: is loaded first, in this order.
        :param column: where the camera is.
        :param upload_bytes: about so much may be copied to the GPU in this frame.
        """
        wanted = [*in_view, *soon]
        keep = set(wanted)
        self._evict(limit_bytes, keep, column)
        self._evict(limit_bytes, set(), column)  # the limit is below what is wanted
        for cell in wanted:
            if upload_bytes <= 0:
                return
            if cell not in self.cells:
                self._evict(limit_bytes - self._bytes_of(cell), keep, column)
                if self.held_bytes + self._bytes_of(cell) > limit_bytes:
                    continue
                self._take(cell)
            upload_bytes -= self._upload(cell, upload_bytes)

    def _bytes_of(self, cell: Cell) -> int:
        there = self.cells.get(cell)
        return there.n_bytes if there else self._world.bytes_of(cell) + self._mesh(cell).nbytes

    def _mesh(self, cell: Cell) -> paint.Vertices:
        kind = self._world.kind(cell)
        return paint.mesh(cell, kind, self._world.layers[kind])

    def _evict(self, limit_bytes: int, keep: Collection[Cell], column: float) -> None:
        """Frees cells until no more than the limit is held: the farthest first, and none of `keep`."""
        if self.held_bytes <= limit_bytes:
            return
        freed = []
        for cell in sorted(self.cells.keys() - keep, key=lambda cell: distance(cell, column), reverse=True):
            if self.held_bytes <= limit_bytes:
                break
            freed.append(self.cells.pop(cell))
            self.held_bytes -= freed[-1].n_bytes
        for resident in freed:
            resident.array.release()
            resident.vertices.release()
            resident.textures.release()
        self.n_evicted += len(freed)

    def _take(self, cell: Cell) -> None:
        """Takes the memory of a cell."""
        size, kind = self._world.size, self._world.kind(cell)
        layers = self._world.layers[kind]
        n_bytes = self._bytes_of(cell)
        textures = self._context.texture_array((size, size, layers), 4)
        textures.filter = (moderngl.LINEAR_MIPMAP_LINEAR, moderngl.LINEAR)
        vertices = self._context.buffer(self._mesh(cell).tobytes())
        names = ("position", "normal", "at", "layer", "sort")
        array = self._context.vertex_array(self._program, [(vertices, "3f 3f 2f 1f 1f", *names)])
        self.cells[cell] = Resident(textures, vertices, array, n_bytes, layers)
        self.held_bytes += n_bytes

    def _upload(self, cell: Cell, most_bytes: int) -> int:
        """Copies the next textures of a cell, at least one. Returns how many bytes."""
        size, resident = self._world.size, self.cells[cell]
        copied = 0
        while not resident.ready and copied < most_bytes:
            pixels = paint.layer(cell, self._world.kind(cell), size, resident.n_loaded)
            resident.textures.write(pixels, viewport=(0, 0, resident.n_loaded, size, size, 1))
            resident.n_loaded += 1
            copied += pixels.nbytes
            if resident.ready:
                resident.textures.build_mipmaps()
        return copied

    def close(self) -> None:
        self._evict(0, set(), 0.0)
