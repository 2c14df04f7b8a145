"""A vLLM batch without vLLM's engine: builder, implementation, cache and metadata, on stand-ins or on vLLM's own modules."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations import vllm_standin
from uncast.attention.oracle import mla_oracle, relative_errors
from uncast.attention.problem import Problem, ProblemSpec
from uncast.verify.probe import MAX_LSE_ERROR, MAX_ROW_ERROR, MAX_TENSOR_ERROR

OURS = "uncast.integrations.vllm.backend"
BASE = "vllm.model_executor.layers.attention.mla_attention"
PAGE, RANK, ROPE, SCALE = 64, 512, 64, 0.0625
UNUSED = 2**31 - 1


def load(kind: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`uncast.integrations.vllm.backend` over stand-ins ("stand-in") or over vLLM's own modules ("vllm", else skipped)."""
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    if kind == "stand-in":
        for name, module in vllm_standin.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    else:
        try:
            importlib.import_module(BASE)
        except ImportError as error:
            pytest.skip(f"vLLM's modules do not import here: {error}")
    module = importlib.import_module(OURS)
    del sys.modules[OURS]  # the next test loads its own
    return module


def common(**values: Any) -> Any:
    """vLLM's CommonAttentionMetadata, or as much of it as the stand-in reads."""
    found = getattr(sys.modules["vllm.v1.attention.backend"], "CommonAttentionMetadata", SimpleNamespace)
    return found(**values)


def vllm_config(heads: int, kv_cache_dtype: str, drafts: int) -> Any:
    """The fields of a VllmConfig that builder and implementation read."""
    prefill = SimpleNamespace(get_name=lambda: "stand-in", prepare_metadata=lambda metadata: None)
    layer = SimpleNamespace(
        q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=128, qk_rope_head_dim=ROPE, v_head_dim=128, num_heads=heads,
        prefill_backend=SimpleNamespace(clone=lambda: prefill),
    )  # fmt: skip
    draft = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False, method="mtp")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, max_model_len=512, get_head_size=lambda: RANK + ROPE,
            get_num_attention_heads=lambda parallel: heads,
        ),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        cache_config=SimpleNamespace(block_size=PAGE, cache_dtype=kv_cache_dtype),
        attention_config=SimpleNamespace(use_prefill_query_quantization=False),
        speculative_config=draft if drafts else None,
        use_v2_model_runner=True,
    )  # fmt: skip


