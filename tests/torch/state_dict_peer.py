#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Python's side of state_dict_test.cpp: loads a file strictly, compares it, and writes another.

usage: state_dict_peer.py net|odd READ WRITE [model]   `model`: by save_model, which leaves tied names out
       state_dict_peer.py order SAMPLES WORLD SEED EPOCHS WRITE   what DistributedSampler draws
"""
import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.embed = nn.Embedding(5, 8)
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))


class Odd(Net):
    def __init__(self):
        super().__init__()
        self.small = nn.Parameter(torch.zeros(3, 2, dtype=torch.half))
        self.brain = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.zeros(4, 3, dtype=torch.double))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("bytes", torch.zeros(5, dtype=torch.uint8))
        self.register_buffer("waves", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def values(name, like):
    name = {"head.weight": "embed.weight"}.get(name, name)
    i = torch.arange(like.numel(), dtype=torch.double).view(like.shape)
    return i % 2 == 0 if like.dtype == torch.bool else (i * 0.25 + len(name)).to(like.dtype)


def exchange(kind, read, write, way="file"):
    from safetensors.torch import load_file, save_file, save_model

    model = {"net": Net, "odd": Odd}[kind]()
    tensors = load_file(read)
    if way == "checkpoint":  # with its optimizer, whose names are apart
        assert any(name.startswith("lockstep/state/") for name in tensors), tensors.keys()
        tensors = {name: tensor for name, tensor in tensors.items() if "/" not in name}
    model.load_state_dict(tensors)  # strict
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values(name, tensor)), f"{name}: {tensor}"
    with torch.no_grad():
        for tensor in list(model.parameters()) + list(model.buffers()):
            if tensor.dtype != torch.bool:
                tensor.mul_(2)
    if way == "model":
        save_model(model, write)
    else:
        save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, write)


def order(samples, world, seed, epochs, write):
    from torch.utils.data import DistributedSampler

    with open(write, "w") as out:
        for epoch in range(int(epochs)):
            for rank in range(int(world)):
                sampler = DistributedSampler(range(int(samples)), int(world), rank, shuffle=True, seed=int(seed))
                sampler.set_epoch(epoch)
                print(*sampler, file=out)


if sys.argv[1] == "order":
    order(*sys.argv[2:])
else:
    exchange(*sys.argv[1:])
