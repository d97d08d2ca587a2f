"""Models for the tests. They are fetched or made once per machine, and kept in frameshard's cache directory.

`make test` runs four processes of tests at a time.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import make_moe
import make_shallow
import thinking_models
import tiny_models
import tiny_vision
from frameshard import models, system
from frameshard.testing import fake_engine
from servers import sidecar

# The tests start some thousand processes. Without bytecode each of them would compile what it imports anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

EXCEPTIONS: dict[str, str] = {}
"""Tests that do not run on this system: the start of their id, and why."""

if sys.platform == "win32":
    signal.SIGKILL = signal.SIGTERM  # os.kill ends a process at once with either
    _lines = (Path(__file__).parent / "windows" / "exceptions.txt").read_text().splitlines()
    EXCEPTIONS.update(line.split(None, 1) for line in _lines if not line.startswith("#"))

LONG = ("test_samples.py", "test_streaming_world.py", "engine/test_disk_tier.py", "simulation/", "hostile/")
"""Tests that take long, by the start of their id. They come first: a long test that began last would keep one process
of tests busy while the other has nothing left to do."""

KEPT_S = 7 * 24 * 3600.0
"""A made model is removed when no test has used it for so long. Tests of another checkout may use another version."""

collect_ignore = [start for start in EXCEPTIONS if start.endswith(".py")]

# There is no deadline, because the machine may be busy with other tests.
hypothesis.settings.register_profile("tests", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("tests")


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """A lock, so that processes of tests do not fetch or make the same file."""
    directory = models.cache_dir() / "tests"
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w", opener=system.open_alone):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that do not run on this system, and puts long ones first."""
    for item in items:
        for start, why in EXCEPTIONS.items():
            if item.nodeid.removeprefix("tests/").startswith(start):
                item.add_marker(pytest.mark.skip(reason=why))
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))


@contextmanager
def empty_runtime_directory() -> Iterator[None]:
    """Sidecars that start in the block know nothing of those that were started before it."""
    where = None if sys.platform == "win32" else "/tmp"  # short, for sockets
    with tempfile.TemporaryDirectory(dir=where) as directory, pytest.MonkeyPatch.context() as environment:
        if sys.platform == "win32":
            environment.setenv("XDG_CACHE_HOME", str(models.cache_dir().parent))
            environment.setenv("LOCALAPPDATA", directory)
        else:
            environment.setenv("XDG_RUNTIME_DIR", directory)
        yield


@pytest.fixture(scope="session", autouse=True)
def runtime_directory() -> Iterator[None]:
    """Each process of tests has a runtime directory of its own: a launch removes the files of dead sidecars, also those
    of other tests."""
    with empty_runtime_directory():
        yield


@pytest.fixture
def own_runtime_directory() -> Iterator[None]:
    """The test has a runtime directory of its own: sidecars of other tests that are still ending are not in it."""
    with empty_runtime_directory():
        yield


def made(name: str, make: Callable[..., None], *of: str | Path, **options: Any) -> Path:
    """A file in the cache, written by ``make(*of, path, **options)``. It is made again if the source file of ``make``,
    an argument, or the name of a model that it is made from has changed."""
    arguments = [each.name if isinstance(each, Path) else each for each in of], sorted(options.items())
    maker = Path(inspect.getfile(make)).read_bytes()
    version = hashlib.sha256(maker + repr(arguments).encode()).hexdigest()[:12]
    path = models.cache_dir() / "tests" / f"{name}-{version}.gguf"
    with one_at_a_time():
        if not path.is_file():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                part = Path(scratch) / path.name
                make(*of, part, **options)
                os.replace(part, path)
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        for version_of_it in path.parent.glob(f"{name}-{'[0-9a-f]' * 12}.gguf"):
            if version_of_it.stat().st_atime < time.time() - KEPT_S:
                version_of_it.unlink()
    return path


@pytest.fixture(scope="session")
def model_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1."""
    with one_at_a_time():
        return models.resolve("smollm2-135m")


@contextmanager
def own_copy(model: Path) -> Iterator[Path]:
    """A copy of a model whose pages no other process uses. It lies in the cache, since the directory for temporary
    files may be in memory, and is on disk: the cache can drop its pages."""
    with tempfile.TemporaryDirectory(dir=models.models_dir().parent) as directory:
        copy = Path(shutil.copy(model, Path(directory) / "model.gguf"))
        with open(copy, "rb+") as file:
            os.fsync(file.fileno())
        yield copy


@pytest.fixture
def own_model(model_path: Path) -> Iterator[Path]:
    """SmolLM2, as a copy of the test's own."""
    with own_copy(model_path) as copy:
        yield copy


