#!/usr/bin/env python3
"""What a user of PyTorch would train the same models with, at its fairest: the peer of `./dev bench gpu`.

Compute and residual stream in bf16, fp32 master weights, fused AdamW, gradients clipped to norm 1, cuDNN's
attention, torch.compile; DDP or FSDP2 on several GPUs (start it with torchrun). Random tokens, as for
Muster. Steps are timed by events of the device, without a synchronisation of the host between them.
Rank 0 prints one line of JSON: model, gpus, batch, seq, accum, parallel, how, ms (median step), tokens_per_s,
peak_mem_gib (of PyTorch's allocator, largest over ranks), loss_first, loss_last.

Models of Mamba-2 have the scan of mamba_ssm, whose sources have to be on PYTHONPATH (ssd.py).

With --chunked the head and the loss run over slices of the tokens and keep no whole logits, at some
time: the run to compare memory with.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics

import torch
import torch.distributed as dist
import torch.nn.attention
import torch.nn.functional as F
from torch import nn

BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Shape:
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int  # padded to a multiple of 64, as every fast training script does
    tied: bool = True

    @property
    def head_width(self):
        return self.hidden // self.heads


def mamba2(layers, hidden):
    return Shape("mamba2", layers, hidden, 0, 0, 0, 50304)


def gpt2(layers, hidden, heads):
    return Shape("gpt2", layers, hidden, heads, heads, 4 * hidden, 50304)


SHAPES = {
    "gpt2-124m": gpt2(12, 768, 12),
    "gpt2-350m": gpt2(24, 1024, 16),
    "gpt2-774m": gpt2(36, 1280, 20),
    "gpt2-1558m": gpt2(48, 1600, 25),
    "llama-1b": Shape("llama", 16, 2048, 32, 8, 8192, 128256),
    "llama-3b": Shape("llama", 28, 3072, 24, 8, 8192, 128256),
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 14336, 128256, tied=False),
    "mamba2-130m": mamba2(24, 768),
    "mamba2-370m": mamba2(48, 1024),
    "mamba2-780m": mamba2(48, 1536),
    "mamba2-1.3b": mamba2(48, 2048),
    "mamba2-2.7b": mamba2(64, 2560),
}


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


def rotary_tables(width, sequence, device):
    """Cosines and sines of [sequence, width]; both halves of a row are the same."""
    frequency = 500000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.arange(sequence, device=device, dtype=torch.float32)[:, None] * frequency.repeat(2)
    return angle.cos(), angle.sin()


def rotate(x, tables):
    """x [batch, heads, sequence, width]; pairs are (i, i + width / 2)."""
    cosine, sine = tables
    first, second = x.chunk(2, -1)
    return (x * cosine + torch.cat((-second, first), -1) * sine).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        gelu = shape.family == "gpt2"
        width, kv = shape.head_width, shape.kv_heads * shape.head_width
        self.sizes = (shape.heads * width, kv, kv)
        self.attention_norm = nn.LayerNorm(shape.hidden) if gelu else RmsNorm(shape.hidden)
        self.mlp_norm = nn.LayerNorm(shape.hidden) if gelu else RmsNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, sum(self.sizes), bias=gelu)
        self.attention_out = nn.Linear(shape.hidden, shape.hidden, bias=gelu)
        self.mlp_in = nn.Linear(shape.hidden, shape.ffn * (1 if gelu else 2), bias=gelu)
        self.mlp_out = nn.Linear(shape.ffn, shape.hidden, bias=gelu)

    def forward(self, x, tables):
        batch, sequence, hidden = x.shape
        q, k, v = (y.view(batch, sequence, -1, self.shape.head_width).transpose(1, 2)
                   for y in self.qkv(self.attention_norm(x)).split(self.sizes, -1))
        if tables is not None:
            q, k = rotate(q, tables), rotate(k, tables)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                           enable_gqa=self.shape.heads != self.shape.kv_heads)
        x = x + self.attention_out(y.transpose(1, 2).reshape(batch, sequence, hidden))
        y = self.mlp_in(self.mlp_norm(x))
        if tables is None:
            y = F.gelu(y, approximate="tanh")
        else:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        return x + self.mlp_out(y)


class Transformer(nn.Module):
    """Returns the loss, or what the head's input is where the loss is computed in slices."""

    def __init__(self, shape, sequence, whole_loss):
        super().__init__()
        self.shape, self.whole_loss = shape, whole_loss
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(sequence, shape.hidden) if shape.family == "gpt2" else None
        layer = Layer
        if shape.family == "mamba2":
            from mamba2 import MambaLayer as layer
        self.layers = nn.ModuleList(layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden) if self.positions else RmsNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        tables = None
        if self.positions is not None:
            x = x + self.positions.weight
        elif self.shape.family == "llama":
            tables = rotary_tables(self.shape.head_width, tokens.shape[1], tokens.device)
        x = x.to(BF16)  # autocast alone would leave the residual stream in fp32
        for layer in self.layers:
            x = layer(x, tables)
        x = self.norm(x).to(BF16)
        if not self.whole_loss:
            return x
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


