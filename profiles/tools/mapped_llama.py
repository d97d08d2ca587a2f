"""Runs llama.cpp itself, with its file mapped, in as much host memory as a limit allows. disk_tier.py compares with it.

The limit is that of a memory cgroup. Where none can be made, another process can hold all memory beyond the limit.

As a program it is the process that runs llama.cpp. It reads the prompt, and then decodes tokens that are drawn evenly
from the vocabulary. llama.cpp leaves weights in the mapping (no repacking), since a copy of them would not fit.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp  # first, because frameshard's planner imports numpy: libllama crashes behind some of its wheels

from frameshard import native
from frameshard.cli.equal_vram import OVERHEAD, Search
from frameshard.cli.upstream import layers_on_gpu
from frameshard.cli.vram import run_observed
from frameshard.engine.observer import find_observer
from frameshard.native import EMULATED
from frameshard.plan.memory import kv_bytes
from frameshard.plan.model import read_model

N_CTX = 1024
SEED = 7
EXPERTS = rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # llama.cpp's own pattern for -ncmoe

# --- the memory cgroup ------------------------------------------------------------------------------------------------


def own_group() -> tuple[Path, bool]:
    """The directory of this process's memory cgroup, and whether it is of version 2.

    :raises OSError: there is none.
    """
    paths = {}  # by controller; "" is version 2
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words, _, rest = line.partition(" - ")
        root, mount = words.split()[3:5]
        kind, _, options = rest.split(" ", 2)
        controller = "memory" if kind == "cgroup" and "memory" in options.split(",") else ""
        if (kind == "cgroup2" or controller) and controller in paths:
            below = Path(mount, os.path.relpath(paths[controller], root))
            found[controller] = below if below.is_dir() else Path(mount)
    if not found:
        raise OSError("no memory cgroup is mounted")
    return found.get("memory") or found[""], "memory" not in found


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A memory cgroup with a limit, below that of this process.

    :raises OSError: none can be made here.
    """
    own, unified = own_group()
    if unified and "memory" not in (own / "cgroup.subtree_control").read_text().split():
        (own / "cgroup.subtree_control").write_text("+memory")
    group = own / f"mapped-llama-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # a kernel that does not count swap
            name, value = ("memory.swap.max", 0) if unified else ("memory.memsw.limit_in_bytes", limit_bytes)
            (group / name).write_text(str(value))
        yield group
    finally:
        group.rmdir()


# --- memory that another process holds --------------------------------------------------------------------------------