@dataclass
class Scene:
    """One layer and its cache; every byte that no row was written to is NaN, every unused block number out of range."""

    module: ModuleType
    builder: Any
    impl: Any
    layer: Any
    cache: torch.Tensor
    table: torch.Tensor
    kv_cache_dtype: str
    generator: torch.Generator
    kv_lens: list[int] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.cache.device

    @property
    def fp8(self) -> bool:
        return self.cache.dtype == torch.uint8

    def random(self, *shape: int, size: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=self.generator) * size
        return values.to(self.device, torch.bfloat16)

    def write(self, ckv: torch.Tensor, kpe: torch.Tensor, slots: torch.Tensor, skip_scale: bool = False) -> None:
        """As `MLAAttention.update_kv_cache` does."""
        self.impl.do_kv_cache_update(
            ckv, kpe[:, None], self.cache, slots, self.kv_cache_dtype, self.layer._k_scale, skip_scale
        )

    def fill(self, kv_lens: list[int], width: int) -> None:
        """Gives request b `kv_lens[b]` rows in pages of its own."""
        self.kv_lens = kv_lens
        pages = torch.randperm(self.cache.shape[0], generator=self.generator).tolist()
        self.table = torch.full((len(kv_lens), width), UNUSED, dtype=torch.int32)
        for row, length in enumerate(kv_lens):
            for page in range(-(-length // PAGE)):
                self.table[row, page] = pages.pop()
            token = torch.arange(length)
            slots = self.table[row, token // PAGE].long() * PAGE + token % PAGE
            self.write(self.random(length, RANK), self.random(length, ROPE), slots.to(self.device))
        self.table = self.table.to(self.device)

    def batch(self, q_lens: list[int], *, capture: bool = False, rows: int | None = None, **local: Any) -> Any:
        """vLLM's metadata of a batch: the last `q_lens[b]` of each request's rows are the call's own. `rows`: padded rows."""
        starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
        rows = int(starts[-1]) if rows is None else rows
        lens = torch.tensor(self.kv_lens, dtype=torch.int32)
        values = common(
            query_start_loc=starts.to(self.device), query_start_loc_cpu=starts, seq_lens=lens.to(self.device),
            num_reqs=len(q_lens), num_actual_tokens=rows, max_query_len=max(q_lens),
            max_seq_len=self.table.shape[1] * PAGE if capture else max(self.kv_lens), block_table_tensor=self.table,
            slot_mapping=torch.full((rows,), -1), causal=True, seq_lens_cpu_upper_bound=lens, **local,
        )  # fmt: skip
        return self.builder.build_for_cudagraph_capture(values) if capture else self.builder.build(0, values)

    def queries(self, rows: int, heads: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(q_nope, q_pe): the latter a strided part of a wider tensor, as vLLM splits it off."""
        heads = heads or self.impl.num_heads
        return self.random(rows, heads, RANK), self.random(rows, heads, 128 + ROPE)[..., 128:]

    def forward(self, q: Any, metadata: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache = self.cache.view(torch.float8_e4m3fn) if self.fp8 else self.cache
        return self.impl.forward_mqa(q, cache, metadata, self.layer)

    def oracle(
        self, q: tuple[torch.Tensor, torch.Tensor], q_lens: list[int], kv_lens: list[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and base-e LSE in float64, from this scene's own table and lengths, on the CPU."""
        q_nope, q_pe = (x.cpu() for x in q)
        table = self.table.cpu().contiguous()
        spec = ProblemSpec(
            num_heads=q_nope.shape[1], kv_layout="fp8_e4m3" if self.fp8 else "bf16", sm_scale=SCALE, device="cpu",
            max_q_len=max(q_lens), lse_base="e",
        )  # fmt: skip
        starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
        indptr = torch.arange(table.shape[0] + 1, dtype=torch.int32) * table.shape[1]
        lens = torch.tensor(self.kv_lens if kv_lens is None else kv_lens, dtype=torch.int32)
        problem = Problem(spec, starts, indptr, table.flatten(), lens, int(starts[-1]), int(lens.max()))
        scale = float(self.layer._k_scale) if self.fp8 else None
        return mla_oracle(problem, q_nope, q_pe, self.cache.cpu(), ckv_scale=scale, kpe_scale=scale)

    def check(self, q_lens: list[int], **how: Any) -> None:
        """Runs a batch of bf16 queries and asserts the design's tolerance."""
        metadata = self.batch(q_lens, **how)
        q = self.queries(sum(q_lens))
        out, lse = self.forward(q, metadata)
        expected, expected_lse = self.oracle(q, q_lens)
        assert out.dtype == torch.bfloat16 and out.is_contiguous() and out.shape == q[0].shape
        close(out, expected)
        if lse is not None:
            close_lse(lse, expected_lse)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    row_error, tensor_error = relative_errors(out.cpu(), expected)
    assert row_error <= MAX_ROW_ERROR and tensor_error <= MAX_TENSOR_ERROR, (row_error, tensor_error)


def close_lse(lse: torch.Tensor, expected: torch.Tensor) -> None:
    assert lse.dtype == torch.float32 and lse.shape == expected.shape
    dead = expected == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, dead)
    assert float((lse.cpu().double() - expected)[~dead].abs().max()) <= MAX_LSE_ERROR


def make_scene(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, *, heads: int = 4, kv_cache_dtype: str = "fp8", k_scale: float = 0.05,
    drafts: int = 0, blocks: int = 24, device: str = "cpu", seed: int = 0,
) -> Scene:  # fmt: skip
    config = vllm_config(heads, kv_cache_dtype, drafts)
    base = sys.modules[BASE]
    if hasattr(base, "get_current_vllm_config"):
        monkeypatch.setattr(base, "get_current_vllm_config", lambda: config)
    where = torch.device(device)
    builder = module.UncastMLABuilder(SimpleNamespace(block_size=PAGE), ["layer"], config, where)
    impl = module.UncastMLAImpl(**impl_arguments(heads=heads, kv_cache_dtype=kv_cache_dtype))
    fp8 = kv_cache_dtype.startswith("fp8")
    shape = (blocks, PAGE, RANK + ROPE)
    cache = (
        torch.full(shape, 0x7F, dtype=torch.uint8, device=where)
        if fp8
        else torch.full(shape, torch.nan, dtype=torch.bfloat16, device=where)
    )
    layer = SimpleNamespace(_k_scale=torch.tensor(k_scale, dtype=torch.float32, device=where))
    table = torch.empty(0, 0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    return Scene(module, builder, impl, layer, cache, table, kv_cache_dtype, generator)


def impl_arguments(*, heads: int = 4, kv_cache_dtype: str = "fp8", **other: Any) -> dict[str, Any]:
    """What `MLAAttention` passes to the implementation."""
    values = {
        "num_heads": heads, "head_size": RANK + ROPE, "scale": SCALE, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": kv_cache_dtype, "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "q_lora_rank": None, "kv_lora_rank": RANK, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": ROPE, "qk_head_dim": 128 + ROPE, "v_head_dim": 128, "kv_b_proj": None, "indexer": None,
    }  # fmt: skip
    return values | other
