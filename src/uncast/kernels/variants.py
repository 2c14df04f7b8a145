"""The named kernel variants, compiled without a GPU for every chip they claim.

    python -m uncast.kernels.variants                                    # compile all, print the table
    python -m uncast.kernels.variants --report docs/kernel-variants.md   # and write it
    python -m uncast.kernels.variants --only mma_fp8_ds_mla --chips 86,90

A variant fails when ptxas serialises its wgmma (warning C7512), spills beyond its `max_spill`, or needs more shared memory
or registers than the chip has. Compiling takes Triton's own assembler and no driver.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from uncast.attention.problem import ProblemSpec
from uncast.kernels import (
    combine,
    gather_rows,
    mma_launch,
    rope_write,
    wgmma_launch,
)
from uncast.kernels.cache_write import cache_write_kernel
from uncast.kernels.decoder_variants import decoder_variants
from uncast.kernels.extend_variants import extend_variants
from uncast.kernels.mma_decode import mma_decode_kernel
from uncast.kernels.packed_variants import packed_variants
from uncast.kernels.schedule import BATCH_BUCKETS
from uncast.kernels.sparse_variants import sparse_variants
from uncast.kernels.unpack import NATIVE_ARCH
from uncast.kernels.variant import CHIPS, DTYPE_NAMES, Variant, types_of, wgmma_spill
from uncast.kernels.wgmma_decode import wgmma_decode_kernel
from uncast.latent.layouts import LAYOUT_NAMES, row_layout

MAX_REGISTERS = 255
SERIALISED_WGMMA = "C7512"


@dataclass(frozen=True)
class Report:
    """What the assembler said of a variant on one chip; sizes in bytes, `shared` per CTA."""

    variant: str
    chip: int
    registers: int
    spill: int
    shared: int
    limit: int
    seconds: float
    problems: tuple[str, ...] = field(default=())


def _mma_variants() -> Iterator[Variant]:
    for layout in mma_launch.LAYOUTS:
        narrow, rope = ("*bf16" if layout == "bf16" else "*i16"), ("*i16" if layout == "fp8_e4m3" else "*bf16")
        for dtype in mma_launch.QUERY_DTYPES:
            chips: dict[mma_launch.MmaConfig, list[int]] = {}
            for rows in (8, 16, 32):
                for chip in CHIPS:
                    spec = ProblemSpec(num_heads=rows, kv_layout=layout, q_data_type=dtype, arch=chip)
                    claimed = chips.setdefault(mma_launch.choose_config(spec), [])
                    if chip not in claimed:
                        claimed.append(chip)
            q = "*" + DTYPE_NAMES[dtype]
            for config, where in chips.items():
                # the schedule of a bucket does not depend on the layout: the largest is compiled for FP8 only
                buckets = BATCH_BUCKETS[: 3 if layout == "bf16" else 4]
                for bucket in buckets if dtype == torch.bfloat16 and config.block_rows == 16 else (32,):
                    for native in sorted({chip >= NATIVE_ARCH for chip in where}):
                        part = tuple(c for c in where if (c >= NATIVE_ARCH) == native)
                        args = mma_launch.constexprs(layout, dtype, part[0], config, bucket)
                        types = types_of(
                            mma_decode_kernel, args, q_nope=q, q_pe=q, out=q, ckv_base=narrow, kpe_base=rope
                        )
                        shape = f"rows{config.block_rows}_{config.step}x{config.stages}_batch{bucket}"
                        name = f"mma_{layout}_{DTYPE_NAMES[dtype]}_{shape}{'' if native else '_integer'}"
                        yield Variant(name, mma_decode_kernel, types, args, part)


def _wgmma_variants() -> Iterator[Variant]:
    for layout in wgmma_launch.LAYOUTS:
        for rows in wgmma_launch.STAGES[layout]:
            ds = layout == "fp8_ds_mla"
            shapes = [(64, 32, "bf16", False), (128, 1, "bf16", False), (64, 256, "bf16" if ds else "fp16", False)]
            if rows == 64 and not ds:
                shapes[2:] = [(64, 32, "bf16", True), (128, 128, "fp16", True)]
            for page, bucket, dtype, overlap in shapes:
                args = wgmma_launch.constexprs(layout, rows, page, bucket, overlap=overlap)
                ckv, kpe = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128 if ds else 64, 16, 2)
                types = types_of(
                    wgmma_decode_kernel, args, q_nope=f"*{dtype}", q_pe=f"*{dtype}", out=f"*{dtype}", partial_o="*fp16",
                    cache_words="*fp32", ckv_desc=f"tensordesc<i16[64,128],{ckv!r}>",
                    kpe_desc=f"tensordesc<i16[64,{64 if ds else 32}],{kpe!r}>",
                )  # fmt: skip
                name = f"wgmma_{layout}_{dtype}_rows{rows}_page{page}_batch{bucket}{'_overlap' if overlap else ''}"
                yield Variant(name, wgmma_decode_kernel, types, args, (90,), max_spill=wgmma_spill(layout, rows))


def _combine_variants() -> Iterator[Variant]:
    portable = [
        (rows, shape, dtype, "fp32", False, False, 0)
        for rows, shape, dtype in ((8, (256, 1, 8), "bf16"), (32, (64, 4, 8), "fp16"))
    ]
    hopper = [  # rows, shape, dtype, partial results, scaled, warm, programs
        (16, (64, 1, 8), "bf16", "fp16", False, True, 512), (16, (64, 1, 16), "fp16", "fp16", False, True, 128),
        (64, (64, 2, 16), "bf16", "fp16", True, True, 512), (64, (512, 1, 4), "bf16", "fp16", True, True, 2048),
        (32, (256, 1, 8), "bf16", "fp16", False, False, 132),
    ]  # fmt: skip
    for pdl, chips, cases in ((False, (80, 86, 89), portable), (True, (90, 100, 120), portable), (True, (90,), hopper)):
        for rows, shape, dtype, part, scaled, warm, programs in cases:
            spread = combine.spread_bytes(programs, 132) if programs else 0
            args = combine.constexprs(rows, *shape, pdl=pdl, scaled=scaled, warm=warm, spread=spread)
            types = types_of(combine.combine_kernel, args, out=f"*{dtype}", partial_o=f"*{part}")
            name = f"combine_{part}_rows{rows}_channels{shape[0]}_warps{shape[1]}_splits{args['SPLITS']}_{dtype}"
            name += f"{'_pdl' if pdl else ''}{'_warm' if warm else ''}"
            yield Variant(name, combine.combine_kernel, types, args, chips, num_warps=shape[1])


def _write_variants() -> Iterator[Variant]:
    for name in LAYOUT_NAMES:
        layout = row_layout(name)
        for dtype, counting in (("bf16", True), ("fp32", False)):
            args: dict[str, object] = {
                "LAYOUT": name, "RANK": 512, "ROPE": 64, "ROW_BYTES": layout.row_bytes, "COUNT": counting,
                "RANK_POW2": 512, "ROPE_POW2": 64,
            }  # fmt: skip
            types = types_of(
                cache_write_kernel, args, ckv=f"*{dtype}", kpe=f"*{dtype}", bytes_ptr="*u8", shorts_ptr="*i16", slots="*i64",
                counters="*i64",
            )  # fmt: skip
            label = f"cache_write_{name}_{dtype}{'_counting' if counting else ''}"
            yield Variant(label, cache_write_kernel, types, args, CHIPS)
        if not layout.is_fp8:
            continue
        args = rope_write.constexprs(layout, counting=True, interleaved=True)
        types = types_of(
            rope_write.rope_write_kernel, args, ckv="*bf16", kpe="*bf16", q_pe="*bf16", cos="*fp32", sin="*fp32",
            bytes_ptr="*u8", shorts_ptr="*i16", slots="*i64", counters="*i64",
        )  # fmt: skip
        yield Variant(f"rope_write_{name}_bf16_counting", rope_write.rope_write_kernel, types, args, CHIPS)


def _gather_variants() -> Iterator[Variant]:
    for name in ("fp8_e4m3", "fp8_ds_mla"):
        for native in (True, False):
            chips = tuple(chip for chip in CHIPS if (chip >= NATIVE_ARCH) == native)
            args = gather_rows.constexprs(row_layout(name), 64, chips[0])
            types = types_of(
                gather_rows.gather_rows_kernel, args, bytes_ptr="*u8", shorts_ptr="*i16", pages="*i32", out="*i16"
            )
            label = f"gather_rows_{name}{'' if native else '_integer'}"
            yield Variant(label, gather_rows.gather_rows_kernel, types, args, chips)


def variants() -> list[Variant]:
    """All named variants of the kernels that attention needs, at most 100."""
    return [
        *_mma_variants(), *_wgmma_variants(), *_combine_variants(), *_write_variants(), *_gather_variants(),
    ]  # fmt: skip


def compile_variant(variant: Variant, chip: int) -> Report:
    """Compiles `variant` for compute capability `chip` and reads the assembler's report.

    Raises:
        whatever Triton raises if the variant does not compile.
    """
    kernel, names = variant.kernel, list(variant.kernel.arg_names)
    given = variant.constexprs | ({"num_warps": variant.num_warps} if "num_warps" in names else {})
    signature = {n: variant.types.get(n, "constexpr") for n in names}
    constexprs = {(names.index(n),): value for n, value in given.items()}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") and not kernel.params[i].do_not_specialize_on_alignment
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
    log, start = io.StringIO(), time.perf_counter()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
        compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    text = log.getvalue()
    limit = mma_launch.shared_memory_limit(chip)
    registers, spill = _largest(r"Used (\d+) registers", text), _largest(r"(\d+) bytes spill stores", text)
    shared = compiled.metadata.shared
    problems = []
    if SERIALISED_WGMMA in text:
        problems.append(f"ptxas serialised its wgmma (warning {SERIALISED_WGMMA})")
    if shared > limit:
        problems.append(f"needs {shared} B of shared memory, sm_{chip} has {limit}")
    if not 0 < registers <= MAX_REGISTERS:
        problems.append(f"uses {registers} registers")
    if chip < NATIVE_ARCH and ("e4m3" in compiled.asm["ptx"] or "f8E4M3" in compiled.asm["ttgir"]):
        problems.append("hands an e4m3 type to the compiler")
    if spill > variant.max_spill:
        problems.append(f"spills {spill} B, allowed are {variant.max_spill}")
    seconds = time.perf_counter() - start
    return Report(variant.name, chip, registers, spill, shared, limit, seconds, tuple(problems))


def _largest(pattern: str, text: str) -> int:
    return max((int(n) for n in re.findall(pattern, text)), default=0)


def markdown(reports: Iterable[Report]) -> str:
    """The table of the docs: one row per variant, one column per chip."""
    by_variant: dict[str, dict[int, Report]] = {}
    for report in reports:
        by_variant.setdefault(report.variant, {})[report.chip] = report
    lines = [
        "# Kernel variants",
        "",
        "Compiled without a GPU by `python -m uncast.kernels.variants --report docs/kernel-variants.md`, Triton "
        + f"{triton.__version__}.",
        "A cell is registers / spilled bytes / KB of shared memory per CTA; limits of shared memory per CTA: "
        + ", ".join(f"sm_{c} {mma_launch.shared_memory_limit(c) // 1024} KB" for c in CHIPS)
        + ".",
        "",
        "| variant | " + " | ".join(f"sm_{c}" for c in CHIPS) + " |",
        "|---|" + "---|" * len(CHIPS),
    ]
    for name, cells in by_variant.items():
        row = []
        for chip in CHIPS:
            r = cells.get(chip)
            row.append(
                f"{r.registers} / {r.spill} / {r.shared / 1024:.1f}{' FAILS' if r.problems else ''}" if r else ""
            )
        lines.append(f"| `{name}` | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _chips(text: str) -> tuple[int, ...]:
    chips = tuple(int(part) for part in text.split(",") if part.strip().isdigit())
    if len(chips) != text.count(",") + 1 or not set(chips) <= set(CHIPS):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are {', '.join(map(str, CHIPS))}, separated by commas")
    return chips


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m uncast.kernels.variants",
        description="Compiles the named kernel variants for every chip they claim; needs no GPU.",
        epilog="example: python -m uncast.kernels.variants --only mma_fp8_ds_mla --chips 86,90",
    )
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument(
        "--chips", default=CHIPS, type=_chips, help="comma-separated compute capabilities, such as 86,90"
    )
    parser.add_argument("--report", type=Path, help="write the table as Markdown to this file")
    args = parser.parse_args(argv)
    reports = []
    for variant in (*variants(), *extend_variants(), *packed_variants(), *sparse_variants(), *decoder_variants()):
        for chip in variant.chips:
            if args.only in variant.name and chip in args.chips:
                report = compile_variant(variant, chip)
                reports.append(report)
                state = "; ".join(report.problems) or "ok"
                print(
                    f"{report.variant:58s} sm_{chip:<3d} {report.registers:3d} registers {report.spill:4d} B spilled "
                    f"{report.shared:6d} of {report.limit} B shared {report.seconds:5.1f} s  {state}",
                    flush=True,
                )
    if not reports:
        parser.error(f"no variant's name contains {args.only!r} on {', '.join(f'sm_{c}' for c in args.chips)}")
    if args.report is not None:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(markdown(reports))
    failed = [r for r in reports if r.problems]
    print(f"{len(reports)} compilations, {len(failed)} outside their limits", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
