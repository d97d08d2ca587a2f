"""``python -m frameshard`` is the ``frameshard`` command. Both begin here, with few imports: only what comes after them
can end quietly when Ctrl-C is pressed."""

import sys


def main() -> int:
    """Runs one command and returns its exit status."""
    try:
        from frameshard.cli import main as run

        return run()
    except KeyboardInterrupt:  # while modules were imported
        return 130


if __name__ == "__main__":
    sys.exit(main())
