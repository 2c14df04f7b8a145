"""A representative part of the named kernel variants compiles for its chips, without a GPU and inside their limits.

All of them: `python -m uncast.kernels.variants`. A failure means that some GPU would refuse or crawl at run time.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from uncast.kernels.decoder_variants import decoder_variants
from uncast.kernels.extend_variants import extend_variants
from uncast.kernels.packed_variants import packed_variants
from uncast.kernels.sparse_variants import sparse_variants
from uncast.kernels.variants import CHIPS, Report, Variant, compile_variant, markdown, variants

APART = [*extend_variants(), *packed_variants(), *sparse_variants(), *decoder_variants()]
VARIANTS = {v.name: v for v in (*variants(), *APART)}
SUBSET = [
    ("pack_queries", 120),
    ("up_project_fp8_e4m3_128x128_integer", 86),
    ("combine_fp32_rows32_channels64_warps4_splits128_fp16_pdl", 120),
    ("mma_fp8_e4m3_bf16_rows8_64x2_batch32", 89),
    ("mma_fp8_e4m3_bf16_rows16_64x2_batch1_integer", 86),
    ("mma_fp8_e4m3_bf16_rows16_64x2_batch4096", 90),
    ("mma_fp8_e4m3_bf16_rows32_32x3_batch32_integer", 80),
    ("mma_fp8_e4m3_fp16_rows16_64x2_batch32", 120),
    ("mma_fp8_ds_mla_bf16_rows8_64x2_batch32_integer", 86),
    ("mma_fp8_ds_mla_bf16_rows16_32x3_batch32", 120),
    ("mma_fp8_ds_mla_bf16_rows16_64x2_batch32", 100),
    ("mma_fp8_ds_mla_fp16_rows32_32x2_batch32", 89),
    ("mma_bf16_bf16_rows16_32x2_batch256_integer", 80),
    ("mma_bf16_fp16_rows16_32x1_batch32_integer", 86),
    ("wgmma_fp8_e4m3_bf16_rows16_page64_batch32", 90),
    ("wgmma_fp8_e4m3_bf16_rows64_page128_batch1", 90),
    ("wgmma_fp8_e4m3_bf16_rows64_page64_batch32_overlap", 90),
    ("combine_fp16_rows64_channels64_warps2_splits128_bf16_pdl_warm", 90),
    ("wgmma_fp8_ds_mla_bf16_rows64_page64_batch32", 90),
    ("cache_write_fp8_ds_mla_bf16_counting", 80),
    ("cache_write_fp8_e4m3_fp32", 120),
    ("packed_nvfp4_gated_rows16", 90),
    ("packed_nvfp4_gated_rows32", 86),
    ("packed_fp8_split_rows16", 80),
    ("sparse_fp8_ds_mla_bf16_rows8_64x2", 89),
    ("sparse_fp8_ds_mla_bf16_rows32_32x2_integer", 86),
    ("sparse_fp8_e4m3_bf16_rows16_64x2", 120),
    ("sparse_bf16_bf16_rows16_32x2_integer", 80),
    ("wgmma_sparse_fp8_ds_mla_rows64", 90),
    ("wgmma_sparse_fp8_e4m3_rows16", 90),
    ("few_tokens_gated_flash", 80),
    ("few_tokens_summed_v3", 90),
    ("choose_v3", 100),
    ("index_write_fp8", 89),
]


def test_the_list_is_small_and_every_chip_has_every_layout() -> None:
    assert len(VARIANTS) == len(variants()) + len(APART) and len(variants()) <= 100 and len(APART) <= 110
    for chip in CHIPS:
        for layout in ("bf16", "fp8_e4m3", "fp8_ds_mla"):
            for kind in ("mma", "sparse"):
                found = [v for v in VARIANTS.values() if chip in v.chips and v.name.startswith(f"{kind}_{layout}_")]
                assert found, (chip, kind, layout)
    hopper = [v for v in VARIANTS.values() if v.name.startswith("wgmma")]
    assert hopper and all(v.chips == (90,) for v in hopper)


@pytest.mark.parametrize(("name", "chip"), SUBSET)
def test_compiles_inside_the_limits_of_its_chip(name: str, chip: int) -> None:
    variant = VARIANTS[name]
    assert chip in variant.chips
    assert compile_variant(variant, chip).problems == ()


@pytest.mark.parametrize("end", ["bf16", "_pdl", "_warm"])
def test_combine_compiles(end: str) -> None:
    chosen = [v for v in VARIANTS.values() if v.name.startswith("combine") and v.name.endswith(end)]
    assert chosen
    assert compile_variant(chosen[0], chosen[0].chips[0]).problems == ()


def test_a_variant_beyond_its_chip_is_reported() -> None:
    large = next(v for v in VARIANTS.values() if v.name.startswith("mma_fp8_ds_mla_bf16_rows16_64x2_batch32"))
    (problem,) = compile_variant(Variant(**vars(large) | {"chips": (89,)}), 89).problems
    assert problem == "needs 110848 B of shared memory, sm_89 has 101376"


def test_an_e4m3_type_on_an_old_chip_is_reported() -> None:
    native = VARIANTS["mma_fp8_e4m3_bf16_rows8_64x2_batch32"]
    with pytest.raises(Exception, match=r"e4m3|PTXAS|ptxas"):
        compile_variant(native, 86)


def test_the_table_has_one_row_a_variant_and_marks_failures() -> None:
    reports = [
        Report("a", 80, 100, 0, 51200, 166912, 1.0),
        Report("a", 90, 90, 16, 51200, 232448, 1.0, ("spills",)),
    ]
    assert "| `a` | 100 / 0 / 50.0 |  |  | 90 / 16 / 50.0 FAILS |  |  |" in markdown(reports)
