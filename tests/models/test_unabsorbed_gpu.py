"""A step's chunks on a GPU: split by the decoder's rules, un-absorbed among absorbed ones, against the absorbed step.

A failure with agreeing kernels (`tests/backends`) means rows or pages of one request went to another.
"""

from __future__ import annotations

import pytest
import torch

from uncast.attention import MLAPagedAttention
from uncast.attention.oracle import relative_errors
from uncast.models.attend import absorbed, by_chunk
from uncast.models.config import ModelConfig
from uncast.models.decoder import MLAWeights
from uncast.models.unabsorbed import split_prefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::uncast.attention.ClaimedCapabilityWarning"),
]
CONFIG = ModelConfig.from_hf(
    {
        "model_type": "glm4_moe_lite", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 20,
        "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "intermediate_size": 64, "vocab_size": 64, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "moe_intermediate_size": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "max_position_embeddings": 8192,
    }
)  # fmt: skip


@pytest.mark.parametrize("layout", ["fp8_e4m3", "fp8_ds_mla", "bf16"])
def test_a_ragged_step(layout: str) -> None:
    lens = [(1, 900), (256, 256), (64, 256), (512, 1024), (1, 1)]
    generator = torch.Generator("cuda").manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    scales = (0.03, 0.05) if layout == "fp8_e4m3" else (None, None)
    tables = torch.randperm(5 * 16, generator=generator, device="cuda").int().view(5, 16)
    attention = MLAPagedAttention("native")
    ends = [0, *torch.tensor([q for q, _ in lens]).cumsum(0).tolist()]
    attention.plan(
        torch.tensor(ends, dtype=torch.int32, device="cuda"), block_tables=tables,
        seq_lens=torch.tensor([kv for _, kv in lens], dtype=torch.int32, device="cuda"), num_heads=20,
        sm_scale=CONFIG.sm_scale, kv_layout=layout, max_q_len=512, total_q=ends[-1],
    )  # fmt: skip
    cache = torch.full((80, 64, {"fp8_e4m3": 576, "fp8_ds_mla": 656, "bf16": 1152}[layout]), 0xFF, dtype=torch.uint8)
    cache = cache.cuda()
    for request, (_, kv_len) in enumerate(lens):
        slots = (tables[request].long()[:, None] * 64 + torch.arange(64, device="cuda")).view(-1)[:kv_len]
        attention.write(normal(kv_len, 512), normal(kv_len, 64), cache, slots, ckv_scale=scales[0], kpe_scale=scales[1])
    w_uk, w_uv, unused = normal(20, 192, 512) * 0.02, normal(20, 256, 512) * 0.02, normal(1)
    weights = MLAWeights(None, None, unused, unused, unused, w_uk, w_uv, unused)
    query = normal(ends[-1], 20, 256)
    q_nope, q_pe = query[..., :192], query[..., 192:]
    dense = absorbed(weights, q_nope, q_pe, cache, attention, scales)
    for mode, count in (("unabsorbed", 3), ("auto", None)):
        split = split_prefill(CONFIG, mode, attention)
        if count is None:
            assert split is None, "chunks this short are not worth their launches"
            continue
        assert split is not None and len(split.chunks) == count and split.rest is not None
        got = by_chunk(CONFIG, weights, q_nope, q_pe, cache, split, scales)
        # The absorbed step rounds queries and latent outputs to bf16, hence the wider bounds.
        errors = relative_errors(got, dense.double())
        assert errors[0] <= 3e-2 and errors[1] <= 6e-3, errors
    assert split_prefill(CONFIG, "absorbed", attention) is None
