"""The oracle against un-absorbed attention written from the paper, so that it is not its own witness."""

from __future__ import annotations

import math

import torch

from uncast.attention import MLAPagedAttention, ProblemSpec
from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.latent.codec import decode_rows
from uncast.verify.probe import make_case, plan_case


def test_oracle_equals_unabsorbed_attention_in_float64() -> None:
    heads, nope, value, kv_len, q_len = 3, 24, 40, 50, 4
    spec = ProblemSpec(
        num_heads=heads,
        kv_layout="fp8_e4m3",
        page_size=16,
        q_data_type=torch.float32,
        sm_scale=0.07,
        max_q_len=4,
        device="cpu",
    )
    case = make_case(spec, [kv_len], [q_len])
    generator = torch.Generator().manual_seed(3)
    w_uk = torch.randn(heads, nope, 512, dtype=torch.float64, generator=generator)
    w_uv = torch.randn(heads, value, 512, dtype=torch.float64, generator=generator)
    q = torch.randn(q_len, heads, nope, dtype=torch.float64, generator=generator)
    absorbed = torch.einsum("qhn,hnr->qhr", q, w_uk)

    attention = MLAPagedAttention("torch_cpu")
    problem = plan_case(attention, spec, case)
    latent, lse = mla_oracle(
        problem, absorbed, case.q_pe, case.cache, ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale
    )
    got = torch.einsum("qhr,hvr->qhv", latent, w_uv)

    rows = torch.cat([case.cache[page] for page in case.block_tables[0, :4].tolist()])[:kv_len]
    ckv, kpe = decode_rows(rows, spec.layout, ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale, dtype=torch.float64)
    keys = torch.cat([torch.einsum("tr,hnr->htn", ckv, w_uk), kpe.expand(heads, -1, -1)], dim=-1)
    values = torch.einsum("tr,hvr->htv", ckv, w_uv)
    query = torch.cat([q, case.q_pe.double()], dim=-1).transpose(0, 1)
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.07)
    assert relative_errors(got, expected.transpose(0, 1))[0] < 1e-12

    scores = (query @ keys.transpose(1, 2) * 0.07).masked_fill(~mask, -math.inf)
    assert float((lse.T - scores.logsumexp(-1) / math.log(2)).abs().max()) < 1e-12


def test_relative_errors_do_not_forgive_nan_or_a_nonzero_dead_row() -> None:
    reference = torch.zeros(2, 1, 4, dtype=torch.float64)
    reference[1] = 1.0
    good = reference.clone()
    assert relative_errors(good, reference) == (0.0, 0.0)
    good[0, 0, 0] = 1e-9
    assert relative_errors(good, reference)[0] == math.inf
    good[0, 0, 0], good[1, 0, 0] = 0.0, math.nan
    assert relative_errors(good, reference)[0] == math.inf
