"""Random sweep of `native` against the oracle: `python -m tests.kernels.sweep --cases 2000` on a GPU.

Ragged, poisoned (NaN outside live rows, garbage page numbers) and scaled batches; prints the worst errors and fails beyond
the tolerance of the design. The pools are drawn once per layout, so that a case costs milliseconds.

`--emulate` draws smaller batches on a CPU, where `gluon_cpu` executes the kernels' source, about a second a case: formulas,
indices, barriers and reads outside tensors, but nothing that only hardware or the compiler does.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

import tests.backends.native_kinds  # noqa: F401
from tests.kernels.native_on_cpu import emulator
from uncast.attention import ClaimedCapabilityWarning, MLAPagedAttention, ProblemSpec
from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.latent.codec import encode_rows
from uncast.latent.layouts import row_layout
from uncast.verify.probe import MAX_LSE_ERROR, MAX_ROW_ERROR, MAX_TENSOR_ERROR

SCALES = (0.013, 0.021)


@dataclass(frozen=True)
class Sizes:
    """What batches are drawn from; `rows` of the pool, `tops`: longest contexts of a batch, beside `longest`; `query_rows`:
    most (token, head) of a request."""

    device: str
    rows: int
    pages: tuple[int, ...]
    batches: tuple[int, ...]
    tops: tuple[int, ...]
    longest: int
    q_lens: tuple[int, ...]
    longest_q: int
    query_rows: int


GPU = Sizes(
    "cuda", 16384, (1, 2, 4, 8, 16, 32, 64, 64, 64, 128), (1, 1, 2, 3, 6, 12), (70, 300, 1000), 16384, (1, 1, 1, 2, 4, 8), 40,
    query_rows=128 * 40,
)  # fmt: skip
CPU = Sizes(
    "cpu", 4096, (1, 4, 32, 64, 64, 64, 64, 128, 128, 128), (1, 1, 2, 3, 4), (130, 300, 700), 1100, (1, 1, 1, 2, 4), 4,
    query_rows=128,
)  # fmt: skip


def draw_pool(layout: str, rows: int, generator: torch.Generator) -> torch.Tensor:
    ckv = torch.randn(rows, 512, device=generator.device, generator=generator)
    kpe = torch.randn(rows, 64, device=generator.device, generator=generator)
    scales = SCALES if row_layout(layout).has_external_scales else (None, None)
    return encode_rows(ckv, kpe, row_layout(layout), ckv_scale=scales[0], kpe_scale=scales[1])


def draw_spec(rng: random.Random, sizes: Sizes) -> ProblemSpec:
    return ProblemSpec(
        num_heads=rng.choice([1, 5, 8, 10, 12, 16, 20, 32, 64, 96, 128, rng.randint(1, 128)]),
        page_size=rng.choice(sizes.pages),
        kv_layout=rng.choice(["fp8_e4m3", "fp8_e4m3", "fp8_ds_mla", "bf16"]),
        q_data_type=rng.choice([torch.bfloat16, torch.bfloat16, torch.float16]),
        causal=rng.random() < 0.8,
        sm_scale=rng.choice([0.03, 0.06, 0.2]),
        lse_base=rng.choice(["2", "e"]),
        batch_invariant=rng.random() < 0.2,
    )


def run_case(
    rng: random.Random, backend: str, sizes: Sizes, pools: dict[str, torch.Tensor], generator: torch.Generator
) -> tuple[tuple[float, ...], str]:
    """The errors, and which kernel ran and whether it split a context."""
    spec, device, rows = draw_spec(rng, sizes), sizes.device, sizes.rows
    page, layout = spec.page_size, spec.layout
    batch = rng.choice(sizes.batches)
    top = rng.choice([*sizes.tops, min(sizes.longest, rows // batch - 2 * page - 1)])
    kv_lens = [rng.choice([0, 1, 63, 64, 65, top, rng.randint(0, top)]) for _ in range(batch)]
    kv_lens = [min(n, rows // batch - 2 * page) for n in kv_lens]
    q_lens = [rng.choice([*sizes.q_lens, rng.randint(1, sizes.longest_q)]) for _ in range(batch)]
    q_lens = [min(n, max(1, sizes.query_rows // spec.num_heads)) for n in q_lens]
    num_pages, order = rows // page, torch.randperm(rows // page, device=device, generator=generator)
    live = [-(-n // page) for n in kv_lens]
    tables = torch.full((batch, max(live) + 2), 2**31 - 1, dtype=torch.int32, device=device)
    dead = torch.ones(num_pages, page, dtype=torch.bool, device=device)
    at = 0
    for b, (pages, n) in enumerate(zip(live, kv_lens, strict=True)):
        own = order[at : at + pages]
        tables[b, :pages] = own.int()
        dead[own] = (torch.arange(pages * page, device=device) >= n).view(pages, page)
        at += pages
    cache = pools[spec.kv_layout].view(num_pages, page, layout.row_bytes).masked_fill(dead[..., None], 0xFF)
    total_q = sum(q_lens)
    q = torch.randn(total_q, spec.num_heads, 576, device=device, generator=generator).to(spec.q_data_type)
    attention = MLAPagedAttention(backend)
    plan = attention.plan(
        torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=device),
        block_tables=tables, seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        num_heads=spec.num_heads, page_size=page, causal=spec.causal, sm_scale=spec.sm_scale, lse_base=spec.lse_base,
        q_data_type=spec.q_data_type, kv_layout=spec.kv_layout, batch_invariant=spec.batch_invariant,
        max_q_len=max(q_lens), total_q=total_q,
    )  # fmt: skip
    scales = dict(zip(("ckv_scale", "kpe_scale"), SCALES if layout.has_external_scales else (None, None), strict=True))
    out, lse = attention.run(q[..., :512], q[..., 512:], cache, return_lse=True, **scales)
    again, _ = attention.run(q[..., :512], q[..., 512:], cache, return_lse=True, **scales)
    expected, expected_lse = mla_oracle(plan.problem, q[..., :512], q[..., 512:], cache, **scales)
    launch = plan._impl._plan
    kind = f"{type(launch).__name__} of {launch.splits.block_rows} rows"
    kind += ", overlap" * getattr(launch, "overlap", False) + ", split" * bool(launch.scratch.sched[0, 0])
    row, whole = relative_errors(out, expected)
    finite = expected_lse.isfinite()
    lse_error = float((lse.double() - expected_lse)[finite].abs().max()) if bool(finite.any()) else 0.0
    ok = row <= MAX_ROW_ERROR and whole <= MAX_TENSOR_ERROR and lse_error <= MAX_LSE_ERROR
    if not (ok and torch.equal(lse.isfinite(), finite) and torch.equal(out, again)):
        raise AssertionError(f"{replace(spec)} kv_lens={kv_lens} q_lens={q_lens}: {row=} {whole=} {lse_error=}")
    return (row, whole, lse_error), kind


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop drawing cases after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="both", choices=("native", "native_mma", "both"), help="both: alternating")
    parser.add_argument("--emulate", action="store_true", help="smaller batches on a CPU, by the tests' emulator")
    args = parser.parse_args(argv)
    if args.cases < 1:
        parser.error(f"cases is {args.cases}: a sweep needs 1 or more")
    if not args.emulate and not torch.cuda.is_available():
        parser.error("the sweep needs a CUDA device, and torch sees none here: pass --emulate")
    warnings.simplefilter("ignore", ClaimedCapabilityWarning)
    sizes = CPU if args.emulate else GPU
    rng, generator = random.Random(args.seed), torch.Generator(sizes.device).manual_seed(args.seed)
    pools = {name: draw_pool(name, sizes.rows, generator) for name in ("bf16", "fp8_e4m3", "fp8_ds_mla")}
    kinds = ["native_mma", "native"] if args.backend == "both" else [args.backend]
    if args.emulate:
        kinds = [kind.replace("native", "emulated") for kind in kinds]
    wrong = (AssertionError, IndexError, RuntimeError, TypeError) if args.emulate else (AssertionError,)
    worst, failures, launched = (0.0, 0.0, 0.0), 0, Counter[str]()
    done, start = 0, time.monotonic()
    for case in range(args.cases):
        if time.monotonic() - start > args.seconds:
            break
        done += 1
        try:
            with emulator(rng) if args.emulate else nullcontext():
                errors, kind = run_case(rng, kinds[case % len(kinds)], sizes, pools, generator)
            launched[kind] += 1
            worst = tuple(max(a, b) for a, b in zip(worst, errors, strict=True))  # type: ignore[assignment]
        except wrong as error:
            failures += 1
            print(f"case {case} {kinds[case % len(kinds)]}: {error}", flush=True)
    print(
        f"{done} of {args.cases} cases, {failures} failures; "
        f"worst row {worst[0]:.2e}, tensor {worst[1]:.2e}, LSE {worst[2]:.1e}; "
        f"{(time.monotonic() - start) / max(1, done):.2f} s a case"
    )
    for kind, count in sorted(launched.items()):
        print(f"{count:6} {kind}")
    raise SystemExit(failures > 0 or done == 0)


if __name__ == "__main__":
    main()
