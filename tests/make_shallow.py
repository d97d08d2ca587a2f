"""Cuts a dense GGUF of the llama architecture down to its first layers, for tests.

Its tokens, chat template, heads and kinds of weights are those of the whole model, and what it says is no language.
"""

from __future__ import annotations

from pathlib import Path

from mutants import Gguf

LAYERS = 6


def make(source: Path, path: Path) -> None:
    file = Gguf(source)
    file.key("llama.block_count").value = LAYERS
    parts = ((each, each.name.split(b".")) for each in file.tensors)
    file.tensors = [each for each, part in parts if part[0] != b"blk" or int(part[1]) < LAYERS]
    file.write(path)
