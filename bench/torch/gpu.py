# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: DDP over NCCL on one GPU, a fused AdamW, a batch that lies on the GPU already.
#   gpu.py mlp
#   gpu.py gpt2 [WINDOWS [WAY...]]       16 windows of 1,024 tokens, all ways
# Prints microseconds a step for each way to run it; a way that fails says so on stderr and is left out.
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
sys.dont_write_bytecode = True
import ddp_ways  # before torch, which reads the environment

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ddp_ways.join_alone()
part = sys.argv[1]
windows = int(sys.argv[2]) if len(sys.argv) > 2 else 16
wanted = sys.argv[3:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.Linear(width, 3 * width)
        self.attn_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, 4 * width)
        self.mlp_proj = nn.Linear(4 * width, width)

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.attn(x).split(width, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)

    def forward(self, x):
        x = x + self.attn_proj(self.attend(self.ln_1(x)))
        return x + self.mlp_proj(F.gelu(self.mlp(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, vocabulary=50304, context=1024, layers=12, heads=12, width=768):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for name, value in self.named_parameters():
            if "ln_" not in name:
                nn.init.zeros_(value) if value.dim() == 1 else nn.init.normal_(value, 0, 0.02)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


if part == "mlp":
    x = torch.randn(64, 784, device="cuda")
    y = torch.randint(10, (64,), device="cuda")
    # New layers for each way: a parameter stays on the stream of its first backward pass.
    make_module = lambda: nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
    counts = {"eager": 200, "plain": 200, "graph": 2000, "compile": 200}
else:
    x, y = (torch.randint(50257, (windows, 1024), device="cuda") for _ in range(2))
    make_module = lambda: Gpt2().cuda()
    counts = {"eager": 10, "plain": 10, "graph": 10, "compile": 10}


def make(wrap=True, capturable=False, with_loss=False):
    module = WithLoss(make_module()) if with_loss else make_module()
    model = DistributedDataParallel(module, device_ids=[0], gradient_as_bucket_view=True) if wrap else module
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=capturable)


def loss_of(model, x, y, is_captured=False):
    if part == "mlp":
        return F.cross_entropy(model(x), y)
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=not is_captured):
        scores = model(x)
        return F.cross_entropy(scores.view(-1, scores.shape[-1]), y.view(-1))


def stepper(model, optimizer, gives_loss=False):
    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = model(x, y) if gives_loss else loss_of(model, x, y, torch.cuda.is_current_stream_capturing())
        loss.backward()
        optimizer.step()

    return step


def compiled():
    model, optimizer = make()
    return stepper(torch.compile(model), optimizer)


class WithLoss(nn.Module):
    """A module whose output is its loss, so that both are compiled together."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, y):
        return loss_of(self.module, x, y)


def compiled_with_loss():
    model, optimizer = make(with_loss=True)
    return stepper(torch.compile(model), optimizer, gives_loss=True)


ways = {
    "eager": (lambda: stepper(*make()), counts["eager"]),
    "plain": (lambda: stepper(*make(wrap=False)), counts["plain"]),
    "graph": (lambda: ddp_ways.captured(lambda: stepper(*make(capturable=True))), counts["graph"]),
    "compile": (compiled, counts["compile"]),
    "compile_loss": (compiled_with_loss, counts["compile"]),
}
ddp_ways.print_ways("step", {way: made for way, made in ways.items() if not wanted or way in wanted})
