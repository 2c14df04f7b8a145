"""The documented matrix: what backends claim for any GPU, asked of their `capability`; nothing runs, no library is needed.

Each property is asked around one base case (16 heads, else 128, pages of 64, 512/64, decode): two properties off the base
together may be refused all the same, and `plan()` says so.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from uncast.attention import Backend, Capability, ProblemSpec, registry
from uncast.attention.problem import QUERY_DTYPES
from uncast.attention.registry import UnknownBackend
from uncast.attention.verified import SM_SCALE, SPARSE_TOPK
from uncast.backends._recast import recast_capability
from uncast.latent.layouts import LAYOUT_NAMES, LayoutError, row_layout
from uncast.latent.pool import MAX_PAGE_SIZE
from uncast.verify.accuracy import Accuracy
from uncast.verify.probe_grid import Filters, layouts

GPU_ARCHS = (80, 86, 89, 90, 100, 103, 120, 121)
BASE_HEADS = (16, 128)
HEAD_DIMS = ((512, 64), (256, 64), (512, 128), (128, 32))
REFUSED_LAYOUTS = ("fp8_e5m2",)
Ask = Callable[[ProblemSpec], Capability]
RowOf = Callable[[str, str], dict[str, Any]]


def claims(filters: Filters, row_of: RowOf | None = None) -> list[dict[str, Any]]:
    """One row per backend and layout, refused ones with the reason; filtered by backend and layout.

    `row_of` gives the row of a backend and layout: `claims_row`, or what asks in another process.
    """
    row_of = row_of or claims_row
    rows = [
        row_of(name, kv_layout)
        for name in filters.backends or registry.names()
        for kv_layout in layouts(filters)
        if kv_layout not in REFUSED_LAYOUTS
    ]
    return rows + refused_layouts(filters)


def refused_layouts(filters: Filters) -> list[dict[str, Any]]:
    """Rows of layouts that every backend refuses."""
    return [_refused_layout(name) for name in REFUSED_LAYOUTS if name in (filters.layouts or REFUSED_LAYOUTS)]


def would_probe() -> list[dict[str, Any]]:
    """What `uncast probe` would look at on a GPU: uncast's backends with the layouts that they claim on any, and their
    package."""
    found: dict[str, dict[str, Any]] = {}
    for row in claims(Filters(backends=tuple(name for name in registry.names() if registry.is_own(name)))):
        if row["status"] == "claimed" and any(gpu != "cpu" for gpu in row["gpus"]):
            entry = {"backend": row["backend"], "package": row["package"], "installed": row["installed"], "layouts": []}
            found.setdefault(row["backend"], entry)["layouts"].append(row["kv_layout"])
    return list(found.values())


def claims_row(name: str, kv_layout: str) -> dict[str, Any]:
    """The row of a backend and layout, asked here: a backend from elsewhere may raise anything."""
    wrapper, _, inner = name.rpartition(":")
    try:
        made = registry.backend_class(inner)
    except UnknownBackend as error:
        return refused_row(name, kv_layout, str(error))
    state = {
        "package": made.requires or "torch",
        "installed": _installed(made.requires or "torch"),
        "cuda_graph": made.cuda_graph and not wrapper,
        "lossy_q": made.lossy,
        "uniform_q_len": made.uniform_q_len,
        "reads": _reads(bool(wrapper), made.rounds_fp8 and kv_layout.startswith("fp8")),
    }
    ask = _asker(inner, made)
    if ask is None:
        return refused_row(name, kv_layout, f"{name} cannot be asked before {made.requires} is installed") | state
    if wrapper:
        direct = ask

        def ask(spec: ProblemSpec) -> Capability:
            return recast_capability(name, direct, spec)

    able = _able(ask, kv_layout)
    if not able:
        others = (spec for layout in LAYOUT_NAMES for spec in _able(ask, layout))
        nearest = next(others, replace(_base(kv_layout), arch=90))  # refused for its layout, where it can be
        return refused_row(name, kv_layout, ask(replace(nearest, kv_layout=kv_layout)).reason) | state
    accuracy = Accuracy.of(made, "bf16" if wrapper else kv_layout)
    promise = {
        "large_output_error": round(accuracy.large_error, 4), "any_output_error": round(accuracy.any_error, 4),
        "status": "claimed", "gpus": _chips(able),
    }  # fmt: skip
    return refused_row(name, kv_layout, "") | state | promise | _properties(ask, able)


def _reads(copies: bool, rounds: bool) -> str:
    return "a bf16 copy" if copies else "values rounded to bf16" if rounds else "as stored"


def _able(ask: Ask, kv_layout: str) -> list[ProblemSpec]:
    """The base case on each chip with each dtype of queries that is claimed; with the first of `BASE_HEADS` that any is."""
    for heads in BASE_HEADS:
        bases = [
            replace(_base(kv_layout), num_heads=heads, device="cuda" if arch else "cpu", arch=arch, q_data_type=dtype)
            for arch, dtype in product((0, *GPU_ARCHS), QUERY_DTYPES)
        ]
        able = [spec for spec in bases if ask(spec).ok]
        if able:
            return able
    return []


def _properties(ask: Ask, able: list[ProblemSpec]) -> dict[str, Any]:
    """What the backend claims when one property after the other leaves the base case, on any of its chips."""

    def any_of(**changes: Any) -> bool:
        return any(_ok(ask, replace(spec, **changes)) for spec in able)

    return {
        "heads": ranges(n for n in range(1, 129) if any_of(num_heads=n)),
        "heads_causal_extend": ranges(n for n in range(1, 129) if any_of(num_heads=n, max_q_len=8)),
        "page_sizes": [p for p in _powers(MAX_PAGE_SIZE) if any_of(page_size=p)],
        "extend": any_of(max_q_len=8, causal=False),
        "causal": any_of(max_q_len=8, causal=True),
        "lse_bases": [base for base in ("2", "e") if any_of(lse_base=base, return_lse=True)],
        "head_dims": [f"{a}/{b}" for a, b in HEAD_DIMS if any_of(head_dim_ckv=a, head_dim_kpe=b)],
        "batch_invariant": any_of(batch_invariant=True),
        "sparse": any_of(topk=SPARSE_TOPK),
    }


def _base(kv_layout: str) -> ProblemSpec:
    return ProblemSpec(num_heads=BASE_HEADS[0], page_size=64, kv_layout=kv_layout, sm_scale=SM_SCALE)


def _ok(ask: Ask, spec: ProblemSpec) -> bool:
    try:
        return ask(spec).ok
    except LayoutError:
        return False


def _asker(name: str, made: type[Backend]) -> Ask | None:
    """The backend's `capability`; None if it needs an instance and its library is not here."""
    if inspect.ismethod(made.capability):  # of the class: no library needed
        bound: Ask = made.capability
        return bound
    try:
        return registry.create(name).capability
    except UnknownBackend:
        return None


