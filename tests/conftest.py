"""For every test: results of probes on this machine neither help nor are changed, and the same random numbers in every run."""

from __future__ import annotations

import os
import random
import tempfile

import numpy as np
import pytest
import torch

_folder = tempfile.TemporaryDirectory(prefix="uncast-tests-")
os.environ["UNCAST_CACHE_DIR"] = _folder.name


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test's numbers depend neither on the tests before it nor on the worker, nor on how many cores split a sum."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
