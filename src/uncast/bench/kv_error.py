"""What a cache layout costs a model on given prompts, layer by layer, against the BF16 cache.

Prompts are run teacher-forced, a whole prompt in one step: a layer's rows are written and read back within it. For each layout:

    attention_error        layer l's inputs as in the BF16 run, only its own rows stored in the layout: |v' - v| / |v|
    attention_error_stack  every layer's rows stored in the layout, errors of earlier layers included
    kl                     only layer l's rows stored in the layout: KL(p_bf16 || p) of the next token, nats, mean of positions
    kl of the layout       every layer's rows stored in the layout

v are attention's values [n, heads, v_head_dim] before o_proj, norms over all tokens, heads and channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from uncast.bench.mixed_attention import Contender, LayerScales, MixedAttention
from uncast.engine.runner import ModelRunner
from uncast.engine.runner import Sequence as Tokens
from uncast.latent.codec import new_counters
from uncast.models.decoder import MLADecoder

REFERENCE = "bf16"
PAGE_SIZE = 64
LOGIT_ROWS = 256
"""Rows whose probabilities are held in float64 at once."""

Progress = Callable[[int, int], None]
"""Called with (forward passes done, forward passes in all)."""


class NotFinite(ValueError):
    """The model's logits are not finite with some layout; one sentence."""


@dataclass
class LayerError:
    """One layer of one contender; see the module for the errors. `kl` is None if it was not measured.

    Attributes:
        values: numbers stored in FP8; saturated, subnormal, nan: how many of them were each.
    """

    attention_error: float = 0.0
    attention_error_stack: float = 0.0
    kl: float | None = None
    values: int = 0
    saturated: int = 0
    subnormal: int = 0
    nan: int = 0


@dataclass
class ContenderError:
    """One contender over all prompts.

    Attributes:
        kl, kl_max: KL(p_bf16 || p) in nats, mean and largest over positions.
        top1_changed: share of positions whose likeliest token is another one.
        nll_change: mean change of -ln p of the prompt's own next token, nats.
    """

    contender: Contender
    row_bytes: int
    kl: float = 0.0
    kl_max: float = 0.0
    top1_changed: float = 0.0
    nll_change: float = 0.0
    layers: list[LayerError] = field(default_factory=list)


@dataclass
class _Square:
    """A squared norm of differences over one of the reference."""

    difference: float = 0.0
    reference: float = 0.0

    def add(self, values: torch.Tensor, reference: torch.Tensor) -> None:
        wide = reference.double()
        self.difference += float((values.double() - wide).square().sum())
        self.reference += float(wide.square().sum())

    @property
    def relative(self) -> float:
        return math.sqrt(self.difference / self.reference) if self.reference else 0.0


