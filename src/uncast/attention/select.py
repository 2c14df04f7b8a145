"""Selection: which backend `auto` takes, and the sentence for one that cannot.

`auto` takes the fastest verified backend: by the times of a probe if every verified one has a time, else in the order of
`registry.AUTO_ORDER`. Without a verified one it takes the first that claims the problem. Libraries are imported only for a
backend that is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from uncast.attention import registry
from uncast.attention.backend import Backend
from uncast.attention.problem import ProblemSpec
from uncast.attention.verified import is_verified, time_of
from uncast.latent.layouts import RowLayout

NO_GRAPH = "its run() cannot be captured in a CUDA graph, and cuda_graph=True was asked for"


def misses_default(made: Backend | type[Backend], layout: RowLayout) -> str:
    """Why `auto` does not take a backend over a cache of this layout, as the end of a sentence; "" if it may.

    Over FP8 it takes what keeps the default accuracy, 2.5e-3 of any output, which rounded values or probabilities miss. Over a
    16-bit cache `auto` goes by speed, and may take one that keeps it for large outputs only (`verify.accuracy`): there every
    library rounds probabilities to BF16, `native` and `torch_cpu` do not.
    """
    if layout.is_fp8 and made.rounds_fp8:
        return "rounds the values of an FP8 cache to BF16"
    if layout.is_fp8 and (layout.name in made.bf16_probabilities or layout.name in made.bf16_partials):
        return "rounds to BF16 on the way from an FP8 cache to its output"
    return ""


class Refused(ValueError):
    """No backend (or not the one asked for) can run the problem; the message is one sentence with the alternatives."""


class Selector:
    """The backends of one `MLAPagedAttention`, made when first taken and kept with their scratch.

    Args:
        requested: "auto" or a registered name.
        cuda_graph: only backends whose `run` may be captured.

    Raises:
        UnknownBackend: `requested` is not registered or its library is not installed.
    """

    def __init__(self, requested: str, cuda_graph: bool) -> None:
        self.requested, self.cuda_graph = requested, cuda_graph
        self._made: dict[str, Backend] = {}
        if requested != "auto":
            self._made[requested] = registry.create(requested)

    def able(self, spec: ProblemSpec) -> Iterator[Backend]:
        """Backends for `spec`, the best first; made one by one as they are asked for.

        Raises:
            Refused: there is none, or no further one.
        """
        if self.requested != "auto":
            yield self._asked(spec)
            return
        reasons: dict[str, str] = {}
        found = False
        for name in self._ranked(spec, reasons):
            try:
                backend = self._get(name)
            except registry.UnknownBackend as error:
                reasons[name] = str(error)
                continue
            found = True
            yield backend
        if not found:
            why = "; ".join(reason if name in reason else f"{name}: {reason}" for name, reason in reasons.items())
            raise Refused(f"no backend can run this on {spec.device} ({why})")

    def _get(self, name: str) -> Backend:
        if name not in self._made:
            self._made[name] = registry.create(name)
        return self._made[name]

    def _asked(self, spec: ProblemSpec) -> Backend:
        backend = self._get(self.requested)
        capability = backend.capability(spec)
        reason = capability.reason if not capability.ok else NO_GRAPH if self._uncapturable(backend) else ""
        if reason:
            why = reason.removeprefix(f"{backend.name} ")
            why = why if why == reason else f"it {why}"
            raise Refused(f"{backend.name} cannot run this: {why}{self._alternatives(spec, backend.name)}")
        return backend

    def _uncapturable(self, backend: Backend | type[Backend]) -> bool:
        return self.cuda_graph and not backend.cuda_graph

    def _ranked(self, spec: ProblemSpec, reasons: dict[str, str]) -> list[str]:
        """Names that claim `spec`, the best first; why others do not goes to `reasons`."""
        names = []
        for name in registry.AUTO_ORDER[spec.device]:
            reason = self._reason(name, spec)
            if reason is None:
                names.append(name)
            else:
                reasons[name] = reason
        verified = [name for name in names if is_verified(name, spec)]
        times = {name: time_of(name, spec) for name in verified}
        if None not in times.values():
            verified.sort(key=lambda name: times[name] or math.inf)
        return verified + [name for name in names if name not in verified]

    def _reason(self, name: str, spec: ProblemSpec) -> str | None:
        """Why `name` cannot run `spec`; None if it claims to."""
        try:
            made = self._made.get(name) or registry.asked_of(name)
        except registry.UnknownBackend as error:
            return str(error)
        if self._uncapturable(made):
            return f"{name}: {NO_GRAPH}"
        if self.requested == "auto" and (miss := misses_default(made, spec.layout)):
            return f"{name} {miss}: ask for it by name"
        capability = made.capability(spec)  # type: ignore[call-arg,arg-type]
        return None if capability.ok else capability.reason

    def _alternatives(self, spec: ProblemSpec, asked: str) -> str:
        others = [name for name in registry.AUTO_ORDER[spec.device] if name != asked and registry.is_installed(name)]
        if ":" not in asked and spec.layout.is_fp8:
            others.append(f"gather_cast:{asked}")
        others = [name for name in others if self._reason(name, spec) is None]
        return f"; use {' or '.join(others)}" if others else "; no other backend here can either"
