"""The named variants of sparse attention and of the lightning indexer, for `variants`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from uncast.attention.problem import ProblemSpec
from uncast.kernels import index_select, mma_launch, sparse_launch, wgmma_sparse_launch
from uncast.kernels.mma_sparse import mma_sparse_kernel
from uncast.kernels.unpack import NATIVE_ARCH
from uncast.kernels.variant import CHIPS, DTYPE_NAMES, Variant, types_of, wgmma_spill
from uncast.kernels.wgmma_sparse import wgmma_sparse_kernel
from uncast.latent.index_keys import index_layout


def sparse_variants() -> Iterator[Variant]:
    """Batches of up to 32 requests."""
    for layout in mma_launch.LAYOUTS:
        narrow, rope = ("*bf16" if layout == "bf16" else "*i16"), ("*i16" if layout == "fp8_e4m3" else "*bf16")
        for dtype in mma_launch.QUERY_DTYPES if layout != "fp8_e4m3" else mma_launch.QUERY_DTYPES[:1]:
            q = "*" + DTYPE_NAMES[dtype]
            where: dict[tuple[mma_launch.MmaConfig, bool], dict[int, None]] = {}
            for heads, chip in itertools.product((8, 16, 64), CHIPS):
                spec = ProblemSpec(num_heads=heads, kv_layout=layout, q_data_type=dtype, arch=chip)
                key = (sparse_launch.choose_config(spec), chip >= NATIVE_ARCH)
                where.setdefault(key, {})[chip] = None
            for (config, native), chips in where.items():
                args = sparse_launch.constexprs(layout, dtype, min(chips), config, 32)
                types = types_of(
                    mma_sparse_kernel, args, q_nope=q, q_pe=q, out=q, ckv_base=narrow, kpe_base=rope, indices="*i32"
                )
                shape = f"rows{config.block_rows}_{config.step}x{config.stages}{'' if native else '_integer'}"
                yield Variant(
                    f"sparse_{layout}_{DTYPE_NAMES[dtype]}_{shape}", mma_sparse_kernel, types, args, tuple(chips)
                )
    for layout, stages in wgmma_sparse_launch.STAGES.items():
        for rows in stages:
            args = wgmma_sparse_launch.constexprs(layout, rows, 32)
            types = types_of(
                wgmma_sparse_kernel, args, q_nope="*bf16", q_pe="*bf16", out="*bf16", partial_o="*fp16", ckv_base="*i16",
                kpe_base="*i16", cache_words="*fp32", indices="*i32",
            )  # fmt: skip
            spill = wgmma_spill(layout, rows)
            yield Variant(f"wgmma_sparse_{layout}_rows{rows}", wgmma_sparse_kernel, types, args, (90,), max_spill=spill)
    for native in (True, False):
        claimed = tuple(chip for chip in CHIPS if (chip >= NATIVE_ARCH) == native)
        for group, heads in ((1, 64), (index_select.ROWS, 32)):
            args = index_select.constexprs(index_layout("fp8"), heads, native, group, 32)
            kernel, label = index_select.index_logits_kernel, f"index_logits_fp8_heads{heads}_rows{group}"
            types = types_of(
                kernel, args, q="*bf16", weights="*fp32", keys="*u8", scales="*fp32", scores="*fp32", factor="fp32"
            )
            name = f"{label}{'' if native else '_integer'}"
            yield Variant(name, kernel, types, args, claimed, index_select.NUM_WARPS, 3)
