"""Small batches for any spec, poisoned where nothing may be read: NaN in unused rows, garbage in unused table entries."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from uncast.attention import MLAPagedAttention, Problem, ProblemSpec
from uncast.latent.codec import Scale, encode_rows

_GARBAGE_PAGE = 2**31 - 1


@dataclass(frozen=True)
class ProbeCase:
    """Inputs of one probe."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    qo_indptr: torch.Tensor
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    cache: torch.Tensor
    ckv_scale: Scale
    kpe_scale: Scale
    indices: torch.Tensor | None = None

    def clone(self) -> ProbeCase:
        """The same with tensors of its own."""
        return replace(self, **{name: tensor.clone() for name, tensor in self._tensors().items()})

    def restore(self, pristine: ProbeCase) -> list[str]:
        """Makes all tensors what they are in `pristine`; the names of those that were not."""
        now, before = self._tensors(), pristine._tensors()
        changed = [name for name, tensor in now.items() if not torch.equal(tensor, before[name])]
        for name in changed:
            now[name].copy_(before[name])
        return changed

    def _tensors(self) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def make_case(spec: ProblemSpec, kv_lens: list[int], q_lens: list[int], *, seed: int = 0) -> ProbeCase:
    """A random batch for `spec` whose unused pages hold NaN and whose unused block-table entries are garbage."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layout, page = spec.layout, spec.page_size
    live = [-(-n // page) for n in kv_lens]
    num_pages = sum(live) + 3
    ckv_scale, kpe_scale = (0.013, 0.021) if layout.has_external_scales else (None, None)
    rows = encode_rows(
        randn(num_pages * page, spec.head_dim_ckv),
        randn(num_pages * page, spec.head_dim_kpe),
        layout,
        ckv_scale=ckv_scale,
        kpe_scale=kpe_scale,
    )
    cache = rows.view(num_pages, page, layout.row_bytes)
    order = torch.randperm(num_pages, generator=generator)
    tables = torch.full((len(kv_lens), max(1, *live) + 2), _GARBAGE_PAGE, dtype=torch.int32)
    used, position = torch.zeros(num_pages, page, dtype=torch.bool), 0
    for request, count in enumerate(live):
        pages = order[position : position + count]
        tables[request, :count] = pages.int()
        for index, number in enumerate(pages.tolist()):
            used[number, : min(page, kv_lens[request] - index * page)] = True
        position += count
    cache[~used] = 0xFF  # NaN in e4m3, bf16 and fp32 alike
    total_q = sum(q_lens)
    device, dtype = spec.device, spec.q_data_type
    return ProbeCase(
        block_tables=tables.to(device),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        qo_indptr=torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=device),
        q_nope=randn(total_q, spec.num_heads, spec.head_dim_ckv).to(device, dtype),
        q_pe=randn(total_q, spec.num_heads, spec.head_dim_kpe).to(device, dtype),
        cache=cache.to(device),
        ckv_scale=ckv_scale,
        kpe_scale=kpe_scale,
        indices=_selections(spec.topk, kv_lens, q_lens, generator).to(device) if spec.topk else None,
    )


def _selections(topk: int, kv_lens: list[int], q_lens: list[int], generator: torch.Generator) -> torch.Tensor:
    """int32 [total_q, topk]: for each query a random choice, in random places, of tokens that it may see; every third query
    leaves half of them empty."""
    indices = torch.full((sum(q_lens), topk), -1, dtype=torch.int32)
    visible = [
        max(0, kv_len - q_len + i + 1) for kv_len, q_len in zip(kv_lens, q_lens, strict=True) for i in range(q_len)
    ]
    for row, limit in enumerate(visible):
        count = min(topk, limit) // (2 if row % 3 == 0 else 1)
        places = torch.randperm(topk, generator=generator)[:count]
        indices[row, places] = torch.randperm(limit, generator=generator)[:count].int()
    return indices


def plan_case(attention: MLAPagedAttention, spec: ProblemSpec, case: ProbeCase, alone_rows: int = 0) -> Problem:
    """Plans `attention` for a case of `spec`; returns the normalised problem. `alone_rows`: see `Problem`."""
    return attention.plan(
        case.qo_indptr,
        block_tables=case.block_tables,
        seq_lens=case.seq_lens,
        num_heads=spec.num_heads,
        head_dim_ckv=spec.head_dim_ckv,
        head_dim_kpe=spec.head_dim_kpe,
        page_size=spec.page_size,
        causal=spec.causal,
        sm_scale=spec.sm_scale,
        q_data_type=spec.q_data_type,
        kv_layout=spec.kv_layout,
        lse_base=spec.lse_base,
        batch_invariant=spec.batch_invariant,
        topk=spec.topk,
        num_pages=case.cache.shape[0],
        alone_rows=alone_rows,
    ).problem


def run_case(
    attention: MLAPagedAttention,
    case: ProbeCase,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a planned case, written to `out` and `lse` if given."""
    result = attention.run(
        case.q_nope, case.q_pe, case.cache, ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale, out=out, lse=lse,
        return_lse=True, indices=case.indices,
    )  # fmt: skip
    assert isinstance(result, tuple)
    return result


def run_without_lse(attention: MLAPagedAttention, case: ProbeCase, out: torch.Tensor) -> None:
    """Output of a planned case of a backend that gives no LSE, or whose LSE is not asked for."""
    attention.run(
        case.q_nope, case.q_pe, case.cache, ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale, out=out,
        indices=case.indices,
    )  # fmt: skip
