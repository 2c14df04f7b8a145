"""Trains `tiny-glm`: `python training/train_tiny_glm.py --data english-public-domain.txt.xz --out DIR`.

One GPU, bf16 autocast, AdamW. The learning rate warms up, stays flat until the held-out loss stops falling or 70 % of the
budget is spent, then falls linearly to zero. Weights are averaged (EMA); the average is what is scored, and the best-scored
one is written. Routing is balanced without an auxiliary loss: after each step the router's bias moves by a constant towards
the experts that got too few tokens (DeepSeek-V3 report, section 2.1.2).
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from batches import Batches
from chat import render
from checkpoint import to_hf
from data import prefix_ids
from evaluate import Score, generate, score, windows
from model import ModelConfig, MoE, TinyGlm
from prepare import prepare
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

SHARDS = 2
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
COLUMNS = (
    *("step", "tokens", "seconds", "lr", "train_loss", "train_mtp_loss"),
    *("val_loss", "val_bits_per_byte", "val_mtp_loss", "val_mtp_top1_acceptance", "max_expert_load"),
)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Schedule:
    """Warm-up, flat, linear decay. `spent` is in seconds or in steps, whichever bounds the run."""

    def __init__(self, budget: float, warmup_steps: int) -> None:
        self.budget, self.warmup_steps = budget, warmup_steps
        self.decay_from: float | None = None
        self.history: list[float] = []

    def observe(self, val_loss: float, spent: float) -> None:
        """Starts the decay once four scores in a row brought no better one."""
        self.history.append(val_loss)
        if self.decay_from is None and len(self.history) > 6 and min(self.history[-4:]) > min(self.history[:-4]) - 5e-4:
            self.decay_from = spent

    def factor(self, step: int, spent: float) -> float:
        """Multiplier of the peak learning rate; 0 ends the run."""
        if self.decay_from is None and spent >= 0.7 * self.budget:
            self.decay_from = spent
        if self.decay_from is None:
            return min(1.0, (step + 1) / self.warmup_steps)
        span = min(3 / 7 * self.decay_from, self.budget - self.decay_from)
        return max(0.0, 1.0 - (spent - self.decay_from) / max(span, 1e-9))


def head_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of hidden [B, S, D] against target [B, S]."""
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), target.flatten())


def losses(model: TinyGlm, batch: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """(next-token loss, MTP loss, loads [layers, experts]) of tokens [B, S + 2]."""
    tokens, following, after = batch[:, :-2], batch[:, 1:-1], batch[:, 2:]
    with torch.autocast(batch.device.type, torch.bfloat16):
        hidden, loads = model.hidden(tokens)
        mtp, mtp_load = model.mtp_hidden(hidden, following)
        weight = model.embed_tokens.to(hidden.dtype)
        return loss(hidden, weight, following), loss(mtp, weight, after), torch.stack([*loads, mtp_load])


def compiled(model: TinyGlm, batch: Tensor, enabled: bool) -> Loss:
    """Compiles every block and the head in place; keeps that only if loss and embedding gradient agree with eager ones."""
    if not enabled:
        return head_loss
    model.train()
    try:
        expected, direction = _probe(model, batch, head_loss)
        loss: Loss = torch.compile(head_loss)
        for block in model.blocks():
            block.compile()
        got, compiled_direction = _probe(model, batch, loss)
        cosine = F.cosine_similarity(direction.flatten(), compiled_direction.flatten(), dim=0).item()
        reason = f"loss {got:.4f} against {expected:.4f}, gradient cosine {cosine:.3f}"
        if abs(got - expected) < 0.01 * expected and cosine > 0.8:
            print(f"compiled: {reason}", flush=True)
            return loss
    except RuntimeError as error:  # torch's compiler errors derive from RuntimeError
        reason = f"{type(error).__name__}: {error}"
    print(f"training without torch.compile: {reason}", flush=True)
    for block in model.blocks():
        block._compiled_call_impl = None
    return head_loss


def _probe(model: TinyGlm, batch: Tensor, loss: Loss) -> tuple[float, Tensor]:
    """(loss, gradient of the embedding) of one batch; leaves no gradients behind."""
    main_loss, mtp_loss, _ = losses(model, batch, loss)
    torch.autograd.backward(main_loss + mtp_loss)
    assert model.embed_tokens.grad is not None
    gradient = model.embed_tokens.grad.clone()
    model.zero_grad(set_to_none=True)
    return main_loss.item(), gradient


def optimiser(model: TinyGlm, args: argparse.Namespace, fused: bool) -> torch.optim.AdamW:
    decayed = [
        p for n, p in model.named_parameters() if p.ndim >= 2 and n != "embed_tokens" and not n.endswith("router")
    ]
    rest = [p for n, p in model.named_parameters() if p.ndim < 2 or n == "embed_tokens" or n.endswith("router")]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)


