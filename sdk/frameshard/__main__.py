"""``python -m frameshard`` is the ``frameshard`` command."""

import sys

try:
    from frameshard.cli import main

    status = main()
except KeyboardInterrupt:  # while modules were imported
    status = 130
sys.exit(status)
