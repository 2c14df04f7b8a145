"""`python -m uncast`."""

import sys

from uncast.entry import run

sys.exit(run())
