"""Training batches: windows over the text stream and over the packed chat samples, held on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Stream:
    """Windows of `length` tokens over one token stream. Each epoch shifts the grid and snaps every window to a text's start."""

    def __init__(self, ids: Tensor, starts: Tensor, length: int, generator: torch.Generator) -> None:
        self.ids, self.length, self.generator = ids, length, generator
        self.starts = starts[starts + length < len(ids)]
        self.order = torch.empty(0, dtype=torch.int64)

    def take(self, n: int) -> Tensor:
        """The next `n` windows, [n, length]."""
        while len(self.order) < n:
            shift = int(torch.randint(self.length, (1,), generator=self.generator))
            grid = torch.arange(shift, int(self.starts[-1]) + 1, self.length)
            snapped = self.starts[torch.searchsorted(self.starts, grid).clamp(max=len(self.starts) - 1)]
            self.order = torch.cat((self.order, snapped[torch.randperm(len(snapped), generator=self.generator)]))
        at, self.order = self.order[:n], self.order[n:]
        device = self.ids.device
        return self.ids[at.to(device)[:, None] + torch.arange(self.length, device=device)].long()


class Batches:
    """Plain windows, each `[gMASK]<sop>` + text, and a few rows of chat samples packed end to end; [batch, seq_len + 2]."""

    def __init__(
        self,
        folder: Path,
        batch: int,
        seq_len: int,
        chat_share: float,
        prefix: list[int],
        seed: int,
        device: torch.device,
    ) -> None:
        def array(name: str) -> Tensor:
            return torch.from_numpy(
                np.load(folder / f"{name}.npy").astype(np.int32 if name in ("train", "chat") else np.int64)
            )

        generator = torch.Generator().manual_seed(seed)
        self.n_chat = max(1, round(batch * chat_share))
        self.n_text = batch - self.n_chat
        self.prefix = torch.tensor(prefix, device=device).expand(self.n_text, -1)
        self.text = Stream(array("train").to(device), array("train_starts"), seq_len + 2 - len(prefix), generator)
        self.chat = Stream(array("chat").to(device), array("chat_starts"), seq_len + 2, generator)

    def next(self) -> Tensor:
        return torch.cat((torch.cat((self.prefix, self.text.take(self.n_text)), dim=1), self.chat.take(self.n_chat)))
