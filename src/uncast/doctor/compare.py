"""Two traces side by side: what a step gained and lost."""

from __future__ import annotations

from collections import defaultdict

from msgspec import Struct
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from uncast.doctor.diagnose import Diagnosis
from uncast.doctor.report import Finding
from uncast.doctor.words import count, percent, time

MAX_KERNELS = 20
MIN_SHARE = 0.002


class KernelChange(Struct, kw_only=True):
    """A kernel name in both steps; zeros where it does not run."""

    kernel: str
    calls_a: float
    calls_b: float
    us_a: float
    us_b: float


class Comparison(Struct, kw_only=True):
    """`gone`, `new`, `kept`: findings of A that B lacks, of B that A lacks, and of both (B's), by kind and source."""

    a: str
    b: str
    judged: str
    step_us_a: float
    step_us_b: float
    speedup: float
    gone: list[Finding]
    new: list[Finding]
    kept: list[Finding]
    parts: list[KernelChange]
    kernels: list[KernelChange]


def compare(a: Diagnosis, b: Diagnosis) -> Comparison:
    """What changed from A to B, the largest changes first."""
    first, second = a.report, b.report
    keys_a = {(f.kind, f.source): f for f in first.findings}
    keys_b = {(f.kind, f.source): f for f in second.findings}
    parts_a = {p.part: p.us_per_step for p in first.budget}
    parts_b = {p.part: p.us_per_step for p in second.budget}
    parts = [
        KernelChange(kernel=p, calls_a=0, calls_b=0, us_a=parts_a.get(p, 0.0), us_b=parts_b.get(p, 0.0))
        for p in {**parts_a, **parts_b}
    ]
    least = MIN_SHARE * max(first.step_us, second.step_us)
    changes = [c for c in _kernels(a, b) if abs(c.us_a - c.us_b) >= least]
    return Comparison(
        a=first.trace, b=second.trace, judged=f"{first.judged} against {second.judged}",
        step_us_a=first.step_us, step_us_b=second.step_us,
        speedup=first.step_us / second.step_us if second.step_us else 0.0,
        gone=[f for k, f in keys_a.items() if k not in keys_b], new=[f for k, f in keys_b.items() if k not in keys_a],
        kept=[f for k, f in keys_b.items() if k in keys_a],
        parts=sorted(parts, key=lambda c: -abs(c.us_a - c.us_b)), kernels=changes[:MAX_KERNELS],
    )  # fmt: skip


def _kernels(a: Diagnosis, b: Diagnosis) -> list[KernelChange]:
    sums = [_by_name(d) for d in (a, b)]
    names = {**sums[0], **sums[1]}
    changes = [
        KernelChange(
            kernel=name[:200], calls_a=sums[0][name][0], calls_b=sums[1][name][0],
            us_a=sums[0][name][1], us_b=sums[1][name][1],
        )
        for name in names
    ]  # fmt: skip
    return sorted(changes, key=lambda c: -abs(c.us_a - c.us_b))


def _by_name(d: Diagnosis) -> dict[str, tuple[float, float]]:
    scene = d.scene
    sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    n = len(scene.analysed)
    for step in scene.analysed:
        for kernel in step.kernels:
            calls, us = sums[scene.name(kernel)]
            sums[scene.name(kernel)] = (calls + 1 / n, us + scene.trace.kernels.dur[kernel] / n)
    return sums


def print_comparison(c: Comparison, console: Console) -> None:
    console.print(f"A {escape(c.a)}\nB {escape(c.b)}", highlight=False)
    faster = f"B is {c.speedup:.2f}x as fast" if c.speedup >= 1 else f"B takes {1 / max(c.speedup, 1e-9):.2f}x as long"
    console.print(f"[bold]a step: {time(c.step_us_a)} -> {time(c.step_us_b)}, {faster}[/] ({c.judged})")
    for title, findings in (("gone in B", c.gone), ("new in B", c.new), ("still in B", c.kept)):
        for f in findings:
            console.print(f"{title}: [bold]{f.title}[/], {time(f.us_per_step)} ({percent(f.share_of_step)})")
    table = Table("", "calls A", "calls B", "time A", "time B", "change", box=None, padding=(0, 2, 0, 0))
    for row in [*c.parts, *c.kernels]:
        calls = (count(row.calls_a), count(row.calls_b)) if row in c.kernels else ("", "")
        change = row.us_b - row.us_a
        sign = "+" if change >= 0 else "-"
        table.add_row(escape(row.kernel[:60]), *calls, time(row.us_a), time(row.us_b), f"{sign}{time(abs(change))}")
    console.print(table)
