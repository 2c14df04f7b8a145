"""Rotary position embedding of the 64 (qk_rope_head_dim) rope channels: default and yarn frequencies.

Channels stay in the checkpoint's order: interleaved pairs (x0, x1), (x2, x3), ... keep their places, so cache bytes agree
with FlashMLA, vLLM and SGLang (transformers de-interleaves, which leaves q.k unchanged but permutes the cached row).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


class RopeError(ValueError):
    """A rope configuration that is not supported; one sentence."""


@dataclass(frozen=True)
class RopeConfig:
    """Frequencies and scalings.

    Attributes:
        dim: rope channels, even.
        theta: base.
        interleaved: pairs (0, 1), (2, 3), ...; otherwise (0, dim/2), (1, dim/2 + 1), ...
        factor: yarn context extension; 1.0 for the default type.
        mscale, mscale_all_dim, original_max_position, beta_fast, beta_slow: yarn's parameters.
    """

    dim: int
    theta: float
    interleaved: bool
    factor: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], dim: int, *, interleaved: bool) -> RopeConfig:
        """From `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).

        Raises:
            RopeError: a type other than default and yarn, or yarn without its parameters.
        """
        params: dict[str, Any] = dict(raw.get("rope_scaling") or {})
        params.update(raw.get("rope_parameters") or {})
        theta = params.get("rope_theta", raw.get("rope_theta"))
        if theta is None:
            raise RopeError("config.json has neither rope_parameters.rope_theta nor rope_theta")
        kind = params.get("rope_type", params.get("type", "default"))
        if kind == "default":
            return cls(dim, float(theta), interleaved)
        if kind != "yarn":
            raise RopeError(f"rope type {kind!r} is not supported: default and yarn are")
        missing = [name for name in ("factor", "original_max_position_embeddings") if name not in params]
        if missing:
            raise RopeError(f"config.json's yarn rope has no {missing[0]}")
        return cls(
            dim,
            float(theta),
            interleaved,
            factor=float(params["factor"]),
            mscale=float(params.get("mscale") or 0.0),
            mscale_all_dim=float(params.get("mscale_all_dim") or 0.0),
            original_max_position=int(params["original_max_position_embeddings"]),
            beta_fast=float(params.get("beta_fast") or 32.0),
            beta_slow=float(params.get("beta_slow") or 1.0),
        )

    @property
    def softmax_factor(self) -> float:
        """m^2 with m = 0.1 * mscale_all_dim * ln(factor) + 1 (DeepSeek-V2's yarn), 1 without yarn."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    @property
    def cos_factor(self) -> float:
        """Scaling of cos and sin; 1.0 where mscale equals mscale_all_dim, as in every published MLA model."""
        if self.factor == 1.0:
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def inverse_frequencies(self) -> torch.Tensor:
        """float32 [dim / 2]. Yarn (arXiv 2309.00071): low frequencies are divided by `factor`, high ones kept, a linear
        ramp between the channels that turn `beta_fast` and `beta_slow` times over the original context."""
        plain = 1.0 / self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        if self.factor == 1.0:
            return plain
        low = max(math.floor(self._channel_of(self.beta_fast)), 0)
        high = min(math.ceil(self._channel_of(self.beta_slow)), self.dim - 1)
        width = high - low if high != low else 0.001
        ramp = ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)

    def _channel_of(self, turns: float) -> float:
        return self.dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class Rope:
    """Rotates rope channels by position."""

    def __init__(self, config: RopeConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.inverse = config.inverse_frequencies().to(device)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [n, dim / 2], of positions [n]."""
        phase = positions.to(torch.float32)[:, None] * self.inverse
        return phase.cos() * self.config.cos_factor, phase.sin() * self.config.cos_factor

    def rotate(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x [n, dim] or [n, heads, dim] rotated, in its own dtype."""
        cos, sin = angles if x.dim() == 2 else (angles[0][:, None], angles[1][:, None])
        if self.config.interleaved:
            first, second = x[..., 0::2].float(), x[..., 1::2].float()
            pair = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
            return pair.flatten(-2).to(x.dtype)
        half = x.shape[-1] // 2
        first, second = x[..., :half].float(), x[..., half:].float()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
