"""sdk/frameshard/options.py: the keyword arguments of launch, of jobs and of leases, for both Python clients."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from files import ROOT
from manifest import Manifest

OPTIONS = ROOT / "sdk" / "frameshard" / "options.py"

HEAD = '''"""Keyword arguments that :mod:`frameshard` and :mod:`frameshard.sync` share.

Written by `make generate` from bindings/generated-manifest.json; do not edit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from frameshard.images import Pixels
from frameshard.tools import Tool
from frameshard.wire.messages import Sampling
'''

# What is a list elsewhere, and a map by name in Python.
WORDS_OF_MAPS = {
    "each as `NAME=PATH` of a GGUF file": "as paths of GGUF files by name",
    "LoRA adapters, for the whole job.": 'LoRA adapters, for the whole job, as scales by name: `{"pirate": 0.8}`.',
}

KINDS = {"text": "str", "int": "int", "number": "float", "bool": "bool"}


def generate(manifest: Manifest, made: dict[Path, str]) -> dict[Path, str]:
    submit, budget_set = manifest["requests"]["submit"]["fields"], manifest["requests"]["budget_set"]["fields"]
    launch = _without(manifest["launch"]["fields"], "model", "vram_budget_bytes")
    jobs = _without(submit, "id", "epoch", "job", "kind", "messages", "prompt")
    terms = _without(budget_set, "id", "epoch", "vram_budget_bytes")
    classes = [
        _class("LaunchOptions", "How a sidecar is started; see :func:`frameshard.launch`.", launch),
        _class("JobOptions", "What a job may be given; see :meth:`frameshard.Client.ask`.", jobs),
        _class("LeaseTerms", "Terms of a lease beside its budget; see :meth:`frameshard.Client.set_budget`.", terms),
    ]
    return {OPTIONS: "\n\n".join([HEAD, *classes])}


def _without(fields: Iterable[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [field for field in fields if field["name"] not in names]


def _class(name: str, about: str, fields: Iterable[dict[str, Any]]) -> str:
    lines = [f"class {name}(TypedDict, total=False):", f'    """{about}"""', ""]
    for field in fields:
        lines += _member(field)
    return "\n".join(lines) + "\n"


def _member(field: dict[str, Any]) -> Iterator[str]:
    name, text, default = field["name"], field["text"], field.get("default")
    for elsewhere, here in WORDS_OF_MAPS.items() if name == "adapters" else ():
        text = text.replace(elsewhere, here)
    if field.get("unit") == "bytes" and name.endswith("_bytes") and field["max"] == 2**53 - 1:
        yield f"    {name.removesuffix('_bytes')}_mb: float"
        text += " In MiB."
        default = default and default >> 20
    else:
        yield f"    {name}: {_kind(field)}"
    if default not in (None, "", [], {}):
        text += f" By default {default}."
    lines = textwrap.wrap(f'"""{text}"""', 116)
    yield from ("    " + line for line in lines)


def _kind(field: dict[str, Any]) -> str:
    if field["name"] == "images":
        return "Sequence[bytes | Pixels]"
    if field["name"] == "adapters":  # of a job with scales, of a launch with paths
        return f"Mapping[str, {'float' if 'record' in field['items'] else 'str | os.PathLike[str]'}]"
    if field.get("path"):
        return "str | os.PathLike[str] | None"
    if field["type"] == "word":
        kind = "Literal[" + ", ".join(f'"{word}"' for word in field["words"]) + "]"
    elif field["type"] == "array":
        kind = f"Sequence[{_kind({'name': '', **field['items']})}]"
    else:
        kind = KINDS.get(field["type"]) or field["record"]
    return kind + (" | None" if field.get("nullable") else "")
