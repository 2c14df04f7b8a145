"""`--speculate` of `generate` and `serve`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from uncast.checkpoints.load import mtp_refusal
from uncast.engine.speculation import MAX_DRAFTS, SpeculationError, parse_speculate

HELP = (
    f"tokens that the model's MTP layer drafts per step, up to {MAX_DRAFTS}; auto measures what helps and stops where nothing "
    "does; texts stay the same up to rounding (default: off)"
)


@dataclass(frozen=True)
class Speculate:
    """The option for this model and machine.

    Attributes:
        count: drafts a step; None measures.
        reason: why `auto` came to nothing, else None.
    """

    count: int | None
    reason: str | None = None

    @property
    def drafts(self) -> bool:
        """Whether the MTP layer is to be loaded."""
        return self.count != 0


def speculate_of(text: str, folder: Path) -> Speculate:
    """What `auto`, `off` or a number means here. `auto` on a model or machine that cannot draft is off.

    Raises:
        SpeculationError: another text, or drafts where they cannot be.
        CheckpointError: a checkpoint that cannot be read.
    """
    count = parse_speculate(text)
    if count == 0:
        return Speculate(0)
    refusal = mtp_refusal(folder)
    if refusal is None and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        refusal = "several processes share the model, and speculation needs one process: speculation is off"
    if refusal is None:
        return Speculate(count)
    if count is None:
        return Speculate(0, refusal)
    raise SpeculationError(f"--speculate {text}: {refusal.removesuffix(': speculation is off')}; use --speculate off")
