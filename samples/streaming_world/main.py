"""A flight through cities and fields, whose textures and meshes live in VRAM, while villagers talk.

    python samples/streaming_world/main.py                            a window, if there is a display
    python samples/streaming_world/main.py --device CUDA0 --model qwen3-4b.gguf --grant-mb 8192 --record deal.json

In a city the streaming pool needs most of the grant, and the sidecar shrinks before the first street comes into view.
Over the fields the pool needs little, and the sidecar grows. The bar shows who holds what: the picture, the pool, the
sidecar. `--static` flies with a fixed split instead, `--no-ai` without a sidecar. plot.py draws recordings.

Needs OpenGL 3.3. Without a display it draws through EGL, on a GPU or with Mesa's software renderer. The exit status is
1 if more than the grant was held at any time, or if an answer was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

import trio

from frameshard.errors import FrameshardError


def first_of(error: BaseException) -> BaseException:
    """The error itself, out of the groups that nurseries put it into."""
    inside = getattr(error, "exceptions", None)
    return first_of(inside[0]) if inside else error


def explain(error: BaseException, no_opengl: type[Exception]) -> int:
    """Says what went wrong. Returns the exit status."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, FrameshardError):
        print(f"{error.name}: {error}", file=sys.stderr)
    elif isinstance(error, no_opengl):
        print(error, file=sys.stderr)
    else:
        raise error
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a known name (smollm2-135m)")
    parser.add_argument("--device", default="emulated:0.5", help="CUDA0, …, or emulated:0.5 (GB/s)")
    parser.add_argument("--grant-mb", type=int, default=128, help="VRAM for picture, pool and sidecar in MiB (128)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the flight (60)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--static", action="store_true", help="a fixed split: the pool has all that a city needs")
    how.add_argument("--no-ai", action="store_true", help="fly without a sidecar")
    parser.add_argument("--record", metavar="FILE.json", help="write the recording")
    parser.add_argument("--unattended", action="store_true", help="no window")
    args = parser.parse_args()
    if not 5 <= args.seconds <= 3600 or args.grant_mb < 16:
        parser.error("a flight takes 5 to 3600 s, and at least 16 MiB")
    if args.record:
        try:
            open(args.record, "ab").close()  # fails now and not after the flight
        except OSError as error:
            parser.error(f"--record: {error}")
    display = sys.platform in ("win32", "darwin") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
    try:
        from flight import fly
        from scene import NoOpenGL
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed: pip install 'frameshard[samples]'", file=sys.stderr)
        return 2
    try:
        flight = trio.run(lambda: fly(args, window=display and not args.unattended))
    except BaseException as error:
        return explain(first_of(error), NoOpenGL)
    print(flight.summary())
    if args.record:
        with open(args.record, "w") as file:
            json.dump(asdict(flight) | {"figures": flight.figures()}, file)
    return 1 if flight.largest_bytes > flight.grant_bytes or flight.n_lost else 0


if __name__ == "__main__":
    sys.exit(main())
