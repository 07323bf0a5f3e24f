#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Python's side of loop_checkpoint_test.cpp.

usage: loop_checkpoint_peer.py write FOLDER   four steps, then files of torch.save; three more steps, then after.pt
       loop_checkpoint_peer.py read FOLDER    goes on from here.safetensors for three steps, then after.pt
"""
import sys

import torch
from torch import nn

folder = sys.argv[2]
torch.manual_seed(3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)  # a bias before a norm has gradients of rounding errors
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.first(x))))


net = Net()
optimizer = torch.optim.AdamW([{"params": net.first.parameters(), "lr": 0.02}, {"params": [*net.norm.parameters(), *net.out.parameters()]}],
                              lr=0.01, amsgrad=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def train(first, last):
    for step in range(first, last):
        x = torch.arange(15, dtype=torch.float).view(5, 3).add(step).sin()
        loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


def read_training(path):
    """A checkpoint of lockstep's as the dictionary that torch.save would have got."""
    import json
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        read = json.loads(file.metadata()["training"])
        read["model"] = {}
        for name in file.keys():
            *inside, last = name.split("/")[1:] if name.startswith("lockstep/") else ("model", name)
            part = read
            for each in inside:
                part = part.setdefault(each, {})
            part[last] = file.get_tensor(name)
    state = read["optimizer"]["state"]
    read["optimizer"]["state"] = {int(number): state[number] for number in state}
    return read


if sys.argv[1] == "write":
    train(0, 4)
    usual = {"epoch": 4, "model_state_dict": net.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
             "best": torch.tensor(0.25), "args": {"lr": 0.1, "names": ["a", ("b", None)]}, "big": 1 << 80, "kind": type}
    torch.save(usual, folder + "/usual.pt")
    torch.save(usual, folder + "/protocol4.pt", pickle_protocol=4)
    torch.save(net.state_dict(), folder + "/plain.pt")
    torch.save({"module." + name: value for name, value in net.state_dict().items()}, folder + "/wrapped.pt")
    torch.save(net.state_dict(), folder + "/old.pt", _use_new_zipfile_serialization=False)
    torch.save({"turned": torch.arange(6).view(2, 3).t(), "half": torch.ones(2, dtype=torch.half), "brain": torch.ones(3, dtype=torch.bfloat16)[1:],
                "wide": torch.tensor([0, 1, 2], dtype=torch.uint16), "none": torch.zeros(0, 3), "parameter": net.out.bias, "flag": torch.tensor(True)},
               folder + "/tensors.pt")
    train(4, 7)
else:
    read = read_training(folder + "/here.safetensors")
    net.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    assert read["epoch"] == 4 and read["best"] == "inf" and read["name"] == "waves", read
    assert len(read["random"]) == 1 and read["random"]["0"]["cpu"].dtype == torch.uint8
    scheduler.last_epoch = read["scheduler"]["_step_count"] - 1
    train(4, 7)
torch.save(net.state_dict(), folder + "/after.pt")