@pytest.fixture
def own_shallow_model(shallow_model: Path) -> Iterator[Path]:
    """The first layers of SmolLM2, as a copy of the test's own."""
    with own_copy(shallow_model) as copy:
        yield copy


@pytest.fixture
def own_deep_model(deep_model: Path) -> Iterator[Path]:
    """The deep model, as a copy of the test's own."""
    with own_copy(deep_model) as copy:
        yield copy


@pytest.fixture
def own_moe(moe_path: Path) -> Iterator[Path]:
    """The mixture of experts, as a copy of the test's own."""
    with own_copy(moe_path) as copy:
        yield copy


@pytest.fixture
def own_shallow_moe(shallow_moe: Path) -> Iterator[Path]:
    """The shallow mixture of experts, as a copy of the test's own."""
    with own_copy(shallow_moe) as copy:
        yield copy


@pytest.fixture(scope="session")
def encoder_path() -> Path:
    """all-MiniLM-L6-v2, a sentence encoder with 384 dimensions."""
    path = models.path_of(models.ENCODER)
    with one_at_a_time():
        if not path.is_file():
            script = Path(__file__).parents[1] / "samples" / "npc_memory" / "encoder.py"
            subprocess.run([sys.executable, str(script)], check=True)
    return path


@pytest.fixture(scope="session")
def moe_path(model_path: Path) -> Path:
    """SmolLM2 with 8 experts, of which a token uses 2. Its results are those of SmolLM2."""
    return made("smollm2-moe-8x2", make_moe.make_moe, model_path)


@pytest.fixture(scope="session")
def shallow_model(model_path: Path) -> Path:
    """The first layers of SmolLM2. A token takes a third of the time of one of SmolLM2."""
    return made("smollm2-shallow", make_shallow.make, model_path)


@pytest.fixture(scope="session")
def wordy_model(model_path: Path) -> Path:
    """The first and the last layers of SmolLM2. It says words, though no sentences, and it calls tools. A token takes
    two fifths of the time of one of SmolLM2."""
    return made("smollm2-wordy", make_shallow.make, model_path, last=2)


@pytest.fixture(scope="session")
def thin_model(model_path: Path) -> Path:
    """The first and the last layer of SmolLM2, for tests that need words but no certain text."""
    return made("smollm2-thin", make_shallow.make, model_path, first=1, last=1)


@pytest.fixture(scope="session")
def shallow_moe(shallow_model: Path) -> Path:
    """The first layers of SmolLM2 with 8 experts, of which a token uses 2. Its results are those of the shallow
    model."""
    return made("shallow-moe-8x2", make_moe.make_moe, shallow_model)


@pytest.fixture(scope="session")
def opening_model(shallow_model: Path) -> Path:
    """The first layers of SmolLM2, whose prompts end in a thought. The markers are control tokens."""
    return made("shallow-opens", thinking_models.make, shallow_model, template=thinking_models.OPENS, tokens=True)


@pytest.fixture(scope="session")
def switching_model(shallow_model: Path) -> Path:
    """The first layers of SmolLM2, which can be told not to think. The markers are ordinary text."""
    switches = thinking_models.SWITCHES
    return made("shallow-switches", thinking_models.make, shallow_model, template=switches, tokens=False)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Path]:
    """Gives the file of a model by its name in ``tiny_models.ARCHS``."""
    return lambda name: made(f"tiny-{name}", tiny_models.make, name)


@pytest.fixture(scope="session")
def deep_model() -> Path:
    """A tiny dense model with 16 layers, which can be placed in many ways, and a chat template. A token of it takes a
    twentieth of the time of one of SmolLM2."""
    return made("tiny-deep", tiny_models.make, "llama", n_layer=16, chat_template=tiny_models.CHATML)


@pytest.fixture(scope="session")
def talking_model() -> Path:
    """A tiny model with one layer and a chat template, for tests of what is done with its tokens."""
    return made("tiny-talking-flat", tiny_models.make, "llama", n_layer=1, chat_template=tiny_models.CHATML)


@pytest.fixture(scope="session")
def mmproj_path() -> Path:
    """A vision tower with random weights for SmolLM2."""
    return made("tiny-vision", tiny_vision.make)


@pytest.fixture(scope="module")
def shared_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The connect file of a sidecar for tests that change neither its engine nor its lease."""
    with sidecar(tmp_path_factory.mktemp("shared"), engine=fake_engine(delay_s=0.002)) as (connect_file, _):
        yield connect_file
