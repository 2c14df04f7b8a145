"""The plug-in of `sglang_server.py` in each process of its servers: random weights, forced tokens, times of decode steps."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from engine_models import FORCED_TOKEN, LOGIT_STEP, draw_weights, kernel_ms, replace

TRACED_STEPS = 8


class StepRecorder:
    """Times of a server's decode steps by batch size, and the logits of one; written to `folder` by `save`.

    A batch size's first run of more than `2 * LOGIT_STEP` steps is timed; in a later one `TRACED_STEPS` steps are traced.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launched: dict[int, list[float]] = {}
        self.busy: dict[int, float | None] = {}
        self._new_requests = self._timing = True
        self._again = 0
        self._profile: torch.profiler.profile | None = None

    def forward(self, original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """An AROUND hook of `ModelRunner.forward`."""
        if not batch.forward_mode.is_decode():
            result = original(runner, batch, *args, **kwargs)
            logits = getattr(result.logits_output, "next_token_logits", None)
            if logits is not None:
                logits[:, FORCED_TOKEN] = 1e4
            self._new_requests = True
            self.save()
            return result
        known = self.launched.get(batch.batch_size, [])
        if self._new_requests:
            self._again, self._timing = 0, len(known) <= 2 * LOGIT_STEP
            if self._timing:  # a health check's steps before, or none
                known = self.launched[batch.batch_size] = []
        self._new_requests = False
        if self._timing:
            known.append(time.perf_counter())
        else:
            self._trace(batch.batch_size)
        result = original(runner, batch, *args, **kwargs)
        logits = result.logits_output.next_token_logits
        if self._timing and len(known) == LOGIT_STEP:
            torch.save(logits[: batch.batch_size].float().cpu(), self.folder / f"logits-{batch.batch_size}.pt")
        logits[:, FORCED_TOKEN] = 1e4
        return result

    def _trace(self, size: int) -> None:
        """Before a step of a later run: traces `TRACED_STEPS` steps after the first `LOGIT_STEP`, once a batch size."""
        self._again += 1
        if self._again == LOGIT_STEP and size not in self.busy:
            torch.cuda.synchronize()
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
        elif self._profile is not None and self._again == LOGIT_STEP + TRACED_STEPS:
            torch.cuda.synchronize()
            self._profile.stop()
            self.busy[size] = kernel_ms(self._profile, TRACED_STEPS) or None  # without CUPTI there are no kernels
            self._profile = None

    def save(self) -> None:
        """Writes {batch: [ms between launches, ms in kernels or None, steps]} of the steps after the first `LOGIT_STEP`."""
        table = {}
        for size, launched in self.launched.items():
            walls = [(b - a) * 1e3 for a, b in itertools.pairwise(launched[LOGIT_STEP:])]
            if walls:
                table[size] = [statistics.median(walls), self.busy.get(size), len(walls)]
        if not table:
            return
        part = self.folder / "steps.part"
        part.write_text(json.dumps(table), encoding="utf-8")
        part.replace(self.folder / "steps.json")


def register() -> None:
    """SGLang's plug-in (entry point `sglang.srt.plugins`): random weights, forced tokens, recorded steps."""
    import sglang.srt.model_loader.loader as loader
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    replace(loader, "initialize_dummy_weights", draw_weights)
    recorder = StepRecorder(Path(os.environ["SGLANG_BENCH_FOLDER"]))
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward", recorder.forward, HookType.AROUND
    )
