"""Attention over a BF16 cache in which chosen layers store their rows in another layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from uncast.attention import AttentionPlan, MLAPagedAttention
from uncast.engine.runner import ModelRunner
from uncast.latent.codec import Scale
from uncast.models.decoder import MLADecoder


@dataclass(frozen=True)
class LayerScales:
    """Scales of `fp8_e4m3` for one layer."""

    ckv: float = 1.0
    kpe: float = 1.0


@dataclass(frozen=True)
class Contender:
    """A layout with its scales.

    Attributes:
        name: "fp8_e4m3" or, with scales from these prompts, "fp8_e4m3 calibrated".
        scales: one per layer for `fp8_e4m3`, else None.
        source: "none", "1", "checkpoint" or "calibrated".
    """

    name: str
    kv_layout: str
    scales: tuple[LayerScales, ...] | None
    source: str


class MixedAttention(MLAPagedAttention):
    """The BF16 cache with chosen layers in another layout; sees what every layer writes and attends to.

    A layer's rows in another layout live in a scratch cache that the next layer overwrites, which is sound because a step is a
    whole prompt.
    """

    def __init__(self, model: MLADecoder, own: MLAPagedAttention, others: dict[str, ModelRunner]) -> None:
        super().__init__(own.requested)
        self.model, self._others = model, {name: runner.attention for name, runner in others.items()}
        self._scratch = {name: runner.pool.layer(0) for name, runner in others.items()}
        self.assigned: list[Contender | None] = [None] * len(model.layers)
        self.beside: list[Contender] = []
        self.on_rows: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None
        self.on_values: Callable[[int, Contender | None, torch.Tensor], None] | None = None
        self.counters: dict[str, torch.Tensor] = {}
        self._layer = -1

    @property
    def last_plan(self) -> AttentionPlan | None:
        """None, so that every layer goes absorbed, through `write` and `run`."""
        return None

    @property
    def fuses_rope(self) -> bool:
        """False, so that every row comes by `write`, rotated."""
        return False

    def plan(self, *args: Any, **options: Any) -> AttentionPlan:
        self._layer = -1
        for name, attention in self._others.items():
            attention.plan(*args, **{**options, "kv_layout": name, "num_pages": self._scratch[name].shape[0]})
        return super().plan(*args, **options)

    def write(
        self,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        ckv_scale: Scale = None,
        kpe_scale: Scale = None,
        counters: torch.Tensor | None = None,
    ) -> None:
        self._layer += 1
        if self.on_rows is not None:
            self.on_rows(self._layer, ckv, kpe)
        super().write(ckv, kpe, cache, slot_mapping, counters=counters)
        self._rows = ckv, kpe, slot_mapping

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, cache: torch.Tensor, **options: Any) -> Any:
        options.update(ckv_scale=None, kpe_scale=None)
        chosen = self.assigned[self._layer]
        if chosen is not None:
            out = self._in_layout(chosen, q_nope, q_pe, options)
        else:
            out = super().run(q_nope, q_pe, cache, **options)
        if self.on_values is not None:
            self.on_values(self._layer, chosen, self._values(out))
            for contender in self.beside:
                apart = {**options, "out": None}  # the caller's is what the model goes on with
                other = self._in_layout(contender, q_nope, q_pe, apart, self.counters.get(contender.name))
                self.on_values(self._layer, contender, self._values(other))
        return out

    def _in_layout(
        self,
        contender: Contender,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        options: dict[str, Any],
        counters: torch.Tensor | None = None,
    ) -> Any:
        attention, cache = self._others[contender.kv_layout], self._scratch[contender.kv_layout]
        scales: dict[str, Scale] = {}
        if contender.scales is not None:
            own = contender.scales[self._layer]
            scales = {"ckv_scale": own.ckv, "kpe_scale": own.kpe}
        ckv, kpe, slots = self._rows
        of_layer = None if counters is None else counters[self._layer]
        attention.write(ckv, kpe, cache, slots, counters=of_layer, **scales)
        return attention.run(q_nope, q_pe, cache, **{**options, **scales})

    def _values(self, latent: torch.Tensor) -> torch.Tensor:
        w_uv = self.model.layers[self._layer].attention.w_uv
        return torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
