# SPDX-License-Identifier: Apache-2.0
# GPT-2 124M under PyTorch in float32 and in bfloat16, and the program of gpt2.cu on the same weights and tokens, a text:
# gradients of the first ten steps, and losses of all, are about as near to those of float32 as PyTorch's own in bfloat16,
# on one rank and on two and four that share the batch.
#   gpt2.py PROGRAM [STEPS]         200 steps
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

program, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200
written = min(steps, 10)
windows, length, vocabulary, width, layers, heads = 4, 1024, 50257, 768, 12, 12


class Projection(nn.Module):  # Hugging Face's Conv1D: a row for each input
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.02)

    def forward(self, x):
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = Projection(width, 3 * width)
        self.c_proj = Projection(width, width)

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], heads, -1).transpose(1, 2) for t in self.c_attn(x).split(width, 2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = Projection(width, 4 * width)
        self.c_proj = Projection(4 * width, width)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(width), Attention(), nn.LayerNorm(width), Mlp()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        nn.init.normal_(self.wte.weight, 0, 0.02)
        nn.init.normal_(self.wpe.weight, 0, 0.02)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def save(path, tensors):
    header, begin = {}, 0
    for name, value in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [begin, begin + 4 * value.numel()]}
        begin += 4 * value.numel()
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in tensors.values():
            file.write(value.cpu().contiguous().numpy().tobytes())


def train(start, batches, is_bf16):
    model = Gpt2().cuda()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_bf16):
            scores = model(batch[:, :-1])
            loss = F.cross_entropy(scores.view(-1, vocabulary).float(), batch[:, 1:].reshape(-1))
        loss.backward()
        gradients = {name: value.grad.flatten() for name, value in model.named_parameters()}
        yield loss.item(), gradients if step < written else None
        optimizer.step()


torch.manual_seed(1)
torch.backends.cuda.matmul.allow_tf32 = False
folder = pathlib.Path(tempfile.mkdtemp(dir="/dev/shm"))
start = {name: value.cuda() for name, value in Gpt2().state_dict().items()}
for name in start:
    if ".ln_" in name or name.startswith("ln_f"):  # so that a mistake in them shows
        start[name] += 0.1 * torch.randn_like(start[name])
save(folder / "weights.safetensors", start)
# Pairs of bytes of a text that every machine with Python has.
text = b"".join(path.read_bytes() for path in sorted(pathlib.Path(json.__file__).parents[1].glob("*.py")))
count = steps * windows * (length + 1)
bytes_ = torch.frombuffer(bytearray(text * (2 * count // len(text) + 1)), dtype=torch.uint8)[:2 * count].long()
tokens = ((bytes_[::2] * 256 + bytes_[1::2]) % vocabulary).view(steps, windows, length + 1)
(folder / "tokens.bin").write_bytes(tokens.to(torch.uint16).numpy().tobytes())
batches = [batch.cuda() for batch in tokens]
exact, rounded = list(train(start, batches, False)), list(train(start, batches, True))
noise = max(abs(one - other) for (one, _), (other, _) in zip(exact, rounded))
start.clear()


def error(one, wanted):  # of a gradient
    return ((one - wanted).norm() / wanted.norm()).item()


def compare(ranks):
    result = subprocess.run([program, "steps", str(folder), str(windows), str(steps), str(written), str(ranks)])
    if result.returncode != 0:
        sys.exit(f"{program} ended with {result.returncode}")
    losses = [float(line) for line in (folder / "losses.txt").read_text().split()]
    names = [line.split() for line in (folder / "names.txt").read_text().splitlines()]
    right = True
    for step, ((loss32, wanted), (loss16, theirs)) in enumerate(zip(exact[:written], rounded)):
        raw = torch.frombuffer(bytearray((folder / f"gradients.{step}.bin").read_bytes()), dtype=torch.bfloat16).cuda()
        begin, errors = 0, []
        for name, count in names:
            ours = raw[begin:begin + int(count)].float()[:wanted[name].numel()]  # without the padding of the embedding
            begin += int(count)
            errors.append((error(ours, wanted[name]), error(theirs[name], wanted[name]), name))
        far, near = max(ours for ours, _, _ in errors), max(peer for _, peer, _ in errors)
        print(f"step {step}, {ranks} ranks: loss {losses[step]:.5f}, PyTorch's in float32 {loss32:.5f}, in bfloat16 {loss16:.5f}; "
              f"gradients: largest relative error {far:.4f} ({max(errors)[2]}), PyTorch's in bfloat16 {near:.4f}", flush=True)
        # The parameters of the first step are the same. Later ones have been rounded differently, step by step.
        right &= far <= (2 if step == 0 else 5) * near
    differ = max(abs(ours - loss) for ours, (loss, _) in zip(losses, exact))
    print(f"{steps} steps, {ranks} ranks: losses differ from those in float32 by at most {differ:.5f}, PyTorch's in bfloat16 by "
          f"{noise:.5f}; the last is {losses[-1]:.4f}, in float32 {exact[-1][0]:.4f}", flush=True)
    return right and differ <= 2 * noise + 0.005


failed = not all([compare(ranks) for ranks in (1, 2, 4)])
for file in folder.iterdir():
    file.unlink()
folder.rmdir()
print("FAILED: these are not PyTorch's numbers" if failed else "ok parity")
sys.exit(failed)
