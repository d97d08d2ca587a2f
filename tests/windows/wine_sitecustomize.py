"""For Wine only: trio asks for the socket under those of other software by an ioctl that Wine 8 does not have. There is
no such software, so the socket itself is the answer."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "trio._core._io_windows":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            ask = module._get_underlying_socket
            base, lacking = module.WSAIoctls.SIO_BASE_HANDLE, module.WSAIoctls.SIO_BSP_HANDLE_SELECT

            def answer(sock: Any, *, which: int = base) -> Any:
                return ask(sock, which=base if which == lacking else which)

            module._get_underlying_socket = answer

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
