"""SGLang's tables that are keyed by backend name. They are filled when the backend is made: by then the modules are loaded.

| table                                        | effect of the entry                                                      |
|----------------------------------------------|--------------------------------------------------------------------------|
| `FORWARD_ABSORB_CORE_ATTENTION_BACKENDS`     | q and q_rope, k and k_rope come apart: no concatenation per layer        |
| `AttentionBackendRegistry`                   | long prefill goes un-absorbed, with a prefix in chunks; else absorbed    |
"""

from __future__ import annotations

from typing import Any

import torch

from uncast.integrations.sglang.ragged import supports

NAME = "uncast"


def open_gates(runner: Any) -> None:
    """Enters `NAME` in the tables of the DeepSeek model family; repeated calls change nothing."""
    from sglang.srt.models.deepseek_common import attention_backend_handler, utils

    if NAME not in utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)
    config = runner.model_config
    qk = config.qk_nope_head_dim + config.qk_rope_head_dim
    device = torch.device(runner.device)
    dense = supports(device, qk, config.v_head_dim, runner.dtype)
    handler = make_handler(attention_backend_handler, dense, prefix=device.type == "cuda")
    attention_backend_handler.AttentionBackendRegistry.register(NAME, handler)


def make_handler(module: Any, dense: bool, prefix: bool = True) -> Any:
    """The choice between SGLang's un-absorbed, chunked prefill and absorbed attention.

    Args:
        module: SGLang's `attention_backend_handler`. dense: whether `ragged_attention` takes the model's heads.
        prefix: whether SGLang reads a prefix through the pool's method, which knows the scale (elsewhere it reads raw rows).
    """

    def handle(attn: Any, forward_batch: Any) -> Any:
        method = module.AttnForwardMethod
        captured = module.is_in_tc_piecewise_cuda_graph() or module.is_in_breakable_cuda_graph()
        deterministic = module.get_exec().deterministic.enable_deterministic_inference
        if captured or deterministic or not dense or module.is_cp_active(forward_batch):
            return method.MLA
        if not forward_batch.forward_mode.is_extend_without_speculative():
            return method.MLA
        cached = sum(forward_batch.extend_prefix_lens_cpu or ())
        long = cached >= attn.chunked_prefix_cache_threshold and not attn.disable_chunked_prefix_cache
        return method.MHA_CHUNKED_KV if cached == 0 or (long and prefix) else method.MLA

    return handle


def add_draft_backends(
    original: Any, factory: Any, backend_name: str, backend_map: Any, *args: Any, **kwargs: Any
) -> Any:
    """An AROUND hook of `DraftBackendFactory._create_backend`, whose maps name the backends a draft may have.

    The map of a draft's decode steps is told apart by what else is in it: `stamps_children` marks it.
    """
    from uncast.integrations.sglang.backend import UncastAttentionBackend, UncastMultiStepDraft

    decode = kwargs.get("stamps_children", args[1] if len(args) > 1 else False)
    runner = factory.draft_model_runner

    def make() -> tuple[str, Any]:
        if decode:
            return NAME, UncastMultiStepDraft(runner, factory.topk, factory.speculative_num_steps)
        return NAME, UncastAttentionBackend(runner)

    return original(factory, backend_name, {**backend_map, NAME: make}, *args, **kwargs)
