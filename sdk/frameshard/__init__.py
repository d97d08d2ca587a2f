"""frameshard: a language model beside a game on one GPU, in a process of its own, under a VRAM budget that can change
at any time.

:func:`launch` starts a sidecar and :func:`connect` joins one, for trio and asyncio; :mod:`frameshard.sync` is the same
for programs with a frame loop. :mod:`frameshard.testing` has an engine without a model. Errors are in
:mod:`frameshard.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frameshard.arbiter import Arbiter, BudgetStep, Decision, PoolNeeds, SidecarNeeds
    from frameshard.client import BudgetChange, BudgetResult, Client, ClientScope, Completion, Stream, connect, launch
    from frameshard.conversation import LoadResult
    from frameshard.deal import Deal
    from frameshard.errors import FrameshardError
    from frameshard.images import Pixels
    from frameshard.tools import Tool, tool
    from frameshard.wire.launch import ConnectInfo, ServeConfig
    from frameshard.wire.messages import (
        AdapterInfo,
        Adapters,
        BrokerStats,
        Budget,
        Caps,
        ChatMessage,
        Delta,
        Engine,
        Kv,
        Lease,
        Loading,
        LogitBias,
        ModelInfo,
        Notice,
        Observed,
        PlanRow,
        Progress,
        Released,
        Sampling,
        Stats,
        Thought,
        TokenCount,
        ToolCall,
    )

_HOMES = {
    "arbiter": ("Arbiter", "BudgetStep", "Decision", "PoolNeeds", "SidecarNeeds"),
    "client": ("BudgetChange", "BudgetResult", "Client", "ClientScope", "Completion", "Stream", "connect", "launch"),
    "conversation": ("LoadResult",),
    "deal": ("Deal",),
    "errors": ("FrameshardError",),
    "images": ("Pixels",),
    "tools": ("Tool", "tool"),
    "wire.launch": ("ConnectInfo", "ServeConfig"),
    "wire.messages": (
        "AdapterInfo",
        "Adapters",
        "BrokerStats",
        "Budget",
        "Caps",
        "ChatMessage",
        "Delta",
        "Engine",
        "Kv",
        "Lease",
        "Loading",
        "LogitBias",
        "ModelInfo",
        "Notice",
        "Observed",
        "PlanRow",
        "Progress",
        "Released",
        "Sampling",
        "Stats",
        "Thought",
        "TokenCount",
        "ToolCall",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AdapterInfo",
    "Adapters",
    "Arbiter",
    "BrokerStats",
    "Budget",
    "BudgetChange",
    "BudgetResult",
    "BudgetStep",
    "Caps",
    "ChatMessage",
    "Client",
    "ClientScope",
    "Completion",
    "ConnectInfo",
    "Deal",
    "Decision",
    "Delta",
    "Engine",
    "FrameshardError",
    "Kv",
    "Lease",
    "LoadResult",
    "Loading",
    "LogitBias",
    "ModelInfo",
    "Notice",
    "Observed",
    "Pixels",
    "PlanRow",
    "PoolNeeds",
    "Progress",
    "Released",
    "Sampling",
    "ServeConfig",
    "SidecarNeeds",
    "Stats",
    "Stream",
    "Thought",
    "TokenCount",
    "Tool",
    "ToolCall",
    "connect",
    "launch",
    "tool",
]


def __getattr__(name: str) -> object:
    """Names are imported when they are first used: the engine process and the tools need no sockets, and libllama must
    come into a process before other wheels that carry a C++ runtime of their own, such as pyzmq."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
