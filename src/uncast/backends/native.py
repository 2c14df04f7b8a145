"""`native`: the project's own GPU kernels. The cache is read as it is stored, in every path.

On Hopper the warp-specialised wgmma kernels run what they support, else the portable mma.sync kernels; dense and sparse
attention have a pair each.

FP8 values are exact in FP16, so over FP8 caches P is FP16, too, an eighth of BF16's error. Over a bf16 cache P is a sum of two
BF16 (`mma_launch.p_terms`), which leaves 2^-17 of it. Pieces of split contexts are merged from FP32 or FP16.
"""

from __future__ import annotations

import torch

from uncast.attention.backend import Capability
from uncast.attention.problem import Problem, ProblemError, ProblemSpec
from uncast.backends._write import FusedWriter
from uncast.kernels import mma_launch, sparse_launch, wgmma_launch, wgmma_sparse_launch
from uncast.kernels.launch import Call, is_aligned, make_call
from uncast.latent.codec import Scale

_Plan = mma_launch.MmaPlan | wgmma_launch.WgmmaPlan | sparse_launch.MmaSparsePlan | wgmma_sparse_launch.WgmmaSparsePlan


def _hopper_refusal(spec: ProblemSpec) -> str | None:
    return wgmma_sparse_launch.supports(spec) if spec.topk else wgmma_launch.supports(spec)


def _launch(plan: _Plan, call: Call, indices: torch.Tensor | None) -> None:
    if isinstance(plan, mma_launch.MmaPlan):
        mma_launch.launch(plan, call)
    elif isinstance(plan, wgmma_launch.WgmmaPlan):
        wgmma_launch.launch(plan, call)
    elif indices is None:
        raise ProblemError(f"no indices were given: the plan is for topk {plan.problem.spec.topk}")
    elif isinstance(plan, sparse_launch.MmaSparsePlan):
        sparse_launch.launch(plan, call, indices)
    else:
        wgmma_sparse_launch.launch(plan, call, indices)


class NativeBackend(FusedWriter):
    """Portable and Hopper kernels behind one plan.

    Args:
        kernel: "auto", "mma" (portable) or "wgmma" (Hopper); the latter two are for tests and benchmarks.
    """

    name = "native"
    requires = "triton"
    cuda_graph = True
    splits_alone = True

    def __init__(self, kernel: str = "auto") -> None:
        if kernel not in ("auto", "mma", "wgmma"):
            raise ProblemError(f"kernel is {kernel!r}: allowed are auto, mma and wgmma")
        self._kernel = kernel
        self._plan: _Plan | None = None

    def capability(self, spec: ProblemSpec) -> Capability:
        reason = _hopper_refusal(spec) if self._kernel == "wgmma" else mma_launch.supports(spec)
        return Capability.refused(reason) if reason else Capability.claimed()

    def plan(self, problem: Problem) -> None:
        device = problem.kv_len_arr.device
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._problem = problem
        self._dummy = torch.ones(1, dtype=torch.float32, device=device)
        if problem.batch_size == 0 or problem.total_q == 0:
            self._plan = None
            return
        hopper = self._kernel != "mma" and _hopper_refusal(problem.spec) is None
        with torch.cuda.device(device):
            if problem.spec.topk:
                self._plan = (wgmma_sparse_launch if hopper else sparse_launch).make_plan(problem, num_sms)
            else:
                self._plan = (wgmma_launch if hopper else mma_launch).make_plan(problem, num_sms)

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
        if self._plan is None:
            return
        if cache.data_ptr() % 16:
            raise ProblemError("the cache must start at a 16-byte boundary")
        target = out if is_aligned(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
        call = make_call(
            q_nope, q_pe, cache, target, lse,
            lse_base=self._problem.spec.lse_base, ckv_scale=ckv_scale, kpe_scale=kpe_scale, dummy=self._dummy,
        )  # fmt: skip
        with torch.cuda.device(cache.device):
            _launch(self._plan, call, indices)
        if target is not out:
            out.copy_(target)
