"""Runs a checkpoint through SGLang's own `ModelRunner` (its model code, scheduler objects and pools) and saves the logits.

    python -m tests.integrations.sglang_model OUT K_SCALE ARGUMENTS...    (those of `sglang.benchmark.one_batch`)

A process of its own: SGLang's state is global. OUT gets the prompts and, per forward, its kind, logits and next tokens, and how
many layers went un-absorbed.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch


def _patch(out: str, k_scale: float) -> None:
    import sglang.benchmark.one_batch as bench
    import sglang.srt.mem_cache.kv_cache_configurator as configurator
    from sglang.srt.model_executor.model_runner import ModelRunner

    from uncast.integrations.sglang.attention import MLAForward

    saved: dict[str, Any] = {"prompts": [], "steps": [], "unabsorbed": 0}

    def keep(name: str) -> None:
        original = getattr(bench._TorchBenchRunner, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            saved["steps"].append((name, result[1].float().cpu(), result[0].cpu()))
            torch.save(saved, out)
            return result

        setattr(bench._TorchBenchRunner, name, wrapped)

    keep("extend")
    keep("decode")
    prepare = bench.prepare_inputs_for_correctness_test

    def prompts(*args: Any, **kwargs: Any) -> Any:
        result = prepare(*args, **kwargs)
        saved["prompts"] = [[int(i) for i in ids] for ids in result[0]]
        return result

    bench.prepare_inputs_for_correctness_test = prompts
    initialise = ModelRunner.init_attention_backends

    def with_scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        for module in self.model.modules():  # where a checkpoint's k_scale is loaded
            if getattr(module, "head_dim", 0) == 576 and hasattr(module, "k_scale"):
                module.k_scale = torch.tensor(k_scale, device=next(self.model.parameters()).device)
                module.k_scale_float = k_scale
        return initialise(self, *args, **kwargs)

    ModelRunner.init_attention_backends = with_scale
    dense = MLAForward._dense

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        saved["unabsorbed"] += 1
        return dense(self, *args, **kwargs)

    MLAForward._dense = counted  # type: ignore[method-assign]
    if not torch.cuda.is_available():  # SGLang refuses an FP8 MLA cache on a CPU, where it has no kernel for one
        configurator.current_platform = _NotCpu(configurator.current_platform)


class _NotCpu:
    """A platform that says it is none of a CPU."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def main() -> None:
    out, k_scale, arguments = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    from tests.integrations.sglang_kit import load_plugin

    load_plugin()
    import sglang.benchmark.one_batch as bench
    from sglang.srt.server_args import ServerArgs

    _patch(out, k_scale)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    bench.BenchArgs.add_cli_args(parser)
    args = parser.parse_args([*arguments, "--correctness-test"])
    bench.main(ServerArgs.from_cli_args(args), bench.BenchArgs.from_cli_args(args))


if __name__ == "__main__":
    main()
