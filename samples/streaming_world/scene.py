"""Draws the world with OpenGL: in a window, or without one through EGL."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

import moderngl
import numpy as np
from pool import Pool
from world import CELL_M, Cell

SKY = (0.78, 0.60, 0.50)
FAR_M = 5.2 * CELL_M

HEADLESS = {"standalone": True, "backend": "egl"}
HINT = "Without a display it needs EGL; on Debian and Ubuntu: apt-get install libegl1 libgl1-mesa-dri"

VERTEX = """
#version 330
uniform mat4 camera;
in vec3 position; in vec3 normal; in vec2 at; in float sort;
out vec3 place; out vec3 facing; out vec2 point; flat out float kind;
void main() {
    place = position; facing = normal; point = at; kind = sort;
    gl_Position = camera * vec4(position, 1.0);
}
"""
FRAGMENT = """
#version 330
uniform sampler2D picture; uniform vec3 eye; uniform vec3 sky; uniform float far;
in vec3 place; in vec3 facing; in vec2 point; flat in float kind;
out vec4 colour;
const vec3 sun = normalize(vec3(0.55, 0.42, 0.35));
void main() {
    vec4 painted = texture(picture, point);
    vec3 surface = painted.rgb;
    float light = kind == 2.0 ? 0.55 + 0.35 * point.y
                              : 0.50 + 0.55 * max(0.0, dot(normalize(facing), sun)) + 0.10 * abs(facing.x);
    if (kind == 2.0) surface = mix(vec3(0.13, 0.24, 0.12), vec3(0.30, 0.42, 0.18), point.y);
    if (kind == 3.0) {
        float middle = abs(point.y - 0.5);
        bool line = middle < 0.02 && fract(point.x) < 0.5 || middle > 0.45 && middle < 0.47;
        surface = line ? vec3(0.75, 0.72, 0.62) : vec3(0.24, 0.24, 0.26) + 0.05 * (painted.rgb - 0.4);
    }
    vec3 lit = surface * light * vec3(1.08, 0.98, 0.90) + painted.rgb * painted.a * (kind == 1.0 ? 0.55 : 0.0);
    float fog = pow(clamp(distance(place, eye) / far, 0.0, 1.0), 2.2);
    colour = vec4(mix(lit, sky, fog), 1.0);
}
"""

Colour = tuple[float, float, float]


def look(eye: Sequence[float], to: Sequence[float], aspect: float) -> bytes:
    """The matrix of a camera, by columns, for GL."""
    forward = np.array(to, float) - eye
    forward /= np.linalg.norm(forward)
    right = np.cross(forward, (0.0, 1.0, 0.0))
    right /= np.linalg.norm(right)
    up = np.cross(right, forward)
    view = np.eye(4)
    view[:3, :3] = right, up, -forward
    view[:3, 3] = -view[:3, :3] @ np.array(eye, float)
    near, far, lens = 1.0, 2 * FAR_M, 1 / math.tan(math.radians(58) / 2)
    project = np.zeros((4, 4))
    project[0, 0], project[1, 1] = lens / aspect, lens
    project[2, 2:] = (far + near) / (near - far), 2 * far * near / (near - far)
    project[3, 2] = -1.0
    return (project @ view).T.astype("f4").tobytes()


class NoOpenGL(Exception):
    """There is no OpenGL to draw with."""


class Scene:
    """A context of OpenGL, what is drawn into, and the shader.

    :param size: of the picture, in pixels.
    :param window: whether there is a window; else the picture is drawn through EGL without one.
    :raises NoOpenGL: there is no OpenGL 3.3.
    """

    def __init__(self, size: tuple[int, int], *, window: bool) -> None:
        self.size = size
        self._window = window
        try:
            if window:
                self._open_window()
            self.context = moderngl.create_context(require=330, **({} if window else HEADLESS))
        except Exception as error:  # moderngl has no type of its own for it
            raise NoOpenGL(f"no OpenGL 3.3: {error}. {HINT}") from None
        self._target = (
            self.context.screen
            if window
            else self.context.framebuffer([self.context.renderbuffer(size)], self.context.depth_renderbuffer(size))
        )
        self.program = self.context.program(vertex_shader=VERTEX, fragment_shader=FRAGMENT)
        self.program["sky"].value = SKY
        self.program["far"].value = FAR_M
        self._query = self.context.query(time=True)

    def _open_window(self) -> None:
        import pygame

        pygame.display.init()
        pygame.display.gl_set_attribute(pygame.GL_CONTEXT_PROFILE_MASK, pygame.GL_CONTEXT_PROFILE_CORE)
        pygame.display.gl_set_attribute(pygame.GL_DEPTH_SIZE, 24)
        pygame.display.set_mode(self.size, pygame.OPENGL | pygame.DOUBLEBUF)

    @property
    def fixed_bytes(self) -> int:
        """What the picture takes: colour, depth, and the second buffer of a window."""
        return self.size[0] * self.size[1] * 4 * (3 if self._window else 2)

    def draw(self, pool: Pool, cells: Iterable[Cell], column: float, bar: Iterable[tuple[float, Colour]]) -> float:
        """Draws a frame and waits until the GPU has done it.

        :param bar: the parts of the bar that shows who has the VRAM: how long each is, of 1, and its colour.
        :returns: the milliseconds of GPU time.
        """
        with self._query:
            self._target.use()
            self._target.clear(*SKY, depth=1.0)
            self.context.enable(moderngl.DEPTH_TEST)
            x, sway = column * CELL_M, 9 * math.sin(column / 2)
            eye = (x, 44 + 5 * math.sin(column / 3), sway)
            self.program["camera"].write(look(eye, (x + 120, 20, 0.4 * sway), self.size[0] / self.size[1]))
            self.program["eye"].write(struct.pack("3f", *eye))
            for cell in cells:
                if cell in pool.cells and pool.cells[cell].ready:
                    pool.cells[cell].draw()
            self._draw_bar(bar)
        self.context.finish()
        if self._window:
            import pygame

            pygame.display.flip()
        return float(self._query.elapsed) * 1e-6

    def _draw_bar(self, bar: Iterable[tuple[float, Colour]]) -> None:
        wide, high = self.size
        left, thick = wide // 20, max(4, high // 40)
        for share, colour in bar:
            length = round(share * (wide - 2 * (wide // 20)))
            self._target.clear(*colour, viewport=(left, thick, length, thick))
            left += length

    def pixels(self) -> bytes:
        """The picture, as rows of RGB from the bottom up."""
        return bytes(self._target.read(components=3))

    def closed(self, caption: str) -> bool:
        """Shows the caption of the window. Returns whether the player has closed it."""
        if not self._window:
            return False
        import pygame

        pygame.display.set_caption(caption)
        return any(event.type == pygame.QUIT for event in pygame.event.get())

    def close(self) -> None:
        self.context.release()
