"""Sounds of a request: WAV and MP3 files, which libmtmd decodes and resamples.

The files may come from players, so what would make the decoder's output huge is checked before it.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from frameshard.errors import BadArgument

MAX_WAV_BYTES = 8 << 20
MAX_MP3_BYTES = 4 << 20
"""At the lowest rates of samples and bits these are about an hour, decoded to a quarter of a GiB."""

MIN_SECONDS = 0.1
"""libmtmd ends the process at shorter sounds than some towers read."""

MAX_SECONDS = 600
"""A tower makes hundreds of tokens of each minute, so longer sounds do not fit into a context."""

_RATES = range(8_000, 192_001)
_WAV = struct.Struct("<4xI4s4sIHHI")  # RIFF, size, WAVE, the chunk "fmt ", its size, format, channels, samples a second


@dataclass(frozen=True)
class Sound:
    """A WAV or MP3 file.

    :raises BadArgument: it is too large, or its header is damaged.
    """

    data: bytes

    def __post_init__(self) -> None:
        if self.data[:4] != b"RIFF":
            if len(self.data) > MAX_MP3_BYTES:
                raise BadArgument(f"an MP3 file has at most {MAX_MP3_BYTES >> 20} MiB", field="images")
            return
        if len(self.data) > MAX_WAV_BYTES:
            raise BadArgument(f"a WAV file has at most {MAX_WAV_BYTES >> 20} MiB", field="images")
        if len(self.data) < _WAV.size:
            raise BadArgument("a WAV file is cut off", field="images")
        _, wave, chunk, _, _, channels, rate = _WAV.unpack_from(self.data)
        if (wave, chunk) != (b"WAVE", b"fmt ") or not 1 <= channels <= 8 or rate not in _RATES:
            raise BadArgument(
                "a WAV file is damaged: its header has an impossible number of channels or sample rate", field="images"
            )

    @property
    def digest(self) -> bytes:
        """A hash of the file; the key of caches."""
        return hashlib.sha256(b"sound" + self.data).digest()


def is_sound(data: bytes) -> bool:
    """Whether a file begins like a WAV or MP3 file. libmtmd decides by the same bytes."""
    return data[:4] == b"RIFF" or data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0)


def tone(seconds: float, rate: int = 16_000) -> Sound:
    """A WAV file with a tone of 440 Hz, 8 bits, one channel."""
    samples = bytes(128 + (100 if index * 880 // rate % 2 else -100) for index in range(int(seconds * rate)))
    header = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(samples), b"WAVE", b"fmt ", 16, 1, 1, rate, rate, 1, 8,
                         b"data", len(samples))  # fmt: skip
    return Sound(header + samples)
