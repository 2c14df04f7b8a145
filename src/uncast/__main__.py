"""`python -m uncast`."""

import sys

from uncast.cli.main import main

sys.exit(main())
