"""Sounds of a request: WAV and MP3 files, which libmtmd decodes and resamples.

The files may come from players. libmtmd believes what a file says of its length and ends the process if there is no
memory for that, so it gets a WAV file that is written anew, or an MP3 file whose frames were counted.
"""

from __future__ import annotations

import hashlib
import re
import struct

from frameshard.errors import BadArgument
from frameshard.records import record

MAX_WAV_BYTES = 8 << 20
MAX_MP3_BYTES = 4 << 20
"""At the lowest rates of samples and bits these are about an hour, decoded to a quarter of a GiB."""

MIN_SECONDS = 0.1
"""libmtmd ends the process at shorter sounds than some towers read."""

MAX_SECONDS = 600
"""A tower makes hundreds of tokens of each minute, so longer sounds do not fit into a context."""

MAX_FRAMES = 30_000
"""Of an MP3 file: 600 s have at most 25,000, and some other bytes look like the begin of a frame. Decoded these are a
quarter of a GiB."""

MAX_CHANNELS = 8
RATES = range(8_000, 192_001)
"""Samples per second of a WAV file."""

_CHUNK = struct.Struct("<4sI")  # name, size
_FORMAT = struct.Struct("<HHIIHH")  # codec, channels, samples a second, bytes a second, bytes of a block, bits
_PCM, _FLOAT, _A_LAW, _MU_LAW, _MS_ADPCM, _IMA_ADPCM, _EXTENSIBLE = 1, 3, 6, 7, 2, 0x11, 0xFFFE
_BLOCK_HEADER = {_MS_ADPCM: 6, _IMA_ADPCM: 4}  # bytes for each channel
_CODEC_AT = 24  # where an extensible format has its codec

_FRAME = re.compile(
    rb"\xff[\xe2\xe3\xf2-\xf7\xfa-\xff][" + b"".join(rb"\x%x0-\x%xb" % (high, high) for high in range(15)) + rb"]"
)
"""The begin of an MP3 frame: 11 bits that are set, a version, a layer, a bit rate and a sample rate that exist."""

_LENGTH_TAG = re.compile(rb"(?=(?:Xing|Info)...(.)(....))", re.DOTALL)
_LENGTH_TAG_AT = [4 + checksum + side for checksum in (0, 2) for side in (9, 17, 32)]  # in a frame


@record
class Sound:
    """A WAV or MP3 file that libmtmd can decode in little memory; see :meth:`read`."""

    data: bytes

    @classmethod
    def read(cls, file: bytes) -> Sound:
        """Reads a WAV or MP3 file.

        :raises BadArgument: it is too large or too long, its header is damaged, or its samples are of a kind that is
            not read.
        """
        return cls(_wav(file) if file[:4] == b"RIFF" else _mp3(file))

    @property
    def digest(self) -> bytes:
        """A hash of the file; the key of caches."""
        return hashlib.sha256(b"sound" + self.data).digest()


def _wav(file: bytes) -> bytes:
    """A WAV file with the format and the samples of ``file`` and nothing else."""
    if len(file) > MAX_WAV_BYTES:
        raise BadArgument(f"a WAV file has at most {MAX_WAV_BYTES >> 20} MiB", field="images")
    chunks: dict[bytes, bytes] = {}
    at = _CHUNK.size + 4
    while at + _CHUNK.size <= len(file) and not {b"fmt ", b"data"} <= chunks.keys():
        name, size = _CHUNK.unpack_from(file, at)
        at += _CHUNK.size
        chunks[name] = file[at : at + size]
        at += size + size % 2
    form, samples = chunks.get(b"fmt ", b""), chunks.get(b"data", b"")
    if file[8:12] != b"WAVE" or len(form) < _FORMAT.size or not samples:
        raise BadArgument("a WAV file is damaged or cut off: it has no format or no samples", field="images")
    codec, channels, rate, per_second, block, bits = _FORMAT.unpack_from(form)
    if codec == _EXTENSIBLE:
        codec = int.from_bytes(form[_CODEC_AT : _CODEC_AT + 2], "little")
    if not 1 <= channels <= MAX_CHANNELS or rate not in RATES:
        raise BadArgument(
            f"a WAV file has 1 to {MAX_CHANNELS} channels and {RATES[0]} to {RATES[-1]} samples per second, and this"
            f" one has {channels} and {rate}: convert it",
            field="images",
        )
    if codec not in (_PCM, _FLOAT, _A_LAW, _MU_LAW, _MS_ADPCM, _IMA_ADPCM):
        raise BadArgument(
            f"a WAV file with samples of format {codec} is not read: convert it to 16-bit samples (PCM)", field="images"
        )
    header = _BLOCK_HEADER.get(codec, 0) * channels
    law = codec in (_A_LAW, _MU_LAW)
    if not 1 <= bits <= 64 or block <= header or (law and bits != 8) or (header and channels > 2):
        raise BadArgument(
            f"a WAV file is damaged: it has samples of {bits} bits and {channels} channels in blocks of {block} bytes",
            field="images",
        )
    if header and len(samples) % block <= header:  # libmtmd subtracts a header from the size of the last block too
        samples = samples[: len(samples) - len(samples) % block]
    return _wav_file(_FORMAT.pack(codec, channels, rate, per_second, block, bits), samples)


def _wav_file(form: bytes, samples: bytes) -> bytes:
    chunks = b"WAVE" + _CHUNK.pack(b"fmt ", len(form)) + form + _CHUNK.pack(b"data", len(samples)) + samples
    return _CHUNK.pack(b"RIFF", len(chunks)) + chunks


def _mp3(file: bytes) -> bytes:
    """``file`` from its first frame on. Behind a tag (ID3) libmtmd would read other kinds of files too."""
    if len(file) > MAX_MP3_BYTES:
        raise BadArgument(f"an MP3 file has at most {MAX_MP3_BYTES >> 20} MiB", field="images")
    at = 0
    while file[at : at + 3] == b"ID3" and len(file) >= at + 10:
        size = 0
        for byte in file[at + 6 : at + 10]:
            size = size << 7 | byte & 0x7F
        at += 10 + size + (10 if file[at + 5] & 0x10 else 0)
    first = _FRAME.search(file, at)
    if first is None:
        raise BadArgument("a sound is no WAV or MP3 file, or damaged", field="images")
    data = file[first.start() :]
    n_frames = len(_FRAME.findall(data))
    for tag in _LENGTH_TAG.finditer(data):
        begins = (tag.start() - at for at in _LENGTH_TAG_AT)
        if tag[1][0] & 1 and any(begin >= 0 and _FRAME.match(data, begin) for begin in begins):
            n_frames = max(n_frames, int.from_bytes(tag[2], "big"))
    if n_frames > MAX_FRAMES:
        raise BadArgument(
            f"an MP3 file has at most {MAX_FRAMES} frames, and this one has {n_frames}: cut it to {MAX_SECONDS} s",
            field="images",
        )
    return data


def is_sound(data: bytes) -> bool:
    """Whether a file begins like a WAV or MP3 file. libmtmd decides by the same bytes, but takes WebP images for WAV
    files."""
    wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    return wav or data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0)


def tone(seconds: float, rate: int = 16_000) -> Sound:
    """A WAV file with a tone of 440 Hz, 8 bits, one channel."""
    samples = bytes(128 + (100 if index * 880 // rate % 2 else -100) for index in range(int(seconds * rate)))
    return Sound(_wav_file(_FORMAT.pack(_PCM, 1, rate, rate, 1, 8), samples))