@torch.no_grad()
def balance(moes: list[MoE], loads: Tensor, rate: float) -> None:
    """Moves each expert's selection bias by `rate` against its excess load."""
    for moe, load in zip(moes, loads, strict=True):
        moe.bias += rate * torch.sign(load.mean() - load)


@torch.no_grad()
def average(ema: TinyGlm, model: TinyGlm, decay: float) -> None:
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)
    torch._foreach_lerp_(list(ema.buffers()), list(model.buffers()), 1 - decay)


def write_master(model: TinyGlm, prepared: Path, out: Path) -> None:
    """bf16 weights in two shards (the router's bias fp32), config and tokenizer files."""
    tensors = {k: v if "correction_bias" in k else v.to(torch.bfloat16) for k, v in to_hf(model).items()}
    total = sum(t.nbytes for t in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    done = 0
    for name, t in tensors.items():
        shards[min(SHARDS - 1, done * SHARDS // total)][name] = t
        done += t.nbytes
    index: dict[str, str] = {}
    for n, shard in enumerate(shards):
        file = f"model-{n + 1:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    (out / "config.json").write_text(json.dumps(model.c.to_hf(), indent=1) + "\n")
    for name in FILES:
        if prepared != out:
            shutil.copy(prepared / name, out / name)


def samples(model: TinyGlm, tokenizer: Tokenizer) -> str:
    prompts = ["[gMASK]<sop>It was a fine morning, and", "[gMASK]<sop>The captain stood upon the deck"]
    prompts += [
        render([{"role": "user", "content": "The young lady looked out of the window."}], add_generation_prompt=True)
    ]
    ids = [tokenizer.encode(p, add_special_tokens=False).ids for p in prompts]
    texts = generate(model, ids, 120, 0.8, 0.95, 1, (0, 4))
    return "\n".join(f"--- {p!r}\n{tokenizer.decode(t)}" for p, t in zip(prompts, texts, strict=True))


class Trainer:
    """Model, its average, data and optimiser of one run."""

    def __init__(self, args: argparse.Namespace, prepared: Path) -> None:
        self.args, self.prepared = args, prepared
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(args.seed)
        self.tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
        config = ModelConfig(**{"vocab_size": self.tokenizer.get_vocab_size(), **json.loads(args.config)})
        self.prefix = prefix_ids(self.tokenizer)
        self.model = TinyGlm(config, args.dropout).to(self.device)
        self.ema = copy.deepcopy(self.model).eval()
        self.moes = [b.mlp for b in self.model.blocks() if isinstance(b.mlp, MoE)]
        self.batches = Batches(prepared, args.batch, args.seq_len, args.chat_share, self.prefix, args.seed, self.device)
        texts = np.split(np.load(prepared / "val.npy"), np.cumsum(np.load(prepared / "val_lengths.npy"))[:-1])
        self.val = torch.cat([windows(t, args.seq_len, self.prefix) for t in texts])
        self.val_bytes = int(json.loads((prepared / "meta.json").read_text())["val_bytes"])
        self.loss = compiled(self.model, self.batches.next(), self.device.type == "cuda" and not args.no_compile)
        self.opt = optimiser(self.model, args, fused=self.device.type == "cuda")
        self.schedule = Schedule(args.max_steps or args.minutes * 60, args.warmup)
        self.best = Score(float("inf"), 0.0, 0.0, 0.0)
        self.kept = self.ema.state_dict()
        print(f"{sum(p.numel() for p in self.model.parameters()):,} parameters, {self.device}", flush=True)

    def step(self, number: int, factor: float) -> tuple[Tensor, Tensor]:
        """One optimiser step; (next-token and MTP loss [2], loads [layers, experts]), both detached and on the device."""
        args = self.args
        self.model.train()
        for group in self.opt.param_groups:
            group["lr"] = factor * args.lr
        main_loss, mtp_loss, loads = losses(self.model, self.batches.next(), self.loss)
        mtp_weight = args.mtp_weight * (1.0 if self.schedule.decay_from is None else 1 / 3)
        torch.autograd.backward(main_loss + mtp_weight * mtp_loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        balance(self.moes, loads, args.bias_rate * factor)
        average(self.ema, self.model, min(args.ema, (number + 1) / (number + 10)))
        return torch.stack((main_loss.detach(), mtp_loss.detach())), loads

    def evaluate(self, spent: float) -> Score:
        """Scores the average, tells the schedule, keeps the best one (on disk once the learning rate decays)."""
        result = score(self.ema, self.val, self.val_bytes, len(self.prefix))
        self.schedule.observe(result.loss, spent)
        if result.loss < self.best.loss:
            self.best, self.kept = result, copy.deepcopy(self.ema.state_dict())
            if self.schedule.decay_from is not None:
                write_master(self.ema, self.prepared, self.args.out)
        return result

    def run(self) -> None:
        """Trains until the schedule ends, with one CSV row per evaluation, and writes the best average."""
        args = self.args
        began = time.monotonic()
        step, sums, loads = 0, torch.zeros(2, device=self.device), torch.zeros(1)
        with open(args.out / "log.csv", "w", newline="") as handle:
            log = csv.writer(handle)
            log.writerow(COLUMNS)
            while True:
                spent = step if args.max_steps else time.monotonic() - began
                factor = self.schedule.factor(step, spent)
                if step and (step % args.eval_every == 0 or factor == 0):
                    result = self.evaluate(spent)
                    means = (sums / ((step - 1) % args.eval_every + 1)).tolist()
                    row = [step, step * args.batch * args.seq_len, time.monotonic() - began, factor * args.lr, *means]
                    row += [*vars(result).values(), loads.max().item() * self.model.c.n_routed_experts]
                    shown = [f"{v:.5g}" if isinstance(v, float) else str(v) for v in row]
                    log.writerow(shown)
                    handle.flush()
                    print(" ".join(shown), flush=True)
                    sums.zero_()
                if factor == 0:
                    break
                both, loads = self.step(step, factor)
                sums += both
                step += 1
        self.ema.load_state_dict(self.kept)
        write_master(self.ema, self.prepared, args.out)
        print(f"best: {self.best}\n{samples(self.ema, self.tokenizer)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="the text file (.txt or .txt.xz)")
    source.add_argument("--prepared", type=Path, help="a folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.5, help="length of the run unless --max-steps is given")
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--chat-share", type=float, default=0.125)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--weight-decay", type=float, default=0.2)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--mtp-weight", type=float, default=0.3, help="until the decay; a third of it after")
    parser.add_argument("--bias-rate", type=float, default=1e-3)
    parser.add_argument("--ema", type=float, default=0.998)
    parser.add_argument("--eval-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--config", default="{}", help="JSON that overrides fields of ModelConfig")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    prepared = args.prepared or args.out
    if args.data:
        prepare(args.data, prepared, 4096, 16000, args.seed)
    Trainer(args, prepared).run()


if __name__ == "__main__":
    main()
