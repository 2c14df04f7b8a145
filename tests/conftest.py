"""For every test: results of probes on this machine neither help nor are changed."""

from __future__ import annotations

import os
import tempfile

_folder = tempfile.TemporaryDirectory(prefix="uncast-tests-")
os.environ["UNCAST_CACHE_DIR"] = _folder.name
