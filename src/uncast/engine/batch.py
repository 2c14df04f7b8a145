"""A forward step's rows as lists, before they become tensors."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Batch:
    """One forward's rows as lists; a request here is what attention takes as one.

    Attributes:
        tables, kv_lens, ends: per request its pages, its cached rows and the end of its query rows.
        wanted: rows whose logits are wanted.
        alone_rows: of the attention, see `uncast.attention.Problem`.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    wanted: list[int] = field(default_factory=list)
    alone_rows: int = 0

    def add(self, token: int, position: int, slot: int) -> None:
        self.ids.append(token)
        self.positions.append(position)
        self.slots.append(slot)

    def close(self, pages: list[int], kv_len: int) -> None:
        """Ends a request: the rows added since the last one are its queries."""
        self.tables.append(pages)
        self.kv_lens.append(kv_len)
        self.ends.append(len(self.ids))

    @property
    def max_q_len(self) -> int:
        return max(end - start for start, end in zip(self.ends[:-1], self.ends[1:], strict=True))