# Takes all memory but so many bytes, says so, and holds it until its input ends.
HOLDER = """
import mmap, pathlib, re, sys
pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
left_bytes, page_bytes, held = int(sys.argv[1]), mmap.PAGESIZE, []
while True:
    available = re.search(r"MemAvailable: +([0-9]+)", pathlib.Path("/proc/meminfo").read_text())
    n_pages = min((int(available[1]) << 10) - left_bytes, 1 << 28) // page_bytes
    if n_pages < 256:
        break
    held.append(mmap.mmap(-1, n_pages * page_bytes))
    held[-1].madvise(mmap.MADV_HUGEPAGE)
    held[-1][::page_bytes] = bytes(n_pages)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def memory_left(left_bytes: int) -> Iterator[int]:
    """Has a process hold all memory of the machine but so many bytes. Yields its id.

    It is the first one that the kernel ends when memory runs out.

    :raises OSError: it did not hold them to the end.
    """
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(left_bytes)], **pipes) as holder:
        holds = bool(holder.stdout.readline())
        if holds:
            yield holder.pid
        if not holds or holder.poll() is not None:
            raise OSError("the process that holds the memory was ended")


@contextlib.contextmanager
def limited(command: list[str], limit_bytes: int, *, hold_memory: bool) -> Iterator[list[str]]:
    """Yields the command that runs another one in so much host memory; 0 is no limit.

    :raises OSError: the limit cannot be set, or did not hold.
    """
    if not limit_bytes:
        yield command
    elif hold_memory:
        with memory_left(limit_bytes):
            yield command
    else:
        with memory_group(limit_bytes) as group:
            yield ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]


# --- its runs ---------------------------------------------------------------------------------------------------------


def run(
    model: str,
    device: str,
    setting: tuple[str, ...],
    *,
    prompt: str,
    n_tokens: int,
    threads: int,
    most_s: float,
    limit_bytes: int = 0,
    hold_memory: bool = False,
    vram_bytes: float = float("inf"),
) -> dict[str, Any]:
    """Runs it in a process of its own.

    :param setting: the arguments that place weights on the GPU.
    :param most_s: no token is begun so many seconds after the first.
    :param limit_bytes: of host memory; 0 for none.
    :param hold_memory: a process holds all memory beyond the limit. Else it is that of a memory cgroup.
    :param vram_bytes: the process is ended when it takes more.
    :returns: seconds from the start of the process to the first token, seconds for a token, and the most VRAM; or
        ``why`` it has none of them.
    """
    inner = native.parse_device(device).inner
    command = [sys.executable, __file__, model, *setting, "--prompt", prompt, "--generate", str(n_tokens)]
    command += ["--threads", str(threads), "--most-s", str(most_s), "--device", "" if inner == EMULATED else inner]
    with tempfile.TemporaryFile("w+") as log:
        try:
            with limited(command, limit_bytes, hold_memory=hold_memory) as within:
                start = time.monotonic()
                ran = run_observed(within, find_observer, log, limit_bytes=vram_bytes)
        except OSError as error:
            return {"why": f"no limit by {'other memory' if hold_memory else 'a memory cgroup'}: {error}"}
        if (ran.peak_bytes or 0) > vram_bytes:
            return {"why": "it takes more VRAM than the budget", "vram_bytes": ran.peak_bytes}
        if ran.code or not ran.output:
            log.seek(0)
            last = " ".join(log.read().split()[-20:])
            return {"why": f"it ended with {ran.code}: {last}"}
    found = json.loads(ran.output.splitlines()[-1])
    first_s = found.pop("first_at") - start
    return {"setting": " ".join(setting), "first_token_s": first_s, **found, "vram_bytes": ran.peak_bytes}


def best_setting(model: str, device: str, vram_bytes: int, **options: Any) -> tuple[str, ...]:
    """The most layers and experts on the GPU with which the process takes no more than a VRAM budget. It runs them, in
    the page cache."""
    shape = read_model(model)
    ways = layers_on_gpu(shape, kv_bytes(shape, N_CTX))
    if native.parse_device(device).inner == EMULATED or find_observer().source is None:
        return ways[0][0]
    search = Search([n_bytes for _, n_bytes in ways], vram_bytes, OVERHEAD)
    while (index := search.next) is not None:
        found = run(model, device, ways[index][0], n_tokens=1, vram_bytes=vram_bytes, most_s=0, **options)
        if "why" in found or found["vram_bytes"] is None:
            search.does_not_fit(index)
        else:
            search.fits(index, found["vram_bytes"])
    return ways[search.best or 0][0]


# --- the process ------------------------------------------------------------------------------------------------------


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def _on_cpu(n_layers: int) -> Any:
    """Has the experts of the first layers on the CPU."""
    from frameshard import ggml

    cpu = ggml.registry().ggml_backend_cpu_buffer_type
    cpu.restype = ctypes.c_void_p
    patterns = [rb"blk\.%d%s" % (i, EXPERTS) for i in range(n_layers)]
    return (_Override * (n_layers + 1))(*(_Override(pattern, cpu()) for pattern in patterns))


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and a context."""
    from frameshard import ggml

    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
    params.use_extra_bufts = False
    params.n_gpu_layers = args.ngl
    devices = (ctypes.c_void_p * 2)(ggml.device_handle(args.device) if args.device else None, None)
    params.devices = ctypes.cast(devices, ctypes.c_void_p).value
    overrides = _on_cpu(args.ncmoe)
    if args.ncmoe:
        params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p).value
    model = llama_cpp.llama_model_load_from_file(os.fsencode(args.model), params)
    of_context = llama_cpp.llama_context_default_params()
    of_context.n_ctx, of_context.n_threads, of_context.n_threads_batch = N_CTX, args.threads, args.threads
    context = llama_cpp.llama_init_from_model(model, of_context) if model else None
    if not context:
        raise SystemExit("llama.cpp refuses the model or the context")
    return model, context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-ngl", type=int, default=0)
    parser.add_argument("-ncmoe", type=int, default=0)
    parser.add_argument("--device", default="", help="a device of ggml; empty for the CPU alone")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--generate", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--most-s", type=float, required=True)
    args = parser.parse_args()

    import numpy as np

    from frameshard.engine.tokenizer import tokenize

    model, context = _load(args)
    vocab = llama_cpp.llama_model_get_vocab(model)

    def decode(tokens: list[int]) -> None:
        ids = (ctypes.c_int32 * len(tokens))(*tokens)  # the batch only points to them
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(tokens))) != 0:
            raise SystemExit("llama.cpp cannot decode")
        llama_cpp.llama_get_logits_ith(context, -1)  # waits for them

    decode(tokenize(vocab, args.prompt, add_special=True, parse_special=False))
    times = [time.monotonic()]
    drawn = np.random.default_rng(SEED).integers(llama_cpp.llama_vocab_n_tokens(vocab), size=args.generate - 1)
    for token in drawn.tolist():
        if times[-1] - times[0] > args.most_s:
            break
        decode([token])
        times.append(time.monotonic())
    n_gaps = len(times) - 1
    token_s = (times[-1] - times[0]) / n_gaps if n_gaps else None
    print(json.dumps({"first_at": times[0], "n_tokens": len(times), "token_s": token_s}))


if __name__ == "__main__":
    main()
