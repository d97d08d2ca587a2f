"""The Python programs of the documents run as they are printed. Only the names of models and servers are replaced, and
they ask for the beginning of the likeliest text: with a random seed a small model says nothing now and then."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from servers import server, sidecar
from sidecars import DEADLINE_S, started

DOCS = Path(__file__).parents[1] / "docs"
MAX_LINES = 15
"""A program that shows one thing is short. Blank lines do not count."""

LIKELIEST = "sampling=frameshard.Sampling(temperature=0, max_tokens=20)"
WITH_CALLS = "sampling=frameshard.Sampling(temperature=0, max_tokens=64)"  # a call takes some of the tokens
WHOLE = "sampling=frameshard.Sampling(temperature=0)"


def program(document: str, number: int = 0, model: Path | None = None, **names: str) -> list[str]:
    """Returns the command that runs a program of a document.

    :param number: counts the blocks of Python of the document.
    :param model: takes the place of SmolLM2.
    :param names: what replaces a text of the program, by the text.
    """
    if model is not None:
        names['resolve("smollm2-135m")'] = repr(str(model))
    text = re.findall(r"^```python\n(.*?)^```", (DOCS / document).read_text(), flags=re.MULTILINE | re.DOTALL)[number]
    assert sum(1 for line in text.splitlines() if line.strip()) <= MAX_LINES
    for old, new in names.items():
        assert old in text, f"{document} no longer has {old}"
        text = text.replace(old, new)
    return [sys.executable, "-c", text]


def printed(command: list[str], **options: object) -> str:
    """Runs a program to its end, and returns what it has printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return str(done.stdout)


def test_asyncio(model_path: Path) -> None:
    """Warnings, of asyncio's debug mode too, are errors in it."""
    python, *command = program(
        "python.md",
        **{'conversation="mira"': f'conversation="mira", {LIKELIEST}', "ask(question)": f"ask(question, {LIKELIEST})"},
    )
    said = printed([python, "-X", "dev", "-W", "error", *command])
    answer, others = re.findall(r"(.*)(\[.*\])\n$", said, flags=re.DOTALL)[0]
    assert answer.strip()
    assert len([text for text in ast.literal_eval(others) if text]) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="host memory is counted on Linux")
def test_host_memory(model_path: Path) -> None:
    held = re.fullmatch(r"(\d+) MiB; (\d+) as the system counts\n", printed(program("host-memory.md")))
    assert held is not None
    assert all(90 < int(n_mib) <= 600 for n_mib in held.groups())


def test_tools(model_path: Path) -> None:
    command = program("tools.md", **{'conversation="smith"': f'conversation="smith", {WITH_CALLS}'})
    assert printed(command).strip()


def test_thinking(opening_model: Path) -> None:
    command = program("thinking.md", **{'conversation="thief"': f'conversation="thief", {WHOLE}'})
    said = printed([*command, str(opening_model)])
    assert said.startswith("thinks: True")
    n_thought, n_generated = map(int, re.findall(r"(\d+) of (\d+) tokens were thought", said)[0])
    assert 0 < n_thought <= min(201, n_generated)  # a thought of 200 is ended with a line break


def test_memory(wordy_model: Path, encoder_path: Path) -> None:
    names = {'remember: {memory}"': f'remember: {{memory}}", {LIKELIEST}'}
    command = program("memory.md", model=wordy_model, **names)
    memory, answer = printed(command).split("\n", 1)
    assert memory == "My goat is called Pip."
    assert answer.strip()


def test_the_http_server(wordy_model: Path) -> None:
    with started(program("http.md", model=wordy_model), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, key = process.stdout.readline().split()
        process.kill()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", url)
    assert len(key) >= 32


def test_a_client_of_the_http_server(tmp_path: Path, wordy_model: Path) -> None:
    with (
        sidecar(tmp_path, model=str(wordy_model), device="emulated") as (connect_file, _),
        server(connect_file) as http,
    ):
        assert http.key is not None
        (tmp_path / "key").write_text(http.key)
        names = {
            "127.0.0.1:8080": f"127.0.0.1:{http.port}",
            'user="mira",': 'user="mira", temperature=0, max_tokens=20,',
        }
        assert printed(program("http.md", 1, **names), cwd=tmp_path).strip()


def test_a_server_when_there_is_no_room(tmp_path: Path, wordy_model: Path) -> None:
    with (
        sidecar(tmp_path, model=str(wordy_model), device="emulated") as (connect_file, _),
        server(connect_file) as http,
    ):
        assert http.key is not None
        names = {
            '"my.gguf",': f'{str(wordy_model)!r}, device="emulated",',
            "https://llm.example.com/v1": f"http://127.0.0.1:{http.port}/v1",
            'conversation="mira"': f'conversation="mira", {LIKELIEST}',
        }
        said = printed(program("fallback.md", **names), env={**os.environ, "LLM_KEY": http.key})
    answer, is_remote = re.findall(r"(.*)(True|False)\n$", said, flags=re.DOTALL)[0]
    assert is_remote == "True"
    assert answer.strip()