def refused_row(name: str, kv_layout: str, reason: str) -> dict[str, Any]:
    """A row with nothing but why."""
    return {
        "backend": name, "kv_layout": kv_layout, "status": "refused", "reason": reason, "gpus": {}, "heads": "",
        "heads_causal_extend": "", "page_sizes": [], "extend": False, "causal": False, "lse_bases": [], "head_dims": [],
        "batch_invariant": False, "sparse": False, "cuda_graph": False, "lossy_q": False, "uniform_q_len": False,
        "reads": "", "large_output_error": None, "any_output_error": None, "package": "", "installed": "",
    }  # fmt: skip


def _refused_layout(kv_layout: str) -> dict[str, Any]:
    try:
        row_layout(kv_layout)
    except LayoutError as error:
        return refused_row("all", kv_layout, str(error))
    raise AssertionError(f"{kv_layout} is listed as refused, and it is a layout")


def _chips(able: list[ProblemSpec]) -> dict[str, list[str]]:
    """Query dtypes by chip, as "cpu" or "sm_90"."""
    chips: dict[str, list[str]] = {}
    for spec in able:
        chip = f"sm_{spec.arch}" if spec.arch else "cpu"
        chips.setdefault(chip, []).append(str(spec.q_data_type).removeprefix("torch."))
    return chips


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _powers(limit: int) -> Iterator[int]:
    value = 1
    while value <= limit:
        yield value
        value *= 2


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as text: "1-128", "1, 2, 4, 8-16"."""
    found = list(numbers)
    if not found:
        return ""
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(found)) if b != a + 1), len(found)]
    runs = [found[a:b] for a, b in pairwise(cuts)]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
