"""Named variants (`variants`) of the kernels of un-absorbed extend, at GLM's widths: 192 + 64 and 256 channels a head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from uncast.kernels import merge_states, up_launch, up_project
from uncast.kernels.unpack import INTEGER_FACTOR, NATIVE_ARCH
from uncast.kernels.variant import CHIPS, Variant, types_of
from uncast.latent.layouts import row_layout

NOPE, ROPE, RANK, VALUES = 192, 64, 512, 256
UP_SPILL_BYTES = 1152
"""Allowed of an up-projection: its accumulators (128 x 256, or two of 128 x 128 for fp8_ds_mla) fill the registers. It was
measured with these tiles."""
_OLD = tuple(chip for chip in CHIPS if chip < NATIVE_ARCH)
_NEW = tuple(chip for chip in CHIPS if chip >= NATIVE_ARCH)


def extend_variants() -> Iterator[Variant]:
    """A list of its own: up-projection, its preparation, packed queries and the merge of states."""
    for layout in up_launch.LAYOUTS:
        for chips, native in ((_NEW, True), (_OLD, False)) if layout != "bf16" else ((CHIPS, True),):
            suffix = "" if native else "_integer"
            for config in dict.fromkeys(up_launch.choose_config(layout, chip) for chip in chips):
                where = tuple(chip for chip in chips if up_launch.choose_config(layout, chip) == config)
                variant = _up_project(layout, native, config)
                yield replace(variant, name=f"{variant.name}{suffix}", chips=where)
            yield replace(_place_rope(layout, native), name=f"place_rope_{layout}{suffix}", chips=chips)
    yield from _preparation()
    for out, two, last in (("fp32", True, False), ("bf16", True, True), ("bf16", False, True)):
        args: dict[str, object] = {
            "WIDTH": VALUES, "WIDTH_POW2": VALUES, "BLOCK": 8, "TWO": two, "LAST": last, "STORE_LSE": not last,
        }  # fmt: skip
        types = types_of(
            merge_states.merge_states_kernel, args, x="*fp16", y="*fp16", out=f"*{out}", lse_x="*fp32", lse_y="*fp32",
            lse_out="*fp32", factors="*fp32", to_base2_x="fp32", to_base2_y="fp32", from_base2="fp32",
        )  # fmt: skip
        name = f"merge_states_{1 + two}_to_{out}{'_last' if last else ''}"
        yield Variant(name, merge_states.merge_states_kernel, types, args, CHIPS)


def _items(layout: str) -> tuple[str, int]:
    """Type and bytes of the elements that a latent is read as."""
    return ("*u8", 1) if row_layout(layout).is_fp8 else ("*bf16", 2)


def _up_project(layout: str, native: bool, config: up_launch.UpConfig) -> Variant:
    row, (items, size) = row_layout(layout), _items(layout)
    args: dict[str, object] = {
        "LAYOUT": layout, "NATIVE": native, "RANK": RANK, "CH": NOPE, "ROW_ITEMS": row.row_bytes // size,
        "ROW_WORDS": row.row_bytes // 4, "SCALE_WORD": max(row.scale_offset, 0) // 4, "BM": config.rows,
        "BN": config.channels, "BK": config.step, "GROUP": 8,
    }  # fmt: skip
    kernel = up_project.up_project_kernel
    types = types_of(
        kernel, args, items=items, words="*fp32", pages="*i32", w="*fp16" if row.is_fp8 else "*bf16", row_factor="*fp32",
        factor="*fp32", out="*fp16",
    )  # fmt: skip
    name = f"up_project_{layout}_{config.rows}x{config.channels}"
    return Variant(name, kernel, types, args, (), config.num_warps, config.num_stages, UP_SPILL_BYTES)


def _place_rope(layout: str, native: bool) -> Variant:
    row = row_layout(layout)
    codes = row.kpe_dtype == "e4m3"
    size = 1 if codes else 2
    args: dict[str, object] = {
        "CODES": codes, "NATIVE": native, "ROPE": ROPE, "ROPE_POW2": ROPE, "ROW_ITEMS": row.row_bytes // size,
        "KPE_ITEM": row.kpe_offset // size, "NOPE": NOPE, "BM": 32,
    }  # fmt: skip
    kernel = up_project.place_rope_kernel
    types = types_of(kernel, args, items="*u8" if codes else "*bf16", pages="*i32", factors="*fp32", out="*fp16")
    return Variant("", kernel, types, args, ())


def _preparation() -> Iterator[Variant]:
    for scale in (True, False):
        args: dict[str, object] = {"CH": NOPE, "RANK": RANK, "BOUND": 0, "SCALE": scale, "BLOCK": 8, "RANK_POW2": RANK}
        yield _plain(
            f"prepare_weights_{'fp16' if scale else 'bf16'}", up_project.prepare_weights_kernel, args, w="*bf16",
            prepared="*fp16" if scale else "*bf16", row_factor="*fp32", bounds="*i32",
        )  # fmt: skip
    for layout in ("fp8_ds_mla", "bf16"):
        row = row_layout(layout)
        args = {
            "LAYOUT": layout, "RANK": RANK, "ROPE": ROPE, "ROW_WORDS": row.row_bytes // 4,
            "SCALE_WORD": max(row.scale_offset, 0) // 4, "KPE_ITEM": row.kpe_offset // 2, "RANK_POW2": RANK,
            "ROPE_POW2": ROPE, "BLOCK": 64 if row.is_fp8 else 16,
        }  # fmt: skip
        yield _plain(
            f"bound_rows_{layout}", up_project.bound_rows_kernel, args, items="*bf16", words="*fp32", pages="*i32",
            bounds="*i32",
        )  # fmt: skip
    for external in (True, False):
        args = {
            "EXTERNAL": external, "INTEGER": INTEGER_FACTOR, "KEY": up_project.KEY_POWER,
            "VALUE": up_project.VALUE_POWER,
        }  # fmt: skip
        kernel = up_project.factors_kernel
        types = types_of(kernel, args, bounds="*i32", factors="*fp32", scale_power="fp32")
        yield Variant(f"factors_{'outside' if external else 'inside'}", kernel, types, args, CHIPS, 1)
    args = {"NOPE": NOPE, "ROPE": ROPE, "WIDTH": NOPE + ROPE, "NOPE_POW2": 256, "ROPE_POW2": ROPE, "BLOCK": 16}
    yield _plain(
        "pack_queries", up_project.pack_queries_kernel, args, q_nope="*bf16", q_pe="*bf16", factors="*fp32", out="*fp16"
    )


def _plain(name: str, kernel: Any, args: dict[str, object], **types: str) -> Variant:
    return Variant(name, kernel, types_of(kernel, args, **types), args, CHIPS)
