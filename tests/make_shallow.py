"""Cuts a dense GGUF of the llama architecture down to its first layers, or to its first and last ones, for tests.

Its tokens, chat template, heads and kinds of weights are those of the whole model, and what it says is no language.
With the last layers it says words, and an answer of a given form comes to its end.
"""

from __future__ import annotations

from pathlib import Path

from mutants import Gguf, Info

LAYERS = 6


def make(source: Path, path: Path, *, first: int = LAYERS, last: int = 0) -> None:
    """Keeps so many of the first layers and of the last ones."""
    file = Gguf(source)
    count = file.key("llama.block_count")
    kept = [*range(first), *range(count.value - last, count.value)]
    count.value = len(kept)
    file.tensors = [each for each in file.tensors if _number(each, kept)]
    file.write(path)


def move_adapter(source: Path, path: Path, layer: int, to: int) -> None:
    """Makes a LoRA adapter that changes one layer change another one."""
    file = Gguf(source)
    for each in file.tensors:
        each.name = each.name.replace(b"blk.%d." % layer, b"blk.%d." % to)
    file.write(path)


def _number(tensor: Info, kept: list[int]) -> bool:
    """Gives a tensor the new number of its layer. False if the layer is not kept."""
    kind, _, rest = tensor.name.partition(b".")
    if kind != b"blk":
        return True
    layer, _, name = rest.partition(b".")
    if int(layer) not in kept:
        return False
    tensor.name = b"blk.%d.%b" % (kept.index(int(layer)), name)
    return True
