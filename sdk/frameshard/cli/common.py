"""Shared by the subcommands: common arguments, sizes, tables and JSON output."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

from frameshard.cpu import default_threads
from frameshard.errors import BadArgument
from frameshard.wire.checks import Refused, fields_of
from frameshard.wire.codec import MAX_ID
from frameshard.wire.launch import KV_TYPES, MAX_THREADS, EngineOptions

if TYPE_CHECKING:
    from frameshard.engine.runtime import Runtime
    from frameshard.wire.engine import EngineConfig

T = TypeVar("T")

UNITS = {
    "": 2**20,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) *([A-Za-z]*)")


WIDTH = 80
"""The most columns of tables and sentences."""


def parse_size(text: str) -> int:
    """The bytes of a size such as ``"64"`` (MiB), ``"1.5GiB"`` or ``"800 MB"``, rounded up: a size above 0 must not
    become 0, "no limit".

    :raises BadArgument: the text is not a size, or one that no message can have.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in UNITS:
        raise BadArgument(f"{text!r} is not a size: a number of MiB, or one with B, KB, KiB, MB, MiB, GB or GiB")
    n_bytes = math.ceil(Decimal(match[1]) * UNITS[match[2].lower()])
    if n_bytes > MAX_ID:
        raise BadArgument(f"{text!r} is too large for a size: at most {MAX_ID} bytes")
    return n_bytes


def parse_budgets(text: str) -> list[int]:
    """The bytes of each size in a list such as ``"64,96,1.5GiB"``.

    :raises BadArgument: a part is not a size.
    """
    return [parse_size(part) for part in text.split(",")]


def sizes_of(text: str) -> list[int]:
    """The budgets of a list in bytes, without ``floor`` and ``full``; 0 for no limit if nothing else is in it."""
    words = (part.strip() for part in text.split(","))
    return [parse_size(word) for word in words if word not in ("floor", "full")] or [0]


def load_within(config: EngineConfig, budgets: str) -> Runtime:
    """Loads a model within the largest budget of the list ``budgets``. If ``floor`` is the only one, no weights become
    resident. Raises the errors of ``Runtime.load`` too.

    :raises BudgetBelowFloor: the largest budget is too small.
    """
    from frameshard.engine.runtime import Runtime
    from frameshard.engine.scratch import try_files

    try_files(config.model, config.mmproj)
    named, sizes = {part.strip() for part in budgets.split(",")}, sizes_of(budgets)
    config = replace(config, vram_budget_bytes=0 if "full" in named else max(sizes))
    return Runtime.load(config, fill=named != {"floor"})


def budgets_of(text: str, runtime: Runtime) -> Iterator[int | None]:
    """The budgets of a list in bytes. ``floor`` and ``full`` are those of the loaded model. On the CPU there is one
    budget, ``None``.

    :raises BudgetBelowFloor: one of them is below the floor.
    """
    from frameshard.errors import below_floor

    if runtime.device is None:
        yield None
        return
    stats = runtime.device.stats()
    named = {"floor": stats.floor_bytes, "full": stats.full_bytes}
    for part in text.split(","):
        budget = named[part.strip()] if part.strip() in named else parse_size(part)
        if 0 < budget < stats.floor_bytes:
            raise below_floor(budget, stats.floor_bytes)
        yield budget


def format_size(n_bytes: int) -> str:
    """A size in MiB as text. It is rounded up, so that a user who types it in gets at least this size."""
    return f"{-(-n_bytes // 2**20)} MiB"


def wrapped(text: str, *, indent: int = 0, hanging: int = 0) -> str:
    """Wraps a sentence to lines of at most :data:`WIDTH` columns. Paths and names are not broken.

    :param indent: columns before the first line.
    :param hanging: columns before the other lines.
    """
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows with the same number of cells as a table. The first row has the headings. Cells are aligned to the
    right, with two spaces between columns, or one if the table would be wider than :data:`WIDTH`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    space = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    return "\n".join(space.join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def size(text: str) -> int:
    """The type of an option: :func:`parse_size`, with errors that argparse shows with the option's name."""
    try:
        return parse_size(text)
    except BadArgument as error:
        raise argparse.ArgumentTypeError(error.message) from None


def positive(text: str) -> int:
    """The type of an option: an integer from 1 to 2^31 - 1."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def threads(text: str) -> int:
    """The type of an option: a number of threads that a launch accepts too."""
    if positive(text) > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_THREADS} threads")
    return int(text)


def accepted(record: Any, field: str, convert: Callable[[str], T]) -> Callable[[str], T]:
    """The type of an option that becomes a field of a message or of the launch options. It takes what the field does.

    :param record: the class with the field.
    :param convert: makes the value of the text; raises ValueError or ArgumentTypeError if it cannot.
    """

    def take(text: str) -> T:
        try:
            value = convert(text)
            fields_of(record)[field].check.take(value, True)
        except Refused as refused:
            raise argparse.ArgumentTypeError(f"{text!r} {refused}") from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        return value

    return take


def rate(text: str) -> float:
    """The type of an option: a rate above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate above 0")
    return value


def add_model_args(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds ``--model --device --threads --json``."""
    parser.add_argument(
        "--model", required=required, metavar="PATH|NAME", help="a GGUF file, or a name that `frameshard models` knows"
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="auto: the best GPU, else the CPU (default); cpu: llama.cpp alone; "
        "emulated: a GPU emulated on the CPU (emulated:25 copies 25e9 bytes/s at most); or a name such as CUDA0",
    )
    parser.add_argument(
        "--threads", type=threads, default=default_threads(), metavar="N", help="CPU threads (half of the CPUs)"
    )
    add_json_arg(parser)


def add_json_arg(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def add_context_args(parser: argparse.ArgumentParser) -> None:
    """Adds ``--ctx --parallel --ubatch --kv-type``."""
    parser.add_argument(
        "--ctx",
        type=accepted(EngineOptions, "n_ctx", positive),
        default=4096,
        metavar="N",
        help="context of each conversation in tokens (4096)",
    )
    parser.add_argument(
        "--parallel",
        type=accepted(EngineOptions, "n_parallel", positive),
        default=4,
        metavar="N",
        help="jobs that run at once (4)",
    )
    add_ubatch_arg(parser)
    add_kv_type_arg(parser)


def add_adapter_arg(parser: argparse.ArgumentParser) -> None:
    """Adds ``--adapter``."""
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a LoRA adapter that jobs may use; may be given more than once (none)",
    )


def add_ubatch_arg(parser: argparse.ArgumentParser) -> None:
    """Adds ``--ubatch``; its value is 0 if it is not given."""
    parser.add_argument(
        "--ubatch",
        type=accepted(EngineOptions, "n_ubatch", positive),
        default=0,
        metavar="N",
        help="prompt tokens computed at once, the same number at every budget (the best one for each)",
    )


def add_kv_type_arg(parser: argparse.ArgumentParser) -> None:
    """Adds ``--kv-type``."""
    parser.add_argument(
        "--kv-type",
        choices=KV_TYPES,
        default="f16",
        help="how keys and values are kept (f16); q8_0 takes half as much, q4_0 little more than a quarter",
    )


def to_json(document: Mapping[str, object]) -> str:
    """A JSON document for a file or stdout.

    :raises ValueError: a number is NaN or infinity, which JSON does not have.
    """
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def emit_json(document: Mapping[str, object]) -> None:
    """Writes the JSON document of a command to stdout. A command writes only one."""
    sys.stdout.write(to_json(document))
    sys.stdout.flush()
