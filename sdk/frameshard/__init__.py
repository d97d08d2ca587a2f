"""frameshard: a language model beside a game on one GPU, in a process of its own, under a VRAM budget that can change
while it talks.

:func:`launch` starts a sidecar and :func:`connect` joins one, for trio; :mod:`frameshard.sync` is the same for programs
with a frame loop. :mod:`frameshard.testing` has an engine without a model. Errors are in :mod:`frameshard.errors`.
"""

from frameshard.client import (
    Budget,
    BudgetResult,
    Client,
    ClientScope,
    Completion,
    EngineChange,
    Observation,
    Stats,
    Stream,
    connect,
    launch,
)
from frameshard.errors import FrameshardError
from frameshard.wire.launch import ConnectInfo, ServeConfig
from frameshard.wire.messages import BrokerStats, ChatMessage, Delta, ModelInfo, Sampling

__all__ = [
    "BrokerStats",
    "Budget",
    "BudgetResult",
    "ChatMessage",
    "Client",
    "ClientScope",
    "Completion",
    "ConnectInfo",
    "Delta",
    "EngineChange",
    "FrameshardError",
    "ModelInfo",
    "Observation",
    "Sampling",
    "ServeConfig",
    "Stats",
    "Stream",
    "connect",
    "launch",
]
