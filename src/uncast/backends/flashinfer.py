"""`flashinfer_fa2`, `flashinfer_fa3`: FlashInfer's planned MLA wrapper (package `flashinfer-python`).

Contract as its 0.7.2 sources state it: BF16/FP16 cache of the query's dtype on sm_80 and newer (fa3: sm_90 only); e4m3 cache
with BF16 queries and per-tensor scales on sm_90 only. Scales are host floats there, so a device scale costs a sync. The
kernels multiply codes with the scale in BF16 (both are rounded; exact for scales that are powers of two), so over FP8 they
attend to rounded values and miss the default accuracy for other scales.

P has the type of the queries over both caches, BF16 (`convert_s_to_p` in include/flashinfer/attention/mla_hopper.cuh, `p_f16`
in mla.cuh). So have the pieces of a split context (`partial_o` is of the output's type in csrc/batch_mla_run.cu and
batch_mla_sm90_run.cu), which its scheduler cuts into 32 rows or more as a batch leaves multiprocessors idle.
"""

from __future__ import annotations

import torch

from uncast.attention.problem import Problem, ProblemSpec
from uncast.backends._flashinfer import WORKSPACE_BYTES, FlashInferBackend, contiguous_or_new
from uncast.backends._pages import clear_unseen, is_idle, tight_csr, unseen_rows
from uncast.latent.codec import Scale

__all__ = ["WORKSPACE_BYTES", "FlashInferFa2", "FlashInferFa3"]


class _FlashAttention(FlashInferBackend):
    """Both kernels: the same metadata and the same call."""

    rounds_fp8 = True
    bf16_probabilities = ("bf16", "fp8_e4m3")
    bf16_partials = ("bf16", "fp8_e4m3")

    @classmethod
    def refusal(cls, spec: ProblemSpec) -> str | None:
        return _refusal(spec, cls.kernel)

    def plan(self, problem: Problem) -> None:
        self._problem = problem
        self._unseen, self._idle = unseen_rows(problem), is_idle(problem)
        if self._idle:
            return
        indptr, indices = tight_csr(problem)
        self._wrapper = self._plan_wrapper(
            problem,
            self._library.MLAPlanMetadata.csr(problem.qo_indptr, indptr, indices, problem.kv_len_arr),
            query_layout="split",
            kv_cache_layout="split",
            lse_mode="base2" if problem.spec.lse_base == "2" else "basee",
            scale_mode="kv-per-tensor" if problem.spec.layout.is_fp8 else "default",
        )

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        *,
        ckv_scale: Scale,
        kpe_scale: Scale,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        indices: torch.Tensor | None = None,
    ) -> None:
        if self._idle:
            clear_unseen(self._unseen, out, lse)
            return
        spec = self._problem.spec
        fp8 = spec.layout.is_fp8
        typed = cache.view(torch.float8_e4m3fn if fp8 else spec.q_data_type)
        scales = {"ckv_scale": _host(ckv_scale), "kpe_scale": _host(kpe_scale)} if fp8 else {}
        # A base-e LSE is asked for by keyword; without one the planned base-2 values go to a buffer of our own.
        buffer = lse if lse is not None else torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
        target = contiguous_or_new(out)
        self._wrapper.run(
            query=(q_nope, q_pe),
            kv_cache=(typed[..., : spec.head_dim_ckv], typed[..., spec.head_dim_ckv :]),
            out=target,
            lse=buffer,
            return_lse=True,
            return_lse_base_on_e=spec.lse_base == "e",
            **scales,
        )
        if target is not out:
            out.copy_(target)
        clear_unseen(self._unseen, out, lse)


class FlashInferFa2(_FlashAttention):
    """The mma.sync kernel."""

    name = "flashinfer_fa2"
    kernel = "fa2"


class FlashInferFa3(_FlashAttention):
    """The Hopper kernel."""

    name = "flashinfer_fa3"
    kernel = "fa3"


def _host(scale: Scale) -> float:
    return 1.0 if scale is None else float(scale)


def _refusal(spec: ProblemSpec, kernel: str) -> str | None:
    if spec.device != "cuda":
        return f"runs on cuda, not on {spec.device}"
    if spec.q_data_type not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16 queries, not {spec.q_data_type}"
    if kernel == "fa3" and spec.arch != 90:
        return f"is built for sm_90, not sm_{spec.arch}"
    if spec.arch < 80:
        return f"needs compute capability 8.0 or newer, not {spec.arch / 10}"
    if spec.kv_layout not in ("fp8_e4m3", "bf16"):
        return f"reads bf16 and fp8_e4m3 caches, not {spec.kv_layout}"
    if spec.kv_layout == "bf16" and spec.q_data_type != torch.bfloat16:
        return "takes queries of the cache's dtype, bfloat16"
    if spec.kv_layout == "fp8_e4m3":
        if spec.arch != 90 or spec.q_data_type != torch.bfloat16:
            return f"reads fp8_e4m3 on sm_90 with bfloat16 queries only, not sm_{spec.arch} with {spec.q_data_type}"
        if (spec.head_dim_ckv, spec.head_dim_kpe) != (512, 64):
            return f"reads fp8_e4m3 rows of 512/64 only, not {spec.head_dim_ckv}/{spec.head_dim_kpe}"
    elif spec.head_dim_ckv % 128 or spec.head_dim_kpe % 64:
        return f"needs multiples of 128 and 64, not head dims {spec.head_dim_ckv}/{spec.head_dim_kpe}"
    if spec.topk:
        return f"attends to every row, and topk is {spec.topk}"
    if spec.batch_invariant:
        return "splits work over the whole batch, so a request's bits depend on it: leave batch_invariant off"
    if spec.causal and spec.max_q_len > 1 and 64 % spec.num_heads and spec.num_heads % 64:
        return f"refuses {spec.num_heads} heads with causal q_len > 1 depending on the KV length"
    return None