class KVErrorMeter:
    """Measures contenders of one model.

    Raises (when made):
        LayoutError, Refused, RunnerError: a layout cannot serve this model on this machine.
    """

    def __init__(self, model: MLADecoder, layouts: Sequence[str], *, max_tokens: int) -> None:
        """`max_tokens` is the length of the longest prompt; each layout is probed as the engine does at start."""
        pages = -(-max_tokens // PAGE_SIZE)
        self.model = model
        self.runner = ModelRunner(model, kv_layout=REFERENCE, num_pages=pages, page_size=PAGE_SIZE)
        runners = {name: _scratch_runner(model, name, pages) for name in dict.fromkeys(layouts)}
        self.row_bytes = {name: runner.pool.layout.row_bytes for name, runner in runners.items()}
        self.attention = MixedAttention(model, self.runner.attention, runners)
        self.runner.attention = self.attention

    def largest(self, prompts: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
        """Largest |ckv| and |kpe| of each layer over all prompts, for `calibrated`; what is not finite does not count."""
        found = [(0.0, 0.0)] * len(self.model.layers)

        def see(layer: int, ckv: torch.Tensor, kpe: torch.Tensor) -> None:
            found[layer] = max(found[layer][0], _amax(ckv)), max(found[layer][1], _amax(kpe))

        self.attention.on_rows = see
        for prompt in prompts:
            self._logits(prompt)
        self.attention.on_rows = None
        return found

    def measure(
        self,
        prompts: Sequence[Sequence[int]],
        contenders: Sequence[Contender],
        *,
        per_layer_kl: bool = True,
        progress: Progress | None = None,
    ) -> list[ContenderError]:
        """Errors of each contender over prompts of at least 2 tokens.

        Args:
            per_layer_kl: one forward pass per layer, contender and prompt.

        Raises:
            NotFinite: logits that are not finite.
        """
        depth = len(self.model.layers)
        sums = [_Sums(contender, depth) for contender in contenders]
        self.attention.counters = {c.name: torch.stack([new_counters(self.model.device)] * depth) for c in contenders}
        passes = len(prompts) * (1 + len(contenders) * (1 + (depth if per_layer_kl else 0)))
        done = 0
        for prompt in prompts:
            for _ in self._measure_prompt(prompt, sums, per_layer_kl):
                done += 1
                if progress is not None:
                    progress(done, passes)
        tokens = sum(map(len, prompts))
        config = self.model.config
        widths = {"fp8_ds_mla": config.kv_lora_rank, "fp8_e4m3": config.kv_lora_rank + config.qk_rope_head_dim}
        results = []
        for one in sums:
            layout, counters = one.contender.kv_layout, self.attention.counters[one.contender.name]
            results.append(one.result(self.row_bytes[layout], tokens * widths.get(layout, 0), counters.tolist()))
        return results

    def _measure_prompt(self, prompt: Sequence[int], sums: list[_Sums], per_layer_kl: bool) -> Iterator[None]:
        depth, attention = len(self.model.layers), self.attention
        values: list[torch.Tensor] = []
        by_name = {one.contender.name: one for one in sums}

        def isolated(layer: int, contender: Contender | None, found: torch.Tensor) -> None:
            if contender is None:
                values.append(found)
            else:
                by_name[contender.name].isolated[layer].add(found, values[layer])

        attention.beside, attention.on_values = [one.contender for one in sums], isolated
        reference = self._logits(prompt)
        attention.beside = []
        yield
        for one in sums:
            attention.assigned = [one.contender] * depth

            def stacked(layer: int, _: Contender | None, found: torch.Tensor, into: list[_Square] = one.stack) -> None:
                into[layer].add(found, values[layer])

            attention.on_values = stacked
            one.add(reference, self._logits(prompt), prompt)
            attention.on_values = None
            yield
            for layer in range(depth if per_layer_kl else 0):
                attention.assigned = [None] * depth
                attention.assigned[layer] = one.contender
                one.add_layer(layer, reference, self._logits(prompt))
                yield
        attention.assigned = [None] * depth

    def _logits(self, prompt: Sequence[int]) -> torch.Tensor:
        sequence = Tokens(list(prompt))
        self.runner.ensure_pages(sequence, len(prompt))
        try:
            return self.runner.step([(sequence, len(prompt))], every_token=True)
        finally:
            self.runner.free(sequence)


def calibrated(largest: Sequence[tuple[float, float]], headroom: float = 2.0) -> tuple[LayerScales, ...]:
    """Scales from `KVErrorMeter.largest`: the least power of two that keeps `headroom` times the largest value within 448.

    A power of two divides without rounding. e4m3 spans 18 binades, so a factor of two above what the prompts showed costs
    nothing but the last of its subnormals.
    """
    return tuple(LayerScales(_scale(ckv * headroom), _scale(kpe * headroom)) for ckv, kpe in largest)


def _scale(amax: float) -> float:
    return 2.0 ** math.ceil(math.log2(amax / 448.0)) if amax > 0.0 else 1.0


def _amax(rows: torch.Tensor) -> float:
    size = rows.detach().float().abs()
    return float(size.masked_fill(~size.isfinite(), 0.0).max())


def _scratch_runner(model: MLADecoder, name: str, pages: int) -> ModelRunner:
    """A runner whose pool is the scratch of one layer; making it probes the layout."""
    shallow = replace(model.config, num_layers=1)
    one_layer = MLADecoder(shallow, model.embed, model.layers[:1], model.final_norm, model.lm_head, prefill="absorbed")
    return ModelRunner(one_layer, kv_layout=name, num_pages=pages, page_size=PAGE_SIZE)


class _Sums:
    """Running sums of one contender."""

    def __init__(self, contender: Contender, depth: int) -> None:
        self.contender = contender
        self.isolated, self.stack = [_Square() for _ in range(depth)], [_Square() for _ in range(depth)]
        self.layer_kl: list[float | None] = [None] * depth
        self.kl = self.nll = self.kl_max = 0.0
        self.changed = self.positions = self.targets = 0

    def add(self, reference: torch.Tensor, logits: torch.Tensor, prompt: Sequence[int]) -> None:
        following = torch.tensor(prompt[1:], dtype=torch.int64, device=logits.device)
        for start, expected, found in self._pieces(reference, logits):
            divergence = (expected.exp() * (expected - found)).sum(-1)
            self.kl += float(divergence.sum())
            self.kl_max = max(self.kl_max, float(divergence.max()))
            self.changed += int((expected.argmax(-1) != found.argmax(-1)).sum())
            target = following[start : start + expected.shape[0]][:, None]
            rows = slice(0, target.shape[0])
            self.nll += float((expected[rows].gather(1, target) - found[rows].gather(1, target)).sum())
        self.positions += len(prompt)
        self.targets += len(prompt) - 1

    def add_layer(self, layer: int, reference: torch.Tensor, logits: torch.Tensor) -> None:
        total = sum(
            float((expected.exp() * (expected - found)).sum()) for _, expected, found in self._pieces(reference, logits)
        )
        self.layer_kl[layer] = (self.layer_kl[layer] or 0.0) + total

    def _pieces(
        self, reference: torch.Tensor, logits: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for start in range(0, logits.shape[0], LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            expected, found = reference[rows].double().log_softmax(-1), logits[rows].double().log_softmax(-1)
            if not (bool(expected.isfinite().all()) and bool(found.isfinite().all())):
                raise NotFinite(
                    f"the model's log-probabilities are not finite with {self.contender.name} or {REFERENCE}"
                )
            yield start, expected, found

    def result(self, row_bytes: int, values: int, counters: list[list[int]]) -> ContenderError:
        layers = [
            LayerError(
                isolated.relative,
                stack.relative,
                None if kl is None else max(0.0, kl / self.positions),
                values,
                *(counts if values else (0, 0, 0)),
            )
            for isolated, stack, kl, counts in zip(self.isolated, self.stack, self.layer_kl, counters, strict=True)
        ]
        return ContenderError(
            self.contender,
            row_bytes,
            max(0.0, self.kl / self.positions),
            self.kl_max,
            self.changed / self.positions,
            self.nll / max(1, self.targets),
            layers,
        )
