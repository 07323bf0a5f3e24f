# SPDX-License-Identifier: Apache-2.0
"""PyTorch's modules and a checkpoint of lockstep, for norm_test.cpp.   usage: norm_peer.py REFERENCE OURS THEIRS OUTPUTS

Loads OURS, a checkpoint of case 0 of REFERENCE, into nn.BatchNorm1d and nn.BatchNorm2d, and compares the outputs in evaluation.
Trains a step more, saves the module as THEIRS, and writes its outputs to OUTPUTS."""
import json, math, sys

import torch
from torch import nn

KINDS = {"F64": torch.float64, "I64": torch.int64}


def read(path):
    data = open(path, "rb").read()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = bytearray(data[8 + length :])
    return {
        name: torch.frombuffer(body[slice(*entry["data_offsets"])], dtype=KINDS[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
        if not name.startswith("lockstep/")
    }


def write(path, tensors):
    header, body = {}, b""
    for name, tensor in tensors.items():
        data = tensor.detach().reshape(-1).numpy().tobytes()
        kind = next(text for text, dtype in KINDS.items() if dtype == tensor.dtype)
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    open(path, "wb").write(len(text).to_bytes(8, "little") + text + body)


def wave(rows, columns, k):
    values = [math.sin(0.37 * i + k) for i in range(rows * columns)]
    return torch.tensor(values, dtype=torch.float64).reshape(rows, columns)


class Network(nn.Module):
    def __init__(self, inputs, hidden, out):
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.bn1 = nn.BatchNorm1d(hidden)
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, x):
        return self.fc2(torch.relu(self.bn1(self.fc1(x))))


case = json.load(open(sys.argv[1]))[0]
inputs, hidden, out = case["dims"]
state = read(sys.argv[2])
network = Network(inputs, hidden, out).double()
network.load_state_dict(state)  # strict: the same names and shapes, none missing, none too many
kept = network.state_dict()
for name, tensor in state.items():
    assert kept[name].dtype == tensor.dtype and torch.equal(kept[name], tensor), name
images = nn.BatchNorm2d(hidden).double()
images.load_state_dict({name[len("bn1.") :]: tensor for name, tensor in state.items() if name.startswith("bn1.")})
assert images.num_batches_tracked.item() == case["num_batches_tracked"]


def evaluate():
    network.eval()
    with torch.no_grad():
        count = len(case["eval_outputs"]) // out // case["batch"]
        return torch.cat([network(wave(case["batch"], inputs, 100 + 10 * case["eval_batch_step"] + r)) for r in range(count)])


want = torch.tensor(case["eval_outputs"], dtype=torch.float64).reshape(-1, out)
worst = (evaluate() - want).abs().max().item()
assert worst < 1e-9, f"outputs in evaluation are off by {worst}"

network.train()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
x = torch.cat([wave(case["batch"], inputs, 7 + r) for r in range(case["world"])])
network(x).square().mean().backward()
optimizer.step()
write(sys.argv[3], network.state_dict())
with open(sys.argv[4], "w") as file:
    for value in evaluate().reshape(-1).tolist():
        print(value.hex(), file=file)
