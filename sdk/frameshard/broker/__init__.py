"""The broker: sessions of clients, their jobs, the VRAM lease, and the engine process. Never touches the GPU.

process     the sidecar's process and :func:`serve`
listener    its sockets
server      the traffic between clients and engine
session     which connection belongs to which session
jobs        jobs of all clients, and what is replayed after an engine's death
leases      the VRAM lease; its states are a table in frameshard.wire.states
images      images of open jobs in shared memory
supervisor  starts, watches and restarts the engine process
lastwords   what the engine process wrote before it ended
frameblock  the shared memory of the frame block
endpoint    where to listen, without two servers at one place or anything left behind

jobs, leases and session decide and do no I/O.
"""

from frameshard.broker.process import serve

__all__ = ["serve"]
