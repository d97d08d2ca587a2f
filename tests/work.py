"""Measures the work of a call in a unit that does not depend on the machine or its load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def count_calls(call: Callable[[], object]) -> int:
    """The number of function calls, of Python and of C, that ``call`` makes. The call itself is counted too."""
    count = 0

    def see(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count
