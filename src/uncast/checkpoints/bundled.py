"""Models that ship in the package, and names to folders."""

from __future__ import annotations

from pathlib import Path

BUNDLED = {"tiny-glm": Path(__file__).parent / "tiny_glm"}


def model_folder(name: str) -> Path:
    """The folder of a bundled model's name, else `name` as a path (existing or not)."""
    return BUNDLED.get(name, Path(name))
