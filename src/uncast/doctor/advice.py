"""What to do about each kind of finding, and where the field discusses it."""

from __future__ import annotations

TITLES = {
    "pool_cast": "the whole KV pool is cast",
    "pool_copy": "the whole KV pool is copied",
    "table_cast": "a whole table is cast",
    "weight_cast": "a weight is cast in every step",
    "cast_round_trip": "values are cast there and back",
    "strided_copy": "strided tensors are copied per layer",
    "collective_copy": "copies around a collective",
    "padding_copy": "copies to pad a tensor",
    "device_copy": "device-to-device copies per layer",
    "host_sync": "the host waits for the GPU within a step",
    "launch_bound": "the GPU waits for launches",
    "host_bound": "the GPU waits for the host",
}
_ADVICE = {
    "pool_cast": "Attend with a kernel that reads the cache as it is stored (a native FP8 decode kernel), or gather the live "
    "pages and cast only those; check decode, extend, verify and draft, because each may take another path.",
    "pool_copy": "Pass the pool as it is with page indices; a copy of all pages grows with the pool, not with what is live.",
    "table_cast": "Cast the table once when it is built, or index its rows first and cast only those.",
    "weight_cast": "Store the weight in the dtype in which it is used; cast it once at load.",
    "cast_round_trip": "Keep one dtype between the two casts, or use a fused kernel that converts in registers.",
    "strided_copy": "Let the consumer read the strided view (pass strides), or write the producer's output in the layout that "
    "is needed; look for .contiguous(), .reshape() and .clone() in that function.",
    "collective_copy": "Let the producer write into the collective's registered buffer and read the result from it.",
    "padding_copy": "Allocate the tensor at its padded size once and write into a slice of it.",
    "device_copy": "Write the result where it is needed instead of copying it; look for copy_(), clone() and cat() there.",
    "host_sync": "Keep lengths and indices on the device, copy results back asynchronously, and remove .item(), .cpu() and "
    "torch.cuda.synchronize() from the step.",
    "launch_bound": "Capture the step in a CUDA graph, or fuse small kernels; judge without a profiler's stacks first, because "
    "they slow the CPU side.",
    "host_bound": "Time the step without a profiler first: tracing slows the host, a graph's launch most, so part of this may "
    "be the profiler's. Faster kernels do not shorten such a step: let the host prepare a step while the GPU runs the one "
    "before (overlapped or asynchronous scheduling), capture what is still launched around the graph, or serve more requests "
    "a step.",
}
_LINKS = {
    "pool_cast": (
        "https://github.com/sgl-project/sglang/issues/35291",
        "https://github.com/sgl-project/sglang/pull/35322",
        "https://github.com/sgl-project/sglang/pull/36087",
        "https://github.com/sgl-project/sglang/issues/30815",
    ),
    "table_cast": ("https://github.com/vllm-project/vllm/pull/42833",),
}


def advice_for(kind: str) -> str:
    return _ADVICE[kind]


def links_for(kind: str) -> list[str]:
    return list(_LINKS.get(kind, ()))
