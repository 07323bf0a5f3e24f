# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user saves and loads: GPT-2's parameters at a width, with AdamW's states. Answers commands, a line
# each, so that it can take turns with others: `save torch FILE`, `load torch FILE`, and the like. Says seconds.
# usage: peers.py WIDTH cpu|cuda
import json
import os
import sys
import time

import torch
from torch import nn

width, device = int(sys.argv[1]), torch.device(sys.argv[2])
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what libraries print is no answer


def shapes(d):
    """GPT-2's tensors; bench/checkpoint/model.hpp has the same."""
    yield "wte", (50257, d)
    yield "wpe", (1024, d)
    for block in range(12):
        name = f"blocks.{block}."
        yield name + "ln_1.weight", (d,)
        yield name + "ln_1.bias", (d,)
        yield name + "attn.weight", (3 * d, d)
        yield name + "attn.bias", (3 * d,)
        yield name + "proj.weight", (d, d)
        yield name + "proj.bias", (d,)
        yield name + "ln_2.weight", (d,)
        yield name + "ln_2.bias", (d,)
        yield name + "up.weight", (4 * d, d)
        yield name + "up.bias", (4 * d,)
        yield name + "down.weight", (d, 4 * d)
        yield name + "down.bias", (d,)
    yield "ln_f.weight", (d,)
    yield "ln_f.bias", (d,)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in shapes(width):
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.randn(shape, device=device)))


model = Gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for p in model.parameters():
    p.grad = torch.full_like(p, 0.01)
optimizer.step()  # states are made
optimizer.zero_grad(set_to_none=True)


def synchronize():
    if device.type == "cuda":
        torch.cuda.synchronize()


def sync_file(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def everything():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "step": 1200}


def flat():
    """The same as one safetensors file has it: all tensors by name."""
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            tensors[f"{name}/{state}"] = optimizer.state[p][state]
    return tensors


def save_torch(path):
    torch.save(everything(), path)


def save_torch_synced(path):
    torch.save(everything(), path)
    sync_file(path)


def load_torch(path):
    torch.load(path, map_location=device)


def load_torch_into_job(path):
    read = torch.load(path, map_location=device)
    model.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])


def save_safetensors(path):
    from safetensors.torch import save_file
    save_file(flat(), path)


def save_safetensors_synced(path):
    save_safetensors(path)
    sync_file(path)


def load_safetensors(path):
    from safetensors.torch import load_file
    load_file(path, device=str(device))  # on a CPU it maps the file, and has read nothing yet


def load_safetensors_into_job(path):
    from safetensors.torch import load_file
    read = load_file(path, device=str(device))
    with torch.no_grad():
        for name, tensor in flat().items():
            tensor.copy_(read[name])


def copy_to_host(_):
    """What a step would wait for with an asynchronous save: the copy into pinned memory."""
    global pinned
    if device.type == "cuda":
        for name, tensor in flat().items():
            if name not in pinned:
                pinned[name] = torch.empty_like(tensor, device="cpu", pin_memory=True)
            pinned[name].copy_(tensor, non_blocking=True)


pinned = {}
commands = {f.__name__: f for f in (
    save_torch, save_torch_synced, load_torch, load_torch_into_job, save_safetensors, save_safetensors_synced,
    load_safetensors, load_safetensors_into_job, copy_to_host)}

has_safetensors = True
try:
    import safetensors
except ImportError:
    has_safetensors = False
answers.write(json.dumps({
    "torch": torch.__version__, "safetensors": safetensors.__version__ if has_safetensors else None,
    "parameters": sum(p.numel() for p in model.parameters())}) + "\n")
for line in sys.stdin:
    command, path = line.split(" ", 1)
    try:
        synchronize()
        begin = time.perf_counter()
        commands[command](path.rstrip("\n"))
        synchronize()
        answers.write(json.dumps({"seconds": time.perf_counter() - begin}) + "\n")
    except Exception as error:  # the benchmark goes on without this column
        answers.write(json.dumps({"error": str(error)}) + "\n")
