"""Rotary position embedding of the qk_rope_head_dim rope channels: default, yarn and longrope frequencies.

Channels stay in the checkpoint's order: interleaved pairs (x0, x1), (x2, x3), ... keep their places, so cache bytes agree
with FlashMLA, vLLM and SGLang (transformers de-interleaves, which leaves q.k unchanged but permutes the cached row).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from uncast.models.fields import ConfigError, Fields

_MAX_THETA, _MAX_FACTOR, _MAX_TURNS, _MAX_SCALING = 1e15, 1e6, 1e6, 1e3


class RopeError(ConfigError):
    """A rope configuration that is not supported; one sentence."""


@dataclass(frozen=True)
class RopeConfig:
    """Frequencies and scalings.

    Attributes:
        dim: rope channels, even.
        theta: base.
        interleaved: pairs (0, 1), (2, 3), ...; otherwise (0, dim/2), (1, dim/2 + 1), ...
        factor: yarn context extension; 1.0 for the other types.
        mscale, mscale_all_dim, original_max_position, beta_fast, beta_slow: yarn's parameters.
        attention_factor: an explicit scaling of cos and sin; None derives it.
        short_factor: longrope's divisor of each frequency, [dim / 2].
        max_position: longrope's original length, 0 for no limit. Beyond it longrope switches every position to other
            frequencies, rows already cached included, so the context ends there.
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
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    max_position: int = 0

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], dim: int, *, interleaved: bool) -> RopeConfig:
        """From `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before); where both name a field,
        `rope_parameters` has it.

        Raises:
            RopeError: a type other than default, yarn and longrope, or one without its parameters or with senseless ones.
        """
        top = Fields(raw, "config.json", RopeError)
        params = {**top.mapping("rope_scaling"), **top.mapping("rope_parameters")}
        rope = Fields(params, "config.json's rope", RopeError)
        if "rope_theta" not in rope and "rope_theta" not in top:
            raise RopeError("config.json has neither rope_parameters.rope_theta nor rope_theta")
        theta = (rope if "rope_theta" in rope else top).number("rope_theta", low=1.0, high=_MAX_THETA)
        kind = rope.text("rope_type", rope.text("type", "default"))
        rope.where = f"config.json's {kind} rope"
        if kind == "default":
            return cls(dim, theta, interleaved)
        if kind == "longrope":
            return cls(dim, theta, interleaved, **_longrope(top, rope, dim))
        if kind != "yarn":
            raise RopeError(f"rope type {kind!r} is not supported: default, yarn and longrope are")
        rope.require("truncate", True)
        if theta == 1.0:
            raise RopeError("config.json's yarn rope has rope_theta = 1: a number above 1 is needed")
        return cls(
            dim,
            theta,
            interleaved,
            factor=rope.number("factor", low=1.0, high=_MAX_FACTOR),
            mscale=rope.optional("mscale", high=_MAX_SCALING),
            mscale_all_dim=rope.optional("mscale_all_dim", high=_MAX_SCALING),
            original_max_position=rope.integer("original_max_position_embeddings"),
            beta_fast=rope.optional("beta_fast", high=_MAX_TURNS) or 32.0,
            beta_slow=rope.optional("beta_slow", high=_MAX_TURNS) or 1.0,
            attention_factor=_attention_factor(rope),
        )

    @property
    def softmax_factor(self) -> float:
        """m^2 with m = 0.1 * mscale_all_dim * ln(factor) + 1 (DeepSeek-V2's yarn), 1 without yarn."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    @property
    def cos_factor(self) -> float:
        """Scaling of cos and sin; 1.0 where mscale equals mscale_all_dim, as in every published MLA model."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor == 1.0:
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def inverse_frequencies(self) -> torch.Tensor:
        """float32 [dim / 2]. Yarn (arXiv 2309.00071): low frequencies are divided by `factor`, high ones kept, a linear
        ramp between the channels that turn `beta_fast` and `beta_slow` times over the original context. Rounded in the
        order of transformers' arithmetic: at position 100,000 a last bit is 0.01 radian."""
        channels = self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        if self.short_factor:
            return 1.0 / (torch.tensor(self.short_factor, dtype=torch.float32) * channels)
        if self.factor == 1.0:
            return 1.0 / channels
        low = max(math.floor(self._channel_of(self.beta_fast)), 0)
        high = min(math.ceil(self._channel_of(self.beta_slow)), self.dim - 1)
        width = high - low if high != low else 0.001
        kept = 1 - ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return 1.0 / (self.factor * channels) * (1 - kept) + 1.0 / channels * kept

    def _channel_of(self, turns: float) -> float:
        return self.dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def _attention_factor(rope: Fields) -> float | None:
    return rope.number("attention_factor", high=_MAX_SCALING) if "attention_factor" in rope else None


def _longrope(top: Fields, rope: Fields, dim: int) -> dict[str, Any]:
    """Longrope (arXiv 2402.13753) within its original length: each frequency divided by its short factor; cos and sin scaled by
    sqrt(1 + ln(factor) / ln(original length)), factor = max_position_embeddings / original length."""
    name = "original_max_position_embeddings"
    original = (rope if name in rope or name not in top else top).integer(name, low=2)
    short, scaling = rope.numbers("short_factor", dim // 2, high=_MAX_FACTOR), _attention_factor(rope)
    if scaling is None:
        stretched = top.integer("max_position_embeddings", original) / original
        factor = rope.number("factor", stretched, high=_MAX_FACTOR)
        scaling = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {"short_factor": short, "attention_factor": scaling, "max_position": original}


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
