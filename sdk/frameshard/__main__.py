"""``python -m frameshard`` is the ``frameshard`` command."""

import sys

from frameshard.cli import main

sys.exit(main())
