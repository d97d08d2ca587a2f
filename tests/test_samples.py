"""The samples run with the commands that a user types, and the README shows hello.py."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import frameshard
import make_shallow
import sidecars
from mutants import Gguf

REPO = Path(__file__).parents[1]
SCENE = REPO / "samples" / "npc_dialogue" / "main.py"
HELLO = REPO / "samples" / "hello.py"
TRADERS = REPO / "samples" / "traders" / "main.py"
GUARD = REPO / "samples" / "scene_reasoning" / "main.py"
MEMORY = REPO / "samples" / "npc_memory" / "main.py"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )


def figures(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    assert found is not None, text
    return [int(figure) for figure in found.groups()]


def test_the_village_plays_and_the_budget_changes_during_answers(thin_model: Path, tmp_path: Path) -> None:
    """With a model of few layers, of which the fisherman's adapter changes the last one."""
    scene = Path(shutil.copytree(SCENE.parent, tmp_path / "scene"))
    adapter, layers = "sailor.gguf", Gguf(thin_model).key("llama.block_count").value
    make_shallow.move_adapter(SCENE.with_name(adapter), scene / adapter, 29, layers - 1)
    result = run(str(scene / SCENE.name), "--unattended", "--model", str(thin_model), "--device", "emulated:8")
    assert result.returncode == 0, result.stderr
    answers, shrinks, grows = figures(r"(\d+) answers; (\d+) shrinks and (\d+) grows during them", result.stdout)
    assert answers == 4
    assert shrinks >= 1
    assert grows >= 1
    (n_lore,) = figures(r"the lore that all share has (\d+) tokens", result.stdout)
    villagers, _, n_read = figures(r"(\d+) villagers made remarks and read (\d+) to (\d+) tokens", result.stdout)
    assert villagers == 12
    assert n_read < n_lore / 2
    assert "saved: 3 messages" in result.stdout
    assert "loaded: 3 messages with the traveller; before the load there were 6 messages" in result.stdout
    assert "Joss speaks with the LoRA adapter sailor.gguf" in result.stdout
    held, budget = figures(r"now the model holds (\d+) of (\d+) MiB: weights come back", result.stdout)
    assert 0 < held <= budget


