"""`flashinfer_trtllm_gen`, `flashinfer_xqa`, `flashinfer_cutlass`: FlashInfer's kernels for Blackwell, through its planned MLA
wrapper (package `flashinfer-python`).

Contracts as its 0.7.2 sources state them (`flashinfer/mla/_batch_mla/_backends/`). All take packed rows, a dense block table
and one q_len a batch, and queries of the cache's dtype: over an FP8 cache they would round the queries, so only BF16 caches are
claimed here.

    trtllm-gen   sm_100, sm_103, sm_107   pages of 32, 64     heads 2^n    causal if q_len > 1   LSE base 2
    xqa          sm_120, sm_121           pages of 16 to 128  128 heads    q_len 1               no LSE
    cutlass      sm_10x, sm_11x           pages of 1 to 128   128 heads    q_len 1               no LSE, sm_scale 192**-0.5

P is BF16 in xqa (`storeOrderedXToShmBf16` in csrc/xqa/mla_sm120.cu) and cutlass (`smem_p` is of the queries' type in include/
flashinfer/attention/blackwell/kernel/sm100_fmha_mla_tma_warpspecialized.hpp) by their sources; trtllm-gen's kernels come as
binaries, and it is assumed of them. Pieces of a split context are BF16 in xqa (`PartialResult`) and trtllm-gen (`DtypePartialO`
in csrc/fmhaReduction.cu), FP32 in cutlass (`ptr_o_acc`).

A request of length 0 is given to them as one row of page 0 and overwritten afterwards: what they do with an empty one is not
part of their contracts.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from uncast.attention.problem import Problem, ProblemError, ProblemSpec
from uncast.backends._flashinfer import FlashInferBackend, contiguous_or_new
from uncast.backends._pages import block_table, clear_unseen, common_q_len, is_idle, unseen_rows
from uncast.latent.codec import Scale

TABLE_ROWS = 128
"""Block tables are as wide as whole groups of this many cache rows."""
CUTLASS_SM_SCALE = 192**-0.5
"""Built into the cutlass kernel: 128 un-absorbed and 64 rope channels."""


class DenseTableBackend(FlashInferBackend):
    """The adapters' common plan and run."""

    uniform_q_len = True
    bf16_probabilities = ("bf16",)
    archs: ClassVar[tuple[int, ...]]
    page_sizes: ClassVar[tuple[int, ...]]
    head_dims: ClassVar[tuple[tuple[int, int], ...]] = ((512, 64),)
    gives_lse: ClassVar[bool] = False

    @classmethod
    def refusal(cls, spec: ProblemSpec) -> str | None:
        if spec.device != "cuda" or spec.arch not in cls.archs:
            here = f"sm_{spec.arch}" if spec.device == "cuda" else spec.device
            return f"is built for {', '.join(f'sm_{arch}' for arch in cls.archs)}, not {here}"
        if spec.topk:
            return "attends to every row: sparse attention needs another backend"
        if spec.kv_layout != "bf16" or spec.q_data_type != torch.bfloat16:
            what = f"{str(spec.q_data_type).removeprefix('torch.')} queries over {spec.kv_layout}"
            return f"takes bfloat16 queries over a bf16 cache, not {what}"
        if spec.page_size not in cls.page_sizes:
            return f"reads pages of {', '.join(map(str, cls.page_sizes))} rows, not {spec.page_size}"
        if (spec.head_dim_ckv, spec.head_dim_kpe) not in cls.head_dims:
            return f"is not built for head dims {spec.head_dim_ckv}/{spec.head_dim_kpe}"
        if spec.batch_invariant:
            return "splits work over the whole batch, so a request's bits depend on it: leave batch_invariant off"
        if spec.return_lse and not cls.gives_lse:
            return "gives no LSE: leave return_lse off"
        return cls.shape_refusal(spec)

    @classmethod
    def shape_refusal(cls, spec: ProblemSpec) -> str | None:
        """`refusal` for heads, q_len and scale."""
        if spec.num_heads != 128:
            return f"takes 128 heads, not {spec.num_heads}"
        if spec.max_q_len > 1:
            return "takes one query a request, not more"
        return None

    def plan(self, problem: Problem) -> None:
        self._problem = problem
        common_q_len(problem, self.name)
        self._unseen, self._idle = unseen_rows(problem), is_idle(problem)
        if self._idle:
            return
        metadata = self._library.MLAPlanMetadata.dense(
            problem.qo_indptr, block_table(problem, TABLE_ROWS // problem.spec.page_size),
            problem.kv_len_arr.clamp_min(1),
        )  # fmt: skip
        self._wrapper = self._plan_wrapper(
            problem, metadata, query_layout="packed", kv_cache_layout="packed",
            lse_mode="base2" if self.gives_lse else "none", causal=problem.spec.causal and problem.spec.max_q_len > 1,
        )  # fmt: skip

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
        if lse is not None and not self.gives_lse:
            raise ProblemError(f"{self.name} gives no LSE: plan with return_lse=True, which finds a backend that does")
        if self._idle:
            clear_unseen(self._unseen, out, lse)
            return
        target = contiguous_or_new(out)
        base2 = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=out.device) if self.gives_lse else None
        self._wrapper.run(
            query=torch.cat([q_nope, q_pe], dim=-1), kv_cache=cache.view(torch.bfloat16), out=target, lse=base2,
            return_lse=base2 is not None,
        )  # fmt: skip
        if target is not out:
            out.copy_(target)
        if lse is not None and base2 is not None:
            lse.copy_(base2 if self._problem.spec.lse_base == "2" else base2 * math.log(2.0))
        clear_unseen(self._unseen, out, lse)


class FlashInferTrtllmGen(DenseTableBackend):
    """TensorRT-LLM's generated kernels."""

    name = "flashinfer_trtllm_gen"
    kernel = "trtllm-gen"
    bf16_partials = ("bf16",)
    archs = (100, 103, 107)
    page_sizes = (32, 64)
    head_dims = ((512, 64), (256, 64))
    gives_lse = True

    @classmethod
    def shape_refusal(cls, spec: ProblemSpec) -> str | None:
        if spec.num_heads & (spec.num_heads - 1):
            return f"takes a power of two of heads, since a CTA's heads must divide them, not {spec.num_heads}"
        if spec.max_q_len > 1 and not spec.causal:
            return "masks several queries a request causally only"
        return None


class FlashInferXqa(DenseTableBackend):
    """XQA's kernel for consumer and workstation Blackwell."""

    name = "flashinfer_xqa"
    kernel = "xqa"
    bf16_partials = ("bf16",)
    archs = (120, 121)
    page_sizes = (16, 32, 64, 128)


class FlashInferCutlass(DenseTableBackend):
    """CUTLASS's kernel; its softmax scale is fixed."""

    name = "flashinfer_cutlass"
    kernel = "cutlass"
    archs = (100, 103, 107, 110)
    page_sizes = (1, 2, 4, 8, 16, 32, 64, 128)

    @classmethod
    def shape_refusal(cls, spec: ProblemSpec) -> str | None:
        if not math.isclose(spec.sm_scale, CUTLASS_SM_SCALE, rel_tol=1e-5):
            return f"has the softmax scale 192**-0.5 built in, not {spec.sm_scale:.6g}"
        return super().shape_refusal(spec)
