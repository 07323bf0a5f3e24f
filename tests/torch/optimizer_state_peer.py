#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Python's side of optimizer_state_test.cpp: goes on from a state_dict, and writes what it has then.

usage: optimizer_state_peer.py STEPS FOLDER CASE...
FOLDER/CASE.pt has {"parameters": [...], "optimizer": state_dict}; FOLDER/CASE-after.pt has the same after STEPS more.
"""
import sys

import torch

MAKE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0),
    "adam": lambda p: torch.optim.Adam(p, lr=1.0),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1.0),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1.0),
}


def gradient(parameter, step):
    i = torch.arange(parameter.numel(), dtype=torch.float).view(parameter.shape)
    return parameter.detach() * 0.25 + torch.remainder(i * 5 + step * 3, 7) * 0.0625 - 0.1875


def go_on(case, steps, read, write):
    saved = torch.load(read, weights_only=False)  # pickle_save notes the types of lists and dicts
    parameters = [torch.nn.Parameter(each.clone()) for each in saved["parameters"]]
    groups = saved["optimizer"]["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    assert numbers == list(range(len(parameters))), numbers
    optimizer = MAKE[case.split("_")[0]]([{"params": [parameters[i] for i in group["params"]]} for group in groups])
    # What a state_dict of Python's has, neither more nor less.
    for ours, theirs in zip(groups, optimizer.state_dict()["param_groups"]):
        assert list(ours) == list(theirs), (list(ours), list(theirs))
        for key in set(theirs) - {"params"}:
            same = isinstance(theirs[key], (int, float)) and isinstance(ours[key], (int, float))
            assert same or type(ours[key]) is type(theirs[key]), (key, ours[key], theirs[key])
    optimizer.load_state_dict(saved["optimizer"])
    for number, entries in saved["optimizer"]["state"].items():
        for name, value in entries.items():
            if name == "step":
                assert value.dtype == torch.double and value.shape == (), value
            else:
                assert value.shape == parameters[number].shape, (number, name)
    first = int(max((entries.get("step", 3) for entries in saved["optimizer"]["state"].values()), default=3))
    for step in range(first, first + steps):
        for parameter in parameters:
            parameter.grad = gradient(parameter, step)
        optimizer.step()
    torch.save({"parameters": [each.detach() for each in parameters], "optimizer": optimizer.state_dict()}, write)


steps, folder, *cases = sys.argv[1:]
for case in cases:
    go_on(case, int(steps), f"{folder}/{case}.pt", f"{folder}/{case}-after.pt")
