"""The SGLang classes: `MLAForward` under SGLang's base class. Importing this module imports SGLang."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, maybe_create_verify_mask
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view
from sglang.srt.runtime_context import attention_backends, get_parallel

from uncast.integrations._common import EngineRefusal
from uncast.integrations.sglang import NAME
from uncast.integrations.sglang.attention import MLAForward, MultiStepDraft


class UncastAttentionBackend(MLAForward, AttentionBackend):  # type: ignore[misc]
    """`--attention-backend uncast`.

    Metadata comes from device tensors alone, so no copy of the lengths to the host is asked for.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, draft_step: int | None = None) -> None:
        parallel = get_parallel()
        if parallel.attn_dcp_size > 1:
            raise EngineRefusal("uncast does not split a context over GPUs: start with --dcp-size 1")
        heads = runner.model_config.num_attention_heads // parallel.attn_tp_size
        others = set() if runner.is_draft_worker else set(attention_backends()) - {NAME, None}
        super().__init__(runner, num_heads=heads, draft_step=draft_step, others=others)
        self.device = runner.device
        self._is_draft = bool(runner.is_draft_worker) or draft_step is not None
        self._verify_mask: VerifyMask | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        if self.num_draft_tokens:
            # A chain's mask is causal and read by nobody; SGLang still fills it, and without a buffer it sizes one by
            # the context.
            self._verify_mask = maybe_create_verify_mask(
                is_draft_runner=self._is_draft,
                skip_prefill=self._is_draft,
                max_bs=max_bs,
                max_context_len=self.max_context_len,
                num_draft_tokens=self.num_draft_tokens,
                device=self.device,
                is_read=False,
            )

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing here depends on the drafted tree: chains only."""

    def write_loc(self, forward_batch: Any) -> Any:
        return KVWriteLoc.for_batch(forward_batch)


class UncastMultiStepDraft(MultiStepDraft):
    """The draft's decode steps, as SGLang's factory makes them."""

    def __init__(self, runner: Any, topk: int, speculative_num_steps: int) -> None:
        steps = [UncastAttentionBackend(runner, draft_step=i) for i in range(speculative_num_steps - 1)]
        super().__init__(steps, topk, speculative_num_steps)

    def decode_view(self, forward_batch: Any) -> Any:
        return build_inner_fb_view(forward_batch, bs=forward_batch.batch_size, forward_mode=ForwardMode.DECODE)
