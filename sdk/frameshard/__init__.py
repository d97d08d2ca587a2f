"""frameshard: a language model beside a game on one GPU, in a process of its own, under a VRAM budget that can change
while it talks.

:func:`launch` starts a sidecar and :func:`connect` joins one, for trio; :mod:`frameshard.sync` is the same for programs
with a frame loop. :mod:`frameshard.testing` has an engine without a model. Errors are in :mod:`frameshard.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frameshard.client import (
        Budget,
        BudgetGrant,
        BudgetResult,
        Caps,
        Client,
        ClientScope,
        Completion,
        EngineChange,
        Notice,
        Observation,
        Stats,
        Stream,
        connect,
        launch,
    )
    from frameshard.errors import FrameshardError
    from frameshard.images import Pixels
    from frameshard.wire.launch import ConnectInfo, ServeConfig
    from frameshard.wire.messages import BrokerStats, ChatMessage, Delta, ModelInfo, PlanRow, Progress, Sampling

_HOMES = {
    "client": (
        "Budget",
        "BudgetGrant",
        "BudgetResult",
        "Caps",
        "Client",
        "ClientScope",
        "Completion",
        "EngineChange",
        "Notice",
        "Observation",
        "Stats",
        "Stream",
        "connect",
        "launch",
    ),
    "errors": ("FrameshardError",),
    "images": ("Pixels",),
    "wire.launch": ("ConnectInfo", "ServeConfig"),
    "wire.messages": ("BrokerStats", "ChatMessage", "Delta", "ModelInfo", "PlanRow", "Progress", "Sampling"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BrokerStats",
    "Budget",
    "BudgetGrant",
    "BudgetResult",
    "Caps",
    "ChatMessage",
    "Client",
    "ClientScope",
    "Completion",
    "ConnectInfo",
    "Delta",
    "EngineChange",
    "FrameshardError",
    "ModelInfo",
    "Notice",
    "Observation",
    "Pixels",
    "PlanRow",
    "Progress",
    "Sampling",
    "ServeConfig",
    "Stats",
    "Stream",
    "connect",
    "launch",
]


def __getattr__(name: str) -> object:
    """Names are imported when they are first used: the engine process and the tools need no sockets, and libllama must
    come into a process before other wheels that carry a C++ runtime of their own, such as pyzmq."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
