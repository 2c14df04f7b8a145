"""What the adapters of FlashInfer's planned MLA wrapper (package `flashinfer-python`, 0.7.2) share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from uncast.attention import Refused
from uncast.attention.backend import Capability
from uncast.attention.problem import Problem, ProblemSpec
from uncast.backends._write import FusedWriter

WORKSPACE_BYTES = 128 * 2**20


class FlashInferBackend(FusedWriter):
    """Adapter of `flashinfer.mla.BatchMLAPagedAttentionWrapper` with one concrete kernel."""

    kernel: ClassVar[str]
    requires = "flashinfer-python"

    def __init__(self) -> None:
        import flashinfer.mla

        self._library: Any = flashinfer.mla
        self._workspace: torch.Tensor | None = None

    @classmethod
    def capability(cls, spec: ProblemSpec) -> Capability:
        reason = cls.refusal(spec)
        return Capability.refused(f"{cls.name} {reason}") if reason else Capability.claimed()

    @classmethod
    @abstractmethod
    def refusal(cls, spec: ProblemSpec) -> str | None:
        """Why the kernel cannot run `spec`: the rest of a sentence that begins with its name; None if it can."""

    def _plan_wrapper(self, problem: Problem, metadata: Any, **contract: Any) -> Any:
        """A planned wrapper; `contract`: its layouts, LSE mode and scale mode.

        Raises:
            Refused: the library refuses the lengths of this batch.
        """
        spec, fp8 = problem.spec, problem.spec.layout.is_fp8
        if self._workspace is None:  # zeros: some kernels keep counters in it
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=problem.kv_len_arr.device)
        wrapper = self._library.BatchMLAPagedAttentionWrapper(self._workspace, backend=self.kernel)
        arguments = {
            "num_heads": spec.num_heads, "head_dim_ckv": spec.head_dim_ckv, "head_dim_kpe": spec.head_dim_kpe,
            "page_size": spec.page_size, "causal": spec.causal, "sm_scale": float(spec.sm_scale),
            "q_data_type": spec.q_data_type, "kv_data_type": torch.float8_e4m3fn if fp8 else spec.q_data_type,
        }  # fmt: skip
        try:
            wrapper.plan(metadata=metadata, **(arguments | contract))
        except ValueError as error:
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            raise Refused(f"{self.name} cannot run this batch: {reason}; use native") from error
        return wrapper


def contiguous_or_new(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, or memory of its shape that a kernel with fixed strides can write."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
