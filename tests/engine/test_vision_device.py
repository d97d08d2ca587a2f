"""The shard device's second ggml device is registered, but is not listed as a GPU."""

from __future__ import annotations

import subprocess
import sys

LOOK = """
import frameshard.engine
from frameshard import ggml, native
native._load()
assert ggml.device_handle("FRAMESHARD_VISION")
assert not [name for name in ggml.gpu_devices() if name.startswith("FRAMESHARD")]
"""


def test_the_vision_device_is_registered_and_hidden() -> None:
    subprocess.run([sys.executable, "-c", LOOK], check=True, timeout=60)
