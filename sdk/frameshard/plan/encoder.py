"""Checks the GGUF header of a sentence encoder."""

from __future__ import annotations

import os
from pathlib import Path

from frameshard.errors import BadModel
from frameshard.plan.model import Model, read_model

POOLINGS = {1: "mean", 2: "cls", 3: "last"}
"""llama.cpp's kinds of pooling that make one row of a text."""


def read_encoder(path: str | os.PathLike[str]) -> Model:
    """Reads and checks the header.

    :raises ModelNotFound: there is no such file.
    :raises BadModel: the file is not a sentence encoder, is truncated or contradicts itself. The message says what is
        wrong.
    """
    model = read_model(path)
    key = f"{model.arch}.pooling_type"
    if model.metadata.get(key) not in POOLINGS:
        raise BadModel(
            f"{Path(path).name} is not a sentence encoder: {key} is {model.metadata.get(key, 'missing')}, "
            f"not {', '.join(f'{number} ({name})' for number, name in POOLINGS.items())}",
            path=str(path),
        )
    return model
