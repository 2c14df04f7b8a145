"""uncast as the attention backend of other engines: `sglang/` and `vllm/`; they import neither models nor engine."""
