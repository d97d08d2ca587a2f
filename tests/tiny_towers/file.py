"""What tiny towers are made with."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from tiny_models import add_key

N_EMBD = 256
"""The numbers of an embedding, as the tiny llama has them."""


class TowerFile:
    """Collects the keys and tensors of a tower. :meth:`close` writes it. Shapes are in ggml's order, inputs first.

    :param kind: "vision" or "audio".
    :param projector: libmtmd's name.
    """

    def __init__(self, name: str, path: Path, kind: str, projector: str) -> None:
        self._kind = kind
        self._rng = np.random.default_rng(zlib.crc32(name.encode()))
        self._writer = gguf.GGUFWriter(str(path), "clip")
        self._writer.add_string("general.type", "mmproj")
        self._writer.add_name(f"tiny {name}")
        self._writer.add_string("clip.projector_type", projector)
        self._begin()

    def _begin(self) -> None:
        self.plain_key(f"clip.has_{self._kind}_encoder", True)
        self.key("projection_dim", N_EMBD)
        self.key("attention.layer_norm_epsilon", 1e-6)
        if self._kind == "vision":
            self.key("image_mean", [0.5, 0.5, 0.5])
            self.key("image_std", [0.5, 0.5, 0.5])

    def also(self, kind: str) -> None:
        """Goes on with a second tower in the same file."""
        self._kind = kind
        self._begin()

    def plain_key(self, key: str, value: bool | int | float | str | Sequence[int] | Sequence[float]) -> None:
        """Adds a key by its whole name. One that exists is replaced."""
        for keys in self._writer.kv_data:
            keys.pop(key, None)
        add_key(self._writer, key, value)

    def signed_key(self, key: str, value: int) -> None:
        """Adds a key that libmtmd reads as a signed number, by its whole name."""
        self._writer.add_int32(key, value)

    def mixed(self) -> None:
        """Names the projector as in files that may have towers for both images and sounds."""
        for keys in self._writer.kv_data:
            projector = keys.pop("clip.projector_type", None)
            if projector is not None:
                self.key("projector_type", projector.value)

    def key(self, name: str, value: bool | int | float | str | Sequence[int] | Sequence[float]) -> None:
        """Adds a key of the tower, as ``block_count``."""
        self.plain_key(f"clip.{self._kind}.{name}", value)

    def keys(self, **values: bool | int | float | str | Sequence[int] | Sequence[float]) -> None:
        """Adds keys of the tower whose names have no dots."""
        for name, value in values.items():
            self.key(name, value)

    def tensor(self, name: str, *shape: int, kind: str = "F32", mean: float = 0.0, gain: float = 0.1) -> None:
        """Adds random numbers under this whole name."""
        values = mean + gain * self._rng.standard_normal(shape[::-1], dtype=np.float32)
        quant = gguf.GGMLQuantizationType[kind]
        self._writer.add_tensor(name, gguf.quants.quantize(values, quant), raw_dtype=quant)

    def weights(self, name: str, *shape: int, kind: str = "F16", gain: float = 1.0, bias: bool = False) -> None:
        """Adds ``NAME.weight``, scaled by the number of inputs, and ``NAME.bias`` with one number for each output."""
        n_inputs = int(np.prod(shape[:-1]))
        self.tensor(f"{name}.weight", *shape, kind=kind, gain=gain / n_inputs**0.5)
        if bias:
            self.tensor(f"{name}.bias", shape[-1])

    def norm(self, name: str, width: int, *, bias: bool = True) -> None:
        """Adds ``NAME.weight`` around 1, and ``NAME.bias``."""
        self.tensor(f"{name}.weight", width, mean=1.0)
        if bias:
            self.tensor(f"{name}.bias", width)

    def close(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


@dataclass(frozen=True)
class Tower:
    """An entry of :data:`tiny_towers.TOWERS`.

    :param projector: libmtmd's name.
    :param fill: adds what :class:`TowerFile` does not.
    :param kind: "vision", "audio", or "both" for a file that begins with vision.
    :param model: the name of the model in :mod:`tiny_models` that it is for.
    """

    about: str
    projector: str
    fill: Callable[[TowerFile], None]
    kind: str = "vision"
    model: str = "llama"
