"""Decodes with a vLLM engine in this process: GLM-4.7-Flash's layer shapes, random weights, one attention backend.

    python benchmarks/vllm_engine.py --backend default --kv-cache-dtype auto --reference logits.pt --csv engines.csv
    python benchmarks/vllm_engine.py --backend UNCAST --kv-cache-dtype fp8 --reference logits.pt --csv engines.csv

Needs vLLM and a GPU; run alone on the machine. The first run writes the logits of one decode step per batch to `--reference`;
later runs are compared with it. Every step's token is forced, so all runs see the same tokens.

ms_per_token: wall time of a step, the engine's host work included. gpu_ms_per_token: time in which any kernel ran, from CUPTI:
kernels that overlap (uncast's combine starts under its decode kernel) count once. The weights are seeded, the same in every
run, and large enough that attention is not uniform; vLLM's own dummy weights (1e-3) are not.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

COLUMNS = (
    "engine", "engine_version", "attention_backend", "kv_cache_dtype", "model", "batch", "context", "ms_per_token",
    "max_logit_diff", "gpu", "versions", "gpu_ms_per_token", "note",
)  # fmt: skip
VOCABULARY = 154880
FORCED_TOKEN = 17


def model_config(layers: int) -> dict[str, Any]:
    """GLM-4.7-Flash's shapes (transformers' `glm4_moe_lite`) with fewer layers."""
    return {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "torch_dtype": "bfloat16",
        "hidden_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 20, "num_key_value_heads": 20,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "intermediate_size": 10240, "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.8, "vocab_size": VOCABULARY, "max_position_embeddings": 202752, "rope_theta": 1e6,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
        "attention_bias": False, "eos_token_id": VOCABULARY - 1, "pad_token_id": VOCABULARY - 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
    }  # fmt: skip


def seeded_weights() -> None:
    """Makes vLLM's dummy loader draw matrices with std 0.03, norms 1 and biases 0, by the order of the modules."""
    from vllm.model_executor.model_loader import dummy_loader

    theirs, order = dummy_loader.initialize_single_dummy_weight, itertools.count()

    def fill(param: torch.Tensor, *args: Any, name: str = "", **kwargs: Any) -> None:
        if param.dim() >= 2 and param.dtype == torch.bfloat16:
            generator = torch.Generator(param.device).manual_seed(next(order))
            param.data.uniform_(-0.052, 0.052, generator=generator)
        elif param.dim() == 1 and torch.is_floating_point(param) and "scale" not in name:
            param.data.fill_(1.0 if name == "weight" else 0.0)
        else:
            theirs(param, *args, name=name, **kwargs)

    dummy_loader.initialize_single_dummy_weight = fill


def busy_ms(spans: Iterable[tuple[float, float]]) -> float:
    """Milliseconds covered by the union of spans (start, end) in microseconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


class Engine:
    """vLLM's engine in this process, and the logits of its last step."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        from vllm import LLM

        Path(folder, "config.json").write_text(json.dumps(model_config(args.layers)), encoding="utf-8")
        seeded_weights()
        llm = LLM(
            model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", seed=0,
            attention_backend=None if args.backend == "default" else args.backend, kv_cache_dtype=args.kv_cache_dtype,
            max_model_len=args.context + 128, max_num_seqs=max(args.batch), max_num_batched_tokens=8192,
            enable_prefix_caching=False, disable_log_stats=True,
            compilation_config={
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(args.batch)
            },
        )  # fmt: skip
        self.engine, self.context, self.steps = llm.llm_engine, args.context, args.steps
        runner = self.engine.model_executor.driver_worker.worker.model_runner
        layers = runner.vllm_config.compilation_config.static_forward_context.values()
        self.backend = next(layer.attn_backend.get_name() for layer in layers if hasattr(layer, "impl"))
        compute = runner.model.compute_logits
        self.logits: torch.Tensor | None = None

        def remember(*inputs: Any, **named: Any) -> Any:
            found = compute(*inputs, **named)
            self.logits = found if found is not None else self.logits
            return found

        runner.model.compute_logits = remember

    def fill(self, batch: int, tokens: int) -> None:
        """Prefills `batch` requests and decodes until each has two tokens."""
        from vllm import SamplingParams

        generator, have = torch.Generator().manual_seed(batch), dict[str, int]()
        for index in range(batch):
            ids = torch.randint(0, VOCABULARY - 1, (self.context - 64,), generator=generator).tolist()
            params = SamplingParams(
                temperature=0,
                max_tokens=tokens + batch,
                ignore_eos=True,
                allowed_token_ids=[FORCED_TOKEN],
                detokenize=False,
            )
            self.engine.add_request(f"{batch}-{index}", {"prompt_token_ids": ids}, params)
        while len(have) < batch or min(have.values()) < 2:
            have.update((out.request_id, len(out.outputs[0].token_ids)) for out in self.engine.step())

    def measure(self, batch: int) -> tuple[float, float, torch.Tensor]:
        """(wall ms, ms in kernels) of a decode step, and the logits of one, float32 on the CPU."""
        self.fill(batch, self.steps + 24)
        for _ in range(4):
            self.engine.step()
        torch.cuda.synchronize()
        assert self.logits is not None
        logits, walls = self.logits.float().cpu(), []
        for _ in range(self.steps):
            start = time.perf_counter()
            self.engine.step()
            torch.cuda.synchronize()
            walls.append(time.perf_counter() - start)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(8):
                self.engine.step()
            torch.cuda.synchronize()
        kernels = (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        busy = busy_ms((e.time_range.start, e.time_range.end) for e in kernels) / 8
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return statistics.median(walls) * 1e3, busy, logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="UNCAST", help="a name of vLLM's --attention-backend, or default")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--reference", type=Path, required=True, help="logits by batch: written if absent, else compared with"
    )
    parser.add_argument("--csv", type=Path, required=True, help="rows are appended")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's objects are looked into
    import vllm

    reference = torch.load(args.reference) if args.reference.exists() else {}
    known, rows = bool(reference), []
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(args, folder)
        for batch in args.batch:
            wall, busy, logits = engine.measure(batch)
            difference = float((logits - reference.setdefault(batch, logits)).abs().max())
            versions = f"torch {torch.__version__}, vllm {vllm.__version__}"
            model, gpu = f"GLM-4.7-Flash shapes, {args.layers} layers", torch.cuda.get_device_name()
            rows.append(
                ("vllm", vllm.__version__, engine.backend, args.kv_cache_dtype, model, batch, args.context, f"{wall:.3f}",
                 f"{difference:.5f}", gpu, versions, f"{busy:.3f}", "")
            )  # fmt: skip
            print(dict(zip(COLUMNS, rows[-1], strict=True)))
    if not known:
        torch.save(reference, args.reference)
    new = not args.csv.exists()
    with args.csv.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *rows] if new else rows)


if __name__ == "__main__":
    main()
