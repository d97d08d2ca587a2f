"""The command line. Every test runs a real process."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import trio
from hypothesis import assume, given
from hypothesis import strategies as st

import frameshard as frameshard_client
import sidecars
from frameshard import Sampling
from frameshard.cli import COMMANDS
from frameshard.cli.common import UNITS, parse_budgets, parse_size
from frameshard.errors import BadArgument
from servers import until


def frameshard(*args: str, stdin: str = "", timeout: float = sidecars.DEADLINE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "frameshard", *args], input=stdin, capture_output=True, text=True, timeout=timeout
    )


def error_of(result: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """The error that a command with --json has printed. Nothing else may be on stdout."""
    assert result.returncode == 2, result.stderr
    document = json.loads(result.stdout)
    assert list(document) == ["error"]
    assert set(document["error"]) == {"code", "name", "message", "retriable", "detail"}
    assert str(document["error"]["message"]) in result.stderr
    return dict(document["error"])


def test_help_names_every_command_and_a_place_to_start() -> None:
    result = frameshard("--help")
    assert result.returncode == 0
    for command in COMMANDS:
        assert f"\n    {command}" in result.stdout
    assert "frameshard chat --model smollm2-135m" in result.stdout


def test_no_arguments_prints_the_help() -> None:
    assert frameshard().stdout == frameshard("--help").stdout


def test_help_loads_no_heavy_module() -> None:
    code = "import sys; from frameshard.cli import main; main([]); print('modules', *sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = result.stdout.rpartition("\nmodules ")[2].split()
    assert "frameshard.cli" in modules
    assert not {"numpy", "llama_cpp", "zmq", "trio"} & set(modules)


def test_the_installed_command_is_the_module() -> None:
    script = Path(sys.executable).with_name("frameshard")
    if not script.exists():
        pytest.skip("run from the source tree: frameshard is not installed")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=sidecars.DEADLINE_S)
    assert result.stdout == frameshard("--version").stdout
    assert "llama-cpp-python 0.3.36" in result.stdout.splitlines()


@pytest.mark.parametrize("args", [("frobnicate",), ("plan",), ("plan", "--model"), ("models", "--no-such-option")])
def test_usage_errors_are_typed(args: tuple[str, ...]) -> None:
    assert error_of(frameshard(*args, "--json"))["name"] == "bad_argument"


@pytest.mark.parametrize("budget", ["", "lots", "-64", "64,,96", "64 parsecs", "1e3", "nan", "٦٤"])
def test_bad_budgets_are_typed(budget: str) -> None:
    error = error_of(frameshard("plan", "--model", "any.gguf", f"--vram-budget={budget}", "--json"))
    assert error["name"] == "bad_argument"


@pytest.mark.parametrize("command", [("plan", "--vram-budget", "64"), ("bench", "--vram-budget", "64"), ("chat",)])
def test_a_missing_model_file_is_typed(command: tuple[str, ...], tmp_path: Path) -> None:
    missing = tmp_path / "no.gguf"
    error = error_of(frameshard(command[0], "--model", str(missing), "--device", "cpu", *command[1:], "--json"))
    assert error["name"] == "model_not_found"
    assert str(missing) in str(error["message"])


def test_a_file_that_is_no_model_is_typed(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("once upon a time" * 100)
    assert error_of(frameshard("plan", "--model", str(path), "--vram-budget", "64", "--json"))["name"] == "bad_model"


@pytest.fixture
def wrong_inputs(tmp_path: Path) -> Path:
    """A folder with files that commands must refuse."""
    writer = gguf.GGUFWriter(tmp_path / "split.gguf", "llama")
    writer.add_string("split.count", "two")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "folder").mkdir()
    (tmp_path / "utf16.json").write_text("{}", "utf-16")
    profile = json.loads((Path(__file__).parents[1] / "profiles" / "laptop-rtx-4060-8gb.json").read_text())
    (tmp_path / "disk.json").write_text(json.dumps(profile | {"disk": {"read_bytes": [1], "rate": ["fast"]}}))
    return tmp_path


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("plan", "--model", "split.gguf", "--vram-budget", "64"), "split.gguf: split.count is 'two'"),
        (("plan", "--profile", "utf16.json", "--vram-budget", "64"), "utf16.json is not a profile"),
        (("plan", "--profile", "disk.json", "--vram-budget", "64"), "disk.json: not a profile"),
        (("profile", "--device", "emulated", "--seconds", "0.2", "--output", "folder"), "cannot write folder"),
        (("models", "path", "~nosuch/m.gguf"), "no model file ~nosuch/m.gguf"),
        (
            ("bench", "--vram-budget", "64", "--image", "8x8", "--mmproj", "any", "--vs", "/missing"),
            "cannot run /missing",
        ),
    ],
)
def test_wrong_input_is_one_line_on_stderr(
    args: tuple[str, ...], says: str, wrong_inputs: Path, tiny_model: Callable[[str], Path]
) -> None:
    command = [sys.executable, "-m", "frameshard", *args]
    command += [] if "--model" in args or args[0] == "models" else ["--model", str(tiny_model("llama"))]
    before = sorted(wrong_inputs.iterdir())
    result = subprocess.run(command, cwd=wrong_inputs, capture_output=True, text=True, timeout=sidecars.DEADLINE_S)
    assert result.returncode == 2
    assert f"frameshard: {says}" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(wrong_inputs.iterdir()) == before


def test_the_size_of_a_packed_model(tmp_path: Path) -> None:
    pak = tmp_path / "game.pak"
    pak.write_bytes(bytes(4096))
    found = json.loads(frameshard("models", "path", f"{pak}@1024+2048", "--json").stdout)
    assert found["path"] == f"{pak}@1024+2048"
    assert found["bytes"] == 2048


def test_an_error_without_json_is_one_line_on_stderr(tmp_path: Path) -> None:
    result = frameshard("plan", "--model", str(tmp_path / "no.gguf"), "--vram-budget", "64")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("frameshard: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "option",
    [
        "--temperature=9",
        "--temperature=hot",
        "--seed=-1",
        "--max-tokens=0",
        "--max-tokens=9999999",
        "--ctx=99999999",
        "--parallel=65",
        "--ubatch=99999",
        "--vram-budget=999999999999GiB",
    ],
)
def test_a_value_that_no_launch_takes_is_named_by_its_option(option: str) -> None:
    """Before anything is loaded: there is no such model."""
    name, _, value = option.partition("=")
    command = "chat" if name in ("--temperature", "--seed", "--max-tokens") else "serve"
    message = str(error_of(frameshard(command, "--model", "/gone", option, "--json"))["message"])
    assert message.startswith(f"argument {name}: {value!r} ")


def test_a_plan_for_more_than_any_budget_is_refused() -> None:
    error = error_of(frameshard("plan", "--model", "/gone", "--vram-budget", "64,999999999999GiB", "--json"))
    assert "'999999999999GiB' is too large" in str(error["message"])


def test_options_are_not_abbreviated() -> None:
    """With ``--js`` for ``--json`` an error would not be a document."""
    result = frameshard("models", "path", "/missing", "--js")
    assert result.returncode == 2
    assert "unrecognized arguments: --js" in result.stderr


@pytest.mark.parametrize(
    "args", [("--help",), ("--version",), ("models", "list", "--json"), ("models", "path", "/gone", "--json")]
)
def test_a_full_disk_behind_stdout_is_an_error(args: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "frameshard", *args]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=sidecars.DEADLINE_S)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "frameshard: cannot write the output: No space left on device"
    assert "Traceback" not in result.stderr


def test_a_full_disk_behind_a_conversation_is_an_error(wordy_model: Path) -> None:
    command = [sys.executable, "-m", "frameshard", "chat", "--model", str(wordy_model), "--device", "cpu"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command, input="Who are you?\n", stdout=full, stderr=subprocess.PIPE, text=True, timeout=sidecars.DEADLINE_S
        )
    assert result.returncode == 2
    assert "frameshard: cannot write the output: No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("args", ["models list --json", "--version", "models path /gone"])
def test_standard_streams_may_be_closed(closed: str, args: str) -> None:
    command = ["sh", "-c", f"exec '{sys.executable}' -m frameshard {args} {closed}"]
    result = subprocess.run(command, input="", capture_output=True, text=True, timeout=sidecars.DEADLINE_S)
    assert result.returncode == (2 if "gone" in args else 0)
    assert result.stderr.startswith("frameshard: no model" if "gone" in args and " 2>" not in f" {closed}" else "")
    assert "Traceback" not in result.stderr + result.stdout
    if args == "models list --json" and ">" not in closed.replace("2>", ""):
        assert json.loads(result.stdout)["known"]


def test_a_chat_with_closed_streams_ends(wordy_model: Path) -> None:
    line = f"exec '{sys.executable}' -m frameshard chat --model '{wordy_model}' --device cpu <&- >&-"
    result = subprocess.run(["sh", "-c", line], input="", capture_output=True, text=True, timeout=sidecars.DEADLINE_S)
    assert result.returncode == 0, result.stderr
    assert "on cpu" in result.stderr


def test_a_reader_that_leaves_is_no_error_message() -> None:
    """The reader of stdout ends at once, as in ``frameshard --help | head -0``."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as out:
        result = subprocess.run(
            [sys.executable, "-m", "frameshard", "--help"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=sidecars.DEADLINE_S,
        )
    assert result.stderr == ""


def test_a_reader_that_leaves_a_conversation_is_no_error_message(wordy_model: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "frameshard", "chat", "--model", str(wordy_model), "--device", "cpu"]
    with open(write, "w") as out:
        result = subprocess.run(
            command, input="Who are you?\n", stdout=out, stderr=subprocess.PIPE, text=True, timeout=sidecars.DEADLINE_S
        )
    assert result.returncode == 1
    assert "Error" not in result.stderr


@pytest.mark.parametrize(
    ("name", "encoding", "printed"),
    [("日.gguf".encode(), "cp1252", b"?.gguf"), (b"\xff.gguf", "utf-8", b"\xff.gguf")],
)
def test_output_that_the_encoding_cannot_hold(name: bytes, encoding: str, printed: bytes, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(name)).touch()
    command = [sys.executable, "-m", "frameshard", "models", "path", os.fsdecode(name)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=sidecars.DEADLINE_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout == printed + b"\n"


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("64", 64 << 20),
        ("0", 0),
        ("1.5GiB", 3 << 29),
        ("1.5 gib", 3 << 29),
        ("800MB", 800_000_000),
        ("512 KiB", 512 << 10),
        ("7B", 7),
        ("1.1GB", 1_100_000_000),
        ("0.000001B", 1),
        (" 2 ", 2 << 20),
    ],
)
def test_parse_size(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@given(st.integers(0, 10**9), st.sampled_from(sorted(UNITS)))
def test_parse_size_is_exact_for_whole_numbers(number: int, unit: str) -> None:
    assume(number * UNITS[unit] < 1 << 53)
    assert parse_size(f"{number}{unit}") == number * UNITS[unit]


@given(st.text(max_size=12))
def test_parse_size_gives_bytes_or_a_typed_error(text: str) -> None:
    try:
        n_bytes = parse_size(text)
    except BadArgument:
        return
    assert n_bytes >= 0
    assert text.strip()[0] in "0123456789"


def test_parse_budgets_keeps_the_order() -> None:
    assert parse_budgets("96,64,1GiB") == [96 << 20, 64 << 20, 1 << 30]


def test_chat_answers_what_comes_through_a_pipe(wordy_model: Path) -> None:
    chat = ("chat", "--model", str(wordy_model), "--device", "emulated", "--seed", "1", "--max-tokens", "24")
    script = "Who are you?\n/budget\n/budget 1\n/stats\n/what\nAnd what do you like?\n/quit\nMore?\n"
    said = frameshard(*chat, stdin=script)
    assert said.returncode == 0, said.stderr
    assert len(said.stdout.splitlines()) >= 2
    for words in ("the floor is", "below the floor", "resident", "no command /what"):
        assert words in said.stderr
    document = json.loads(frameshard(*chat, "--json", stdin="Who are you?\nAnd what do you like?").stdout)
    assert [answer["question"] for answer in document["answers"]] == ["Who are you?", "And what do you like?"]
    assert said.stdout == "".join(f"{answer['answer']}\n" for answer in document["answers"])


def test_chat_leaves_at_quit_only(wordy_model: Path) -> None:
    result = frameshard("chat", "--model", str(wordy_model), "--device", "cpu", stdin="/quitter\n/quit\n/help\n")
    assert result.returncode == 0
    assert "no command /quitter" in result.stderr
    assert "/forget" not in result.stderr


def test_chat_ctrl_c_ends_the_answer_then_the_program(model_path: Path) -> None:
    command = [sys.executable, "-m", "frameshard", "chat", "--model", str(model_path), "--device", "emulated:0.5"]
    command += ["--vram-budget", "120"]
    with sidecars.started(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        assert chat.stderr is not None
        while "/help" not in (line := chat.stderr.readline()):
            assert line, "the chat ended"
        chat.stdin.write("Tell me a very long story.\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        assert "cancelled" in (chat.stderr.readline() + chat.stderr.readline())
        chat.send_signal(signal.SIGINT)
        assert chat.wait(sidecars.DEADLINE_S) == 130


def test_serve_serves_until_it_is_told_to_stop(shallow_model: Path, tmp_path: Path) -> None:
    connect_file = tmp_path / "connect.json"
    command = [sys.executable, "-m", "frameshard", "serve", "--model", str(shallow_model), "--device", "emulated"]
    command += ["--connect-file", str(connect_file), "--ctx", "512", "--json"]

    async def ask() -> str:
        async with frameshard_client.connect(connect_file) as client:
            return (await client.complete("Once upon a time", sampling=Sampling(max_tokens=8)).completed()).text

    with sidecars.started(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        while not (line := server.stdout.readline()).startswith("}"):
            assert line, "the server ended"
        assert connect_file.stat().st_mode & 0o777 == 0o600
        assert trio.run(ask)
        server.terminate()
        assert server.wait(sidecars.DEADLINE_S) == 0
    assert not connect_file.exists()


class Terminal:
    """``frameshard chat`` in a pseudo-terminal."""

    def __init__(self, model: Path, **environment: str) -> None:
        self.ours, theirs = pty.openpty()
        self.settings = termios.tcgetattr(theirs)
        self.theirs = theirs
        command = ["chat", "--model", str(model), "--device", "emulated", "--max-tokens", "48"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frameshard", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", **environment},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.seen, self.read = "", 0

    def read_until(self, words: str) -> None:
        """Reads the output until these words come. Fails if they do not come."""
        while (found := self.seen.find(words, self.read)) < 0:
            assert select.select([self.ours], [], [], sidecars.DEADLINE_S)[0], self.seen
            self.seen += os.read(self.ours, 1 << 16).decode(errors="replace")
        self.read = found + len(words)

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.theirs)
        os.close(self.ours)


def test_chat_edits_lines_and_gives_the_terminal_back(wordy_model: Path) -> None:
    pytest.importorskip("readline")
    left, up = "\x1b[D", "\x1b[A"
    with Terminal(wordy_model) as chat:
        chat.read_until("> ")
        chat.type(f"/hlp{left}{left}e\r")
        chat.read_until("begin the conversation anew")
        chat.read_until("> ")
        chat.type(f"{up}\r")
        chat.read_until("begin the conversation anew")
        chat.read_until("> ")
        (broker,) = sidecars.children(chat.process.pid)
        sidecars.freeze(broker)  # the answer must not end before the next line is typed
        try:
            chat.type("Who are you?\r")
            until(lambda: bool(termios.tcgetattr(chat.theirs)[3] & termios.ICANON))  # plain lines while it comes
            chat.type("/budget 120\r")
        finally:
            sidecars.thaw(broker)
        chat.read_until("budget 120 MiB")
        chat.read_until("tokens/s")
        chat.read_until("> ")
        chat.type("/what")
        chat.process.send_signal(signal.SIGINT)
        assert chat.process.wait(sidecars.DEADLINE_S) == 130
        assert termios.tcgetattr(chat.theirs) == chat.settings
    assert "Traceback" not in chat.seen


def test_chat_without_readline_reads_lines(wordy_model: Path, tmp_path: Path) -> None:
    """Windows and bundles have no readline."""
    (tmp_path / "readline.py").write_text("raise ImportError('none here')")
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with Terminal(wordy_model, PYTHONPATH=search) as chat:
        chat.read_until("> ")
        chat.type("/help\r")
        chat.read_until("begin the conversation anew")
        chat.read_until("> ")
        chat.type("\x04")
        assert chat.process.wait(sidecars.DEADLINE_S) == 0