@torch.compile
def slice_loss(logits, targets, tokens):
    """The slice's share of the mean loss, and that share's gradient by the logits."""
    logits = logits.float()
    log_sum = logits.logsumexp(-1, keepdim=True)
    loss = (log_sum - logits.gather(-1, targets[:, None])).sum() / tokens
    columns = torch.arange(logits.shape[-1], device=logits.device)
    gradient = (logits - log_sum).exp() - (columns == targets[:, None]).float()
    return loss, (gradient / tokens).to(BF16)


class SlicedLoss(torch.autograd.Function):
    """Head and loss over slices of the tokens; forward computes the gradients as it goes."""

    @staticmethod
    def forward(ctx, x, weight, targets):
        x_rows, targets, matrix = x.flatten(0, 1), targets.flatten(), weight.to(BF16)
        dx, dweight = torch.empty_like(x_rows), torch.zeros_like(weight)
        loss = torch.zeros((), device=x.device)
        slices = zip(x_rows.chunk(8), targets.chunk(8), dx.chunk(8))
        for rows, wanted, out in slices:
            share, dlogits = slice_loss(rows @ matrix.t(), wanted, targets.numel())
            loss += share
            torch.mm(dlogits, matrix, out=out)
            dweight += dlogits.t() @ rows
        ctx.save_for_backward(dx.view_as(x), dweight)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        dx, dweight = ctx.saved_tensors
        return dx * gradient, dweight * gradient, None


def initialise(model):
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.zeros_(parameter)
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm, RmsNorm)):
            nn.init.ones_(module.weight)


def build(options, device, world):
    shape = SHAPES[options.model]
    with torch.device("meta" if options.parallel == "fsdp" else device):
        model = Transformer(shape, options.seq, whole_loss=not options.chunked)
    if options.parallel == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
        for layer in model.layers:
            layer.compile()
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model.to_empty(device=device)
        initialise(model)
        return model, model.head.weight, contextlib.nullcontext
    initialise(model)
    weight = model.head.weight
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index], bucket_cap_mb=100,
                                                    gradient_as_bucket_view=True)
    return torch.compile(model), weight, lambda: torch.autocast("cuda", BF16)


def train(options, device, rank, world):
    model, head_weight, precision = build(options, device, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator(device=device).manual_seed(rank)
    batches = torch.randint(SHAPES[options.model].vocab - 64, (4, options.batch, options.seq + 1), device=device,
                            generator=generator)

    def step(index):
        total = 0
        for micro in range(options.accum):
            batch = batches[(index * options.accum + micro) % len(batches)]
            last = micro + 1 == options.accum
            hold = contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()
            with hold:
                with precision():
                    loss = model(batch[:, :-1], batch[:, 1:])
                if options.chunked:
                    loss = SlicedLoss.apply(loss, head_weight, batch[:, 1:])
                (loss / options.accum).backward()
            total = total + loss.detach() / options.accum
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    first = step(0).item()
    for index in range(1, 5):
        step(index)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(options.steps + 1)]
    marks[0].record()
    for index in range(options.steps):
        loss = step(5 + index)
        marks[index + 1].record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in zip(marks, marks[1:])]
    return times, first, loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples of a micro-batch on each GPU")
    parser.add_argument("--seq", type=int, required=True, help="tokens of a sample")
    parser.add_argument("--accum", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=20, help="timed steps, after five")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp", help="on several GPUs")
    parser.add_argument("--chunked", action="store_true", help="head and loss over slices of the tokens")
    options = parser.parse_args()
    if options.chunked and options.parallel == "fsdp":
        parser.error("--chunked reads the head's weight whole, which FSDP shards")

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        times, first, last = train(options, device, rank, world)
    peak = torch.tensor([torch.cuda.max_memory_allocated() / 2**30], device=device)
    if world > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    median = statistics.median(times)
    tokens = options.batch * options.seq * options.accum * world
    if rank == 0:
        print(json.dumps({
            "peer": f"PyTorch {torch.__version__}", "model": options.model, "gpus": world,
            "parallel": options.parallel, "batch": options.batch, "seq": options.seq, "accum": options.accum,
            "how": "chunked" if options.chunked else "", "ms": round(median, 3),
            "ms_least": round(min(times), 3), "ms_most": round(max(times), 3),
            "tokens_per_s": round(tokens / median * 1e3), "peak_mem_gib": round(peak.item(), 2),
            "loss_first": round(first, 4), "loss_last": round(last, 4)}), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
