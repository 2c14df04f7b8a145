"""Models that ship in the package, and names to folders."""

from __future__ import annotations

from pathlib import Path

from uncast.checkpoints.files import CheckpointError

BUNDLED = {"tiny-glm": Path(__file__).parent / "tiny_glm"}


def model_folder(name: str) -> Path:
    """The folder of a bundled model's name, else `name` as a path (existing or not).

    Raises:
        CheckpointError: an empty name, or one that no path can have.
    """
    if not name or "\0" in name:
        raise CheckpointError(f"the model is {name!r}: a folder or one of {', '.join(BUNDLED)} is needed")
    return BUNDLED.get(name, Path(name))
