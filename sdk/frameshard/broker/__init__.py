"""The broker: sessions of clients, their jobs, the VRAM lease, and the engine process. It never touches the GPU.

process     runs the sidecar's process; :func:`serve`
listener    accepts connections and reads messages
server      passes messages between clients and the engine
session     assigns connections to sessions
jobs        jobs of all clients, and how they continue after the engine has died
leases      the VRAM lease; its states are a table in frameshard.wire.states
images      keeps the images of open jobs in shared memory
supervisor  starts, watches and restarts the engine process
lastwords   keeps the last lines that the engine process wrote
frameblock  makes the shared memory of the frame block
endpoint    chooses where to listen, allows one sidecar at each place, and removes its files at the end

jobs, leases and session do no I/O.
"""

from frameshard.broker.process import serve

__all__ = ["serve"]
