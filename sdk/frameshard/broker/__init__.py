"""The broker: sessions of clients, their jobs, the VRAM lease, and the engine process. It never touches the GPU.

Section "broker" of docs/architecture.md has the map of its modules.
"""

from frameshard.broker.process import serve

__all__ = ["serve"]
