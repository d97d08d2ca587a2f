"""``frameshard doctor``: what this machine has, what frameshard can use of it, and why not the rest.

GPU drivers are asked in a child process, because a broken one may end the process that asks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from frameshard import cpu, ggml, program, system
from frameshard.errors import FrameshardError

from . import common

ASK_S = 200.0
"""Seconds that all GPU drivers together have to answer."""

MAX_LAST_WORDS = 300
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Facts = dict[str, str]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine has, and what frameshard can use of it",
        description="Tells the versions, the CPU, the GPUs and the limits of this machine, and what keeps frameshard "
        "from using them. Paste its output into a bug report: it has no names of users or hosts. The exit status is 1 "
        "if no model can run here.",
    )
    common.add_json_arg(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    devices, problems = _devices()
    files, unread = _files()
    problems += unread
    sections = {"versions": _versions(), "machine": _machine(), "files": files, "devices": devices}
    works = "native library" in devices
    if args.json:
        common.emit_json({"works": works, "problems": problems, **sections})
        return not works
    for title, facts in sections.items():
        print(f"{title}:")
        for name, value in facts.items():
            print(common.wrapped(f"{name}: {value}", indent=2, hanging=4))
    for problem in problems:
        print(common.wrapped(f"problem: {problem}", hanging=2))
    print("models can run here" if works else "no model can run here")
    return not works


def _versions() -> Facts:
    """The versions of Python, of the system, and of all packages that frameshard uses, also optional ones. Only an
    installed frameshard knows these; else llama.cpp's stands for them."""
    try:
        version, required = metadata.version("frameshard"), metadata.requires("frameshard") or []
    except metadata.PackageNotFoundError:
        version, required = "not installed, run from its source", ["llama-cpp-python"]
    required = [line for line in required if "extra == 'dev'" not in line.replace('"', "'")]
    found = (match[0] for line in required if (match := _NAME.match(line)))
    facts = {"frameshard": version, "python": platform.python_version()}
    facts["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    with contextlib.suppress(OSError):
        facts["distribution"] = platform.freedesktop_os_release()["PRETTY_NAME"]
    for name in sorted(set(found)):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def _machine() -> Facts:
    facts = {"cpu": cpu.name(), "logical cpus": f"{os.cpu_count()}, threads by default {cpu.default_threads()}"}
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
        facts["host memory"] = f"{kib['MemTotal'] >> 10} MiB, available {kib['MemAvailable'] >> 10} MiB"
    facts.update(_limits())
    return facts


def _limits() -> Iterator[tuple[str, str]]:
    """The limits of this process that matter: pinned memory counts as locked."""
    if sys.platform == "win32":
        return
    import resource

    for name, which in (("locked memory", resource.RLIMIT_MEMLOCK), ("open files", resource.RLIMIT_NOFILE)):
        soft, _ = resource.getrlimit(which)
        unit = " bytes" if which == resource.RLIMIT_MEMLOCK else ""
        yield f"limit of {name}", "none" if soft == resource.RLIM_INFINITY else f"{soft}{unit}"


def _files() -> tuple[Facts, list[str]]:
    """What frameshard keeps, and the problems. What cannot be read is left out."""
    from frameshard import models
    from frameshard.broker import endpoint

    facts, problems = {}, []
    questions: dict[str, Callable[[], object]] = {
        "cache": models.cache_dir,
        "models": lambda: len(models.fetched()),
        "machine profiles": lambda: len(list((models.cache_dir() / "profiles").glob("*.json"))),
        "running sidecars": lambda: len(endpoint.running()),
    }
    for name, ask in questions.items():
        try:
            facts[name] = _anonymous(str(ask()))
        except (FrameshardError, OSError) as error:
            problems.append(_anonymous(f"{name}: {error}"))
    return facts, problems


def _devices() -> tuple[Facts, list[str]]:
    """What the child process has found, and the problems."""
    try:
        child = subprocess.run(
            program.command(__name__),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # drivers write what they like
            timeout=ASK_S,
        )
    except subprocess.TimeoutExpired:
        return {}, [f"the GPU drivers do not answer within {ASK_S:g} s"]
    try:
        found = json.loads(child.stdout)
    except ValueError:
        last_words = child.stderr.strip()[-MAX_LAST_WORDS:]
        return {}, [_anonymous(f"asking the GPU drivers ended with status {child.returncode}: {last_words}")]
    facts = {name: _anonymous(value) for name, value in found["facts"].items()}
    return facts, [_anonymous(problem) for problem in found["problems"]]


def _anonymous(text: str) -> str:
    """The text with "~" for the user's home directory, which has the user's name."""
    home = system.home()
    if home is None or home == Path(home.anchor):  # as that of some containers
        return text
    return re.sub(rf"(?<!\w){re.escape(str(home))}(?!\w|[.-]\w)", "~", text)


class _Examination:
    """What the child process finds. A failed check leaves out the facts behind it."""

    def __init__(self) -> None:
        self.facts: Facts = {}
        self.problems: list[str] = []

    def run(self) -> None:
        try:
            import llama_cpp  # noqa: F401
        except Exception as error:  # a library that it is linked to is missing, such as that of a driver
            self.problems.append(f"llama-cpp-python does not load: {error}")
            return
        from frameshard.engine.probe import gpu_names

        self.facts.update({f"nvidia {name}": str(value) for name, value in gpu_names().items()})
        try:
            self._look_at_ggml()
        except FrameshardError as error:
            self.problems.append(error.message)

    def _look_at_ggml(self) -> None:
        from frameshard import native
        from frameshard.engine import gpus, llamalog
        from frameshard.engine.probe import gpu_names

        features = cpu.compiled_for()
        self.facts["llama.cpp compiled for"] = "several CPUs" if features is None else ", ".join(sorted(features))
        cpu.check()
        llamalog.install()
        native.check_library()
        self.facts["native library"] = f"interface {native.INTERFACE_VERSION}"
        self.facts["ggml"] = ggml.version()
        found = {gpu.name: gpu for gpu in gpus.registered()}
        for module in ggml.MODULES:
            if ggml.has_inside(module):
                self.facts[f"module {module}"] = "not needed: llama-cpp-python has it inside"
                continue
            try:
                found |= {gpu.name: gpu for gpu in gpus.try_module(module)}
            except gpus.NotWorking as reason:
                self.facts[f"module {module}"] = f"not used: {reason}"
            else:
                self.facts[f"module {module}"] = "works"
        for name, gpu in found.items():
            memory = f"{gpu.free_bytes >> 20} of {gpu.total_bytes >> 20} MiB free"
            self.facts[name] = f"{gpu.description}, {memory}"
        self.facts["auto"] = next(iter(found), "cpu")
        expected = any(ggml.has_inside(module) or ggml.module_path(module).is_file() for module in ggml.MODULES)
        if not found and (expected or gpu_names()):
            self.problems.append("no GPU is used: the lines of the modules say why")


def _main() -> None:
    """Runs in the child process. Prints a JSON document; what libraries and drivers write is on standard error."""
    told = os.dup(1)
    os.dup2(2, 1)
    examination = _Examination()
    examination.run()
    with open(told, "w") as output:
        json.dump(vars(examination), output)


if __name__ == "__main__":
    _main()
