"""The LoRA adapters that are loaded, and the set of them that the next decode uses.

llama.cpp applies one set of adapters to a whole graph, so only jobs with equal sets are decoded together. When the set
changes, llama.cpp allocates its compute buffers again, and ends the process if there is no room for them. Their size
depends on the adapters. So a load (:meth:`.runtime.Runtime.load_adapter`) tries every set that the new adapter may be
in, and the shard device keeps room for the largest compute buffers so far and counts it in the floor.

llama.cpp ends the process if a header is wrong in some ways. :func:`frameshard.plan.adapter.read_adapter` finds those
first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from frameshard import models
from frameshard.engine.llama import Llama
from frameshard.errors import BadArgument, BadModel, unknown_adapter
from frameshard.plan.adapter import AdapterFile
from frameshard.wire import messages as m


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter. An adapter that is loaded again is another one, also if the name is the same.

    :param handle: llama.cpp's adapter.
    """

    name: str
    file: AdapterFile
    handle: Any


AdapterSet = tuple[tuple[Adapter, float], ...]
"""Adapters with their scales, ordered by name, none with scale 0. It is part of what identifies KV cells: cells that
were computed with one set are never used with another."""

NO_ADAPTERS: AdapterSet = ()


class Adapters:
    """The adapters of one model. Only the thread that decodes may use it, except for methods marked [any thread]."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama
        self._loaded: dict[str, Adapter] = {}
        self._in_use: AdapterSet = NO_ADAPTERS

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._loaded.values())

    def describe(self) -> tuple[m.AdapterInfo, ...]:
        """[any thread] The loaded adapters, by name."""
        return tuple(m.AdapterInfo(name, each.file.n_bytes) for name, each in sorted(self._loaded.items()))

    def resolve(self, wanted: Sequence[m.Adapter]) -> AdapterSet:
        """The set that a job asks for.

        :raises BadArgument: no such adapter is loaded; detail has ``loaded``.
        """
        for each in wanted:
            if each.name not in self._loaded:
                raise unknown_adapter(each.name, self._loaded)
        found = ((self._loaded[each.name], each.scale) for each in wanted if each.scale)
        return tuple(sorted(found, key=lambda pair: pair[0].name))

    def has(self, name: str, file: AdapterFile) -> bool:
        """Whether this file is loaded under this name.

        :raises BadArgument: another file is, or one that has been replaced since; or no further adapter can be loaded.
        """
        if name not in self._loaded and len(self._loaded) >= m.MAX_ADAPTERS:
            raise BadArgument(f"{m.MAX_ADAPTERS} adapters are loaded: unload one first", field="name")
        if name not in self._loaded:
            return False
        loaded = self._loaded[name].file
        if (loaded.path, loaded.fingerprint) != (file.path, file.fingerprint):
            raise BadArgument(f"{name}: another file is loaded under this name: unload it first", field="name")
        return True

    def add(self, name: str, file: AdapterFile) -> Adapter:
        """Loads an adapter.

        :raises BadModel: llama.cpp refuses the file, or there is no memory for it.
        """
        try:
            with models.own_file(file.path) as path:
                handle = self._llama.load_adapter(os.fspath(path))
        except OSError as error:
            raise BadModel(f"cannot read {file.path}: {error}", path=str(file.path), adapter=name) from None
        except BadModel as error:
            raise BadModel(error.message, path=str(file.path), adapter=name) from None
        self._loaded[name] = adapter = Adapter(name, file, handle)
        return adapter

    def unload(self, name: str) -> None:
        """Frees an adapter. No running job may use it. A name that is not loaded changes nothing."""
        adapter = self._loaded.pop(name, None)
        if adapter is not None:
            if any(adapter is each for each, _ in self._in_use):
                self.use(NO_ADAPTERS)
            self._llama.free_adapter(adapter.handle)

    def use(self, wanted: AdapterSet) -> None:
        """The next decodes use this set."""
        if wanted != self._in_use:
            self._llama.set_adapters([(adapter.handle, scale) for adapter, scale in wanted])
            self._in_use = wanted