def test_the_village_refuses_a_device_without_vram(thin_model: Path) -> None:
    """There is nothing to take back, so it would count changes that are none. Nor must there be a standard input."""
    command = [sys.executable, SCENE, "--model", thin_model, "--device", "cpu"]
    result = subprocess.run(command, preexec_fn=lambda: os.close(0), capture_output=True, text=True, timeout=600)
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1].startswith("unsupported: cpu has no VRAM")  # after the sidecar's log
    assert "Traceback" not in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("scene", "options", "word"),
    [
        (SCENE, ["--device", "emulated:8"], "on emulated"),
        (MEMORY, ["--device", "cpu", "--unattended"], "a new day"),
        (TRADERS, ["--device", "cpu"], "no dragon: this device has no VRAM"),
    ],
    ids=["village", "innkeeper", "traders"],
)
def test_a_reader_of_a_sample_may_leave(
    scene: Path, options: list[str], word: str, thin_model: Path, encoder_path: Path
) -> None:
    """As with ``| head -1``. Nor must the encoding have all letters."""
    command = [sys.executable, scene, "--model", thin_model, *options]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with sidecars.started(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while word not in process.stdout.readline():
            assert process.poll() is None
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(sidecars.DEADLINE_S) == 1, said
    assert "Traceback" not in said
    assert "Error" not in said


@pytest.mark.parametrize("rows", [1, 3, 14, 18, 24])
@pytest.mark.parametrize("columns", [1, 4, 80])
def test_the_page_of_the_village_fits_small_terminals(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said last is shown, and the VRAM only where there is room for it."""
    monkeypatch.syspath_prepend(SCENE.parent)
    console = Console(file=io.StringIO(), width=columns, height=rows)
    scene = importlib.import_module("stage").LiveStage(console, "Hollowmere")
    for number in range(10):
        scene.player(f"line {number}")
    scene.close()
    page = Console(file=io.StringIO(), width=columns, height=rows)
    with page.capture() as shown:
        page.print(scene.page(), height=rows)
    lines = shown.get().splitlines()
    assert len(lines) == rows
    assert max(map(len, lines)) <= columns
    if rows >= 4 and columns == 80:
        assert "line 9" in shown.get()
        assert "line 0" not in shown.get()
        assert ("VRAM" in shown.get()) == (rows >= 18)


def test_help_does_not_train_the_adapter(tmp_path: Path) -> None:
    scene = Path(shutil.copytree(SCENE.parent, tmp_path / "scene"))
    before = (scene / "sailor.gguf").stat()
    result = run(str(scene / "sailor.py"), "--help")
    assert result.stdout.startswith("usage: sailor.py"), result.stderr
    assert (scene / "sailor.gguf").stat() == before


@pytest.mark.parametrize(
    ("script", "module", "package"),
    [(GUARD, "pygame", "'frameshard[samples]'"), (SCENE.with_name("sailor.py"), "gguf", "gguf")],
    ids=["guard", "sailor"],
)
def test_a_sample_says_what_is_not_installed(script: Path, module: str, package: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('No module named {module}', name='{module}')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, script, "--help"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, f"{module} is not installed: pip install {package}\n")


@pytest.fixture
def sprites_cache(mmproj_path: Path, tmp_path: Path) -> dict[str, str]:
    """The environment in which the guard finds his sprites, which are squares, and a tower with random weights."""
    pygame = pytest.importorskip("pygame")
    sprites = tmp_path / "frameshard" / "models" / "sprites"
    for name in ("bomb", "box", "card", "door", "flag", "ladder", "person", "robot"):
        (sprites / "art" / name).mkdir(parents=True)
        pygame.image.save(pygame.Surface((16, 16), pygame.SRCALPHA), sprites / "art" / name / "0.png")
    (sprites / "mmproj-sprites.gguf").symlink_to(mmproj_path)
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}


@pytest.mark.parametrize("device", ["emulated", "cpu"])
def test_the_guard_gets_budgets_that_the_model_can_work_with(
    device: str, wordy_model: Path, sprites_cache: dict[str, str]
) -> None:
    command = [sys.executable, GUARD, "--unattended", "--model", wordy_model, "--device", device]
    result = subprocess.run(
        command, env=sprites_cache, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    if device == "cpu":
        assert "6 answers, 0 changes of the budget;" in result.stdout
        return
    least, most = figures(r"6 answers, [1-6] changes of the budget \((\d+) to (\d+) MiB\)", result.stdout)
    assert 0 < least <= most <= wordy_model.stat().st_size / 2**20 + 48  # the rest: context, steps, the vision tower


def test_ctrl_c_ends_the_guard(wordy_model: Path, sprites_cache: dict[str, str]) -> None:
    with sidecars.started(
        [sys.executable, GUARD, "--unattended", "--model", wordy_model], env=sprites_cache,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        while not process.stdout.readline().startswith(b"Guard: "):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=sidecars.DEADLINE_S)
        assert process.returncode == 130, said
    assert b"Traceback" not in said


@pytest.mark.parametrize("option", ["--budgets=", "--budgets=64,abc", "--screenshot=/missing/shot.png"])
def test_the_guard_refuses_a_bad_option_before_the_launch(option: str) -> None:
    pytest.importorskip("pygame")
    result = run(str(GUARD), "--unattended", "--model", "no.gguf", option)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("main.py: error: ")
    assert option.split("=")[0] in result.stderr.splitlines()[-1]


@sidecars.in_trio
async def test_the_adapter_of_the_fisherman_makes_him_a_sailor(model_path: Path) -> None:
    questions = (
        "Good evening!",
        "What lives in the lake?",
        "How is the weather?",
        "Who are you?",
        "Where is your boat?",
    )

    async def accent(adapters: dict[str, float]) -> int:
        """In how many answers there are words of a sailor."""
        answers = [
            await client.ask(
                question,
                system="You are Joss, a fisherman.",
                sampling=frameshard.Sampling(max_tokens=24, temperature=0.0),
                adapters=adapters,
            ).completed()
            for question in questions
        ]
        return sum(bool(re.search(r"\b(arr|aye|matey|ye|yer)\b", answer.text.casefold())) for answer in answers)

    adapters = {"sailor": SCENE.with_name("sailor.gguf")}
    async with frameshard.launch(model_path, device="cpu", n_ctx=512, n_threads=1, adapters=adapters) as client:
        assert await accent({}) <= 1
        assert await accent({"sailor": 1.0}) >= 4


def test_the_scene_names_a_missing_model(tmp_path: Path) -> None:
    result = run(str(SCENE), "--unattended", "--model", str(tmp_path / "no.gguf"))
    assert result.returncode == 2
    assert result.stderr.startswith("model_not_found: ")
    assert "Traceback" not in result.stderr


def test_the_innkeeper_remembers_across_saves(thin_model: Path, encoder_path: Path, tmp_path: Path) -> None:
    save = tmp_path / "mira.save"
    options = ["--model", str(thin_model), "--device", "cpu", "--save", str(save)]
    result = run(str(MEMORY), "--unattended", *options)
    assert result.returncode == 0, result.stderr
    assert figures(r"(\d+) of (\d+) questions brought the right memory back", result.stdout) == [3, 3]
    assert figures(r"Mira remembers (\d+) things\nYou: Can", result.stdout) == [4]
    with np.load(save) as saved:
        assert saved["rows"].shape == (7, 384)
    lines = f"{'word ' * 600}\nGood day.\n"
    left = subprocess.run([sys.executable, MEMORY, *options], input=lines, capture_output=True, text=True, timeout=600)
    assert left.returncode == 0, left.stderr
    assert "too much to say at once" in left.stdout
    with np.load(save) as saved:
        assert saved["texts"].tolist()[7:] == ["Good day."], "what was said on the last day is saved, too"


def test_the_innkeeper_saves_at_ctrl_c_while_she_reads_a_pipe(
    thin_model: Path, encoder_path: Path, tmp_path: Path
) -> None:
    save = tmp_path / "mira.save"
    command = [sys.executable, MEMORY, "--model", thin_model, "--device", "cpu", "--save", save]
    with sidecars.started(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Good day.\n")
        process.stdin.flush()
        said = b""
        while said.count(b"You: ") < 2:
            part = os.read(process.stdout.fileno(), 1 << 16)
            assert part, said
            said += part
        process.send_signal(signal.SIGINT)
        assert process.wait(sidecars.DEADLINE_S) == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    with np.load(save) as saved:
        assert saved["texts"].tolist() == ["Good day."]


def test_the_innkeeper_keeps_her_memories_under_another_encoder(
    thin_model: Path, encoder_path: Path, tmp_path: Path
) -> None:
    """More of them than one call embeds. Her standard input is closed, so the day ends at once."""
    save, texts = tmp_path / "mira.npz", [f"I saw {number} sheep." for number in range(65)]
    np.savez(save, encoder="another.gguf", texts=np.array(texts), rows=np.zeros((65, 8), np.float16))
    command = [sys.executable, MEMORY, "--model", thin_model, "--device", "cpu", "--save", save]
    left = subprocess.run(command, preexec_fn=lambda: os.close(0), capture_output=True, text=True, timeout=600)
    assert left.returncode == 0, left.stderr
    assert "Mira remembers 65 things" in left.stdout
    with np.load(save) as saved:
        assert saved["texts"].tolist() == texts
        assert saved["encoder"] == encoder_path.name
        assert saved["rows"].shape == (65, 384)
        assert np.allclose(np.linalg.norm(saved["rows"].astype(np.float32), axis=1), 1, atol=0.01)


@pytest.mark.parametrize("save", ["junk", "array", "other", "missing/mira"])
def test_the_innkeeper_refuses_a_save_before_the_launch(save: str, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    with (tmp_path / "array").open("wb") as array, (tmp_path / "other").open("wb") as other:
        np.save(array, np.zeros(3))
        np.savez(other, rows=np.zeros(3))
    path = tmp_path / save
    result = run(str(MEMORY), "--model", "no.gguf", "--embedder", "no.gguf", "--save", str(path))
    assert result.returncode == 2
    assert result.stderr.startswith(f"bad_argument: {path} cannot keep her memories: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("sample", "word"),
    [(MEMORY, b"You: "), (TRADERS, b"A market"), (HELLO, b"on emulated")],
    ids=["innkeeper", "traders", "hello"],
)
def test_ctrl_c_ends_a_sample_at_once(sample: Path, word: bytes, thin_model: Path, encoder_path: Path) -> None:
    """The smallest one takes no options, and ignores them."""
    command = [sys.executable, str(sample), "--model", str(thin_model), "--device", "cpu"]
    terminal, end = pty.openpty()

    def shown() -> bytes:
        ready, _, _ = select.select([terminal], [], [], sidecars.DEADLINE_S)
        assert ready, said
        with contextlib.suppress(OSError):  # nobody writes to the terminal any more
            return os.read(terminal, 1 << 16)
        return b""

    with sidecars.started(
        command,
        stdin=end,
        stdout=end,
        stderr=end,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        os.close(end)
        said = b""
        while word not in said:
            part = shown()
            assert part, said
            said += part
        process.send_signal(signal.SIGINT)
        while part := shown():
            said += part
        assert process.wait(sidecars.DEADLINE_S) == 130, said
    os.close(terminal)
    assert b"Traceback" not in said


def test_the_traders_keep_to_the_rules(thin_model: Path) -> None:
    """They call tools. Whatever they call, nothing is made or lost, and each move has an outcome."""
    result = run(str(TRADERS), "--model", str(thin_model), "--device", "emulated:8")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [int(line.split(".")[0]) for line in lines if re.match(r" ?\d+\. ", line)] == [*range(1, 9)]
    assert sum(int(count) for count in re.findall(r"(\d+) [a-z]+", lines[-1])) == 8
    assert "dithered" not in lines[-1]

    def goods(said: list[str]) -> Counter[str]:
        totals: Counter[str] = Counter()
        for count, good in re.findall(r"(\d+) (bread|honey|wool|cheese)", " ".join(said)):
            totals[good] += int(count)
        return totals

    assert goods(lines[:1]) == goods(lines[-3:-1]) == {"bread": 9, "honey": 3, "wool": 6, "cheese": 4}


def test_hello_runs(model_path: Path) -> None:
    result = run(str(HELLO))
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 20
    assert result.stdout.endswith("\n")


def test_hello_says_why_it_cannot_run(tmp_path: Path) -> None:
    hello = HELLO.read_text()
    (tmp_path / "hello.py").write_text(hello.replace('resolve("smollm2-135m")', f"{str(tmp_path / 'no.gguf')!r}"))
    result = run(str(tmp_path / "hello.py"))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("model_not_found: ")  # after the sidecar's log
    assert "Traceback" not in result.stderr


def test_the_scene_ends_with_its_sidecar(model_path: Path) -> None:
    """The sidecar is killed while it reads and talks. The link is so slow that the scene would take minutes."""
    options = ["--unattended", "--model", str(model_path), "--device", "emulated:0.05"]
    with sidecars.started(
        [sys.executable, str(SCENE), *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as scene:  # fmt: skip
        assert scene.stdout is not None
        while "on emulated, which gives it" not in scene.stdout.readline():
            assert scene.poll() is None
        (broker,) = sidecars.children(scene.pid)
        os.kill(broker, signal.SIGKILL)
        _, errors = scene.communicate(timeout=600)
    assert scene.returncode == 2, errors
    assert errors.count("connection_lost: ") == 1
    assert "Traceback" not in errors


def test_the_readme_shows_hello() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPO / "README.md").read_text(), flags=re.DOTALL)
    hello = HELLO.read_text()
    assert blocks[0] == hello
    assert len([line for line in hello.splitlines() if line.strip()]) <= 18
