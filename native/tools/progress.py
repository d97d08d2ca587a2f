"""Runs a build command with its output in a log file, and says every ten seconds how far it is.

Usage: progress.py LABEL LOG COMMAND...   Exit status: the command's. On failure the end of the log is printed.
"""

import pathlib
import re
import subprocess
import sys
import threading
import time

STEP = re.compile(rb"\[(\d+)/(\d+)\]")  # as ninja counts
INTERVAL_S = 10.0
TAIL_LINES = 40


def run(label: str, log: pathlib.Path, command: list[str], env: dict[str, str] | None = None) -> int:
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    state = ""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(INTERVAL_S):
            minutes, seconds = divmod(int(time.monotonic() - start), 60)
            print(f"  {label}: {state or 'preparing'}, {minutes}:{seconds:02} elapsed", file=sys.stderr, flush=True)

    print(f"{label} (log: {log})", file=sys.stderr, flush=True)
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            if found := STEP.search(line):
                done, total = int(found[1]), int(found[2])
                state = f"{done} of {total} ({100 * done // total} %)"
    status = process.wait()
    ended.set()
    reporter.join()
    if status:
        tail = log.read_bytes().decode(errors="replace").splitlines()[-TAIL_LINES:]
        print("\n".join([*tail, f"{label}: failed with status {status}; the whole log: {log}"]), file=sys.stderr)
    else:
        print(f"  {label}: done in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]))
