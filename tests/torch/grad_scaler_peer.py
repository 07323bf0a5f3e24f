# SPDX-License-Identifier: Apache-2.0
"""PyTorch's GradScaler on a CPU, for grad_scaler_test.cpp.   usage: grad_scaler_peer.py FOLDER

Writes FOLDER/numbers: for each of 60 iterations the scale, the growth tracker and all parameters, as floats. Gradients of an iteration
are infinite or NaN as `bad` says. Writes FOLDER/python.state, the state_dict in the middle, and reads FOLDER/cpp.state, if there is one:
its numbers go to FOLDER/cpp.numbers."""
import os, sys

os.environ["OMP_NUM_THREADS"] = "1"
import torch

folder = sys.argv[1]


def bad(step):
    return {3: float("inf"), 4: float("nan"), 17: float("inf"), 18: float("inf"), 40: float("-inf")}.get(step)


def pattern(sizes, number, scale):
    i = torch.arange(torch.Size(sizes).numel())
    return ((i * i * 37 + i * 7919 + number * 104729).remainder(2001) - 1000).float().mul(scale / 1024).view(sizes)


weight = pattern([3, 5], 1, 0.25).requires_grad_()
bias = pattern([3], 2, 0.25).requires_grad_()
optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.03125}], lr=0.0625, momentum=0.875)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=5)
numbers = []
for step in range(60):
    optimizer.zero_grad()
    loss = torch.tanh(torch.nn.functional.linear(pattern([4, 5], 10 + step, 1), weight, bias)).square().mean()
    scaler.scale(loss).backward()
    if bad(step) is not None:
        weight.grad[1, 2] = bad(step)
    if step % 3 == 1:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight, bias], 0.25)
    scaler.step(optimizer)
    scaler.update(512.0 if step == 30 else None)
    numbers += [torch.tensor([scaler.get_scale(), scaler._get_growth_tracker()]), weight.detach().clone().view(-1), bias.detach().clone()]
    if step == 19:
        torch.save(scaler.state_dict(), f"{folder}/python.state")
torch.cat([n.float() for n in numbers]).numpy().tofile(f"{folder}/numbers")

if os.path.exists(f"{folder}/cpp.state"):
    state = torch.load(f"{folder}/cpp.state", weights_only=False)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(state)
    assert list(state) == ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"], list(state)
    torch.tensor([float(v) for v in other.state_dict().values()]).numpy().tofile(f"{folder}/cpp.numbers")
