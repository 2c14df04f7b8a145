"""What both engines share: whether a plug-in is live, which uncast backend serves, and the counters of cache writes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from uncast.attention import ProblemSpec, registry
from uncast.latent.codec import new_counters

logger = logging.getLogger("uncast.integrations")

KV_LAYOUTS = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8_e4m3"}
"""Row layout of a flat engine cache by its dtype."""
COUNTED = ("saturated", "subnormal", "NaN")


class EngineRefusal(ValueError):
    """A server configuration that uncast cannot serve; the message is one sentence with what to change."""


@dataclass
class PluginState:
    """Whether `register()` of an engine's plug-in has run in this process.

    Attributes:
        live: it ran to its end.
        error: why it did not, in one sentence; "" while it has not been called.
    """

    live: bool = False
    error: str = ""


_states: dict[str, PluginState] = {}


def plugin_state(engine: str) -> PluginState:
    """The state of `engine`'s plug-in ("sglang" or "vllm") in this process; change it in place."""
    return _states.setdefault(engine, PluginState())


def kv_layout(dtype: torch.dtype, *, flag: str = "--kv-cache-dtype") -> str:
    """The row layout of an engine's flat MLA cache.

    Raises:
        EngineRefusal: a dtype without one.
    """
    if dtype not in KV_LAYOUTS:
        allowed = " or ".join(str(d).removeprefix("torch.") for d in KV_LAYOUTS)
        raise EngineRefusal(
            f"uncast reads a cache of {allowed}, not of {str(dtype).removeprefix('torch.')}: start with {flag} fp8_e4m3, or "
            "with a model dtype of bfloat16"
        )
    return KV_LAYOUTS[dtype]


def candidates(spec: ProblemSpec) -> tuple[str, ...]:
    """What may serve `spec`, best first: the cache as stored, then a copy of the live rows."""
    if spec.device == "cpu":
        return ("torch_cpu",)
    if spec.layout.is_fp8:
        return ("native", "gather_cast:flashinfer_fa2")
    return ("native", "flashinfer_fa2")


_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Logs a warning once a process."""
    if key not in _warned:
        _warned.add(key)
        logger.warning(message)


def serving_backend(spec: ProblemSpec, names: Iterable[str] | None = None) -> str:
    """The first of `names` (default: `candidates(spec)`) that can run `spec`, with one warning when it is not the first.

    Raises:
        EngineRefusal: none can; the reason of each.
    """
    reasons: list[str] = []
    for name in candidates(spec) if names is None else names:
        try:
            capability = registry.create(name).capability(spec)
        except registry.UnknownBackend as error:
            reasons.append(str(error))
            continue
        if capability.ok:
            if reasons:
                warn_once(f"fallback {name}", f"uncast: attention runs on {name}, because {reasons[0]}")
            return name
        reasons.append(f"{name}: {capability.reason}")
    raise EngineRefusal(f"uncast cannot serve this model on this device ({'; '.join(reasons)})")


@dataclass
class WriteCounters:
    """Saturated, subnormal and NaN values that cache writes met, summed on the device and logged without stalling it.

    A look costs no sync: the sums are copied to pinned memory and read at a later look, once the copy has arrived.

    Attributes:
        device: of the cache.
        every: forward passes between two looks.
        values: int64 [3] on the device; give it to the writer.
        seen: the sums of the last look that arrived.
    """

    device: torch.device
    every: int = 512
    values: torch.Tensor = field(init=False)
    seen: list[int] = field(default_factory=lambda: [0, 0, 0])

    def __post_init__(self) -> None:
        self.values = new_counters(self.device)
        self._steps = 0
        self._event: torch.cuda.Event | None = None
        self._host = torch.zeros(3, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def step(self) -> None:
        """Call once a forward pass, outside of graph capture."""
        self._steps += 1
        if self._event is not None and self._event.query():  # type: ignore[no-untyped-call]
            self._event = None
            self._report()
        if self._steps % self.every == 0 and self._event is None:
            self._host.copy_(self.values, non_blocking=True)
            if self.device.type != "cuda":
                self._report()
                return
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def _report(self) -> None:
        now = self._host.tolist()
        new = [a - b for a, b in zip(now, self.seen, strict=True)]
        self.seen = now
        if new[0] or new[2]:
            counts = ", ".join(f"{n} {name}" for n, name in zip(new, COUNTED, strict=True))
            logger.warning(
                "uncast: cache writes met %s values since the last look (%s in all): a larger k_scale loses none",
                counts, now,
            )  # fmt: skip
        elif new[1]:
            logger.info("uncast: cache writes met %d subnormal values since the last look", new[1])
