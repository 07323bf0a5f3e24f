# SPDX-License-Identifier: Apache-2.0
"""Runs every pair of examples/from_pytorch and compares what Python and C++ print: the same words, and numbers within the pair's tolerance.

Python takes seconds to import torch, so this process does it once. Ranks are forked copies of it, with the environment that torchrun
gives them. One script is run by torchrun itself.

usage: compare.py FOLDER-OF-PROGRAMS
"""
import os
import pathlib
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback

import torch
import torch._dynamo  # what the first optimizer would import
import torch.distributed
import torch.distributed.optim
import torch.multiprocessing
import torch.nn.parallel
import torch.utils.data

try:
    import lmdb
except ModuleNotFoundError:
    lmdb = None

SECONDS = 300  # of one run, on a busy machine
programs = pathlib.Path(sys.argv[1]).resolve()
scripts = pathlib.Path(__file__).resolve().parents[2] / "examples" / "from_pytorch"
work = tempfile.TemporaryDirectory()
data = f"{work.name}/points.lmdb"
compared = 0


class Fails(Exception):
    pass


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def be_rank(script, arguments, environment, output):
    """In a forked process: the script as a program of its own, which ends the process."""
    status = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def forked(script, ranks, arguments):
    """What the ranks of a Python script print. With 0 ranks it is one process that no launcher has started."""
    environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outputs = [f"{work.name}/rank{rank}" for rank in range(max(ranks, 1))]
    running = {}
    for rank, output in enumerate(outputs):
        child = os.fork()
        if child == 0:
            be_rank(script, arguments, dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)) if ranks else {}, output)
        running[child] = rank
    end, failed = time.monotonic() + SECONDS, []
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            rank = running.pop(child)
            if status:
                failed.append(rank)
        if failed or time.monotonic() > end:
            for child in running:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise Fails(f"{script.name}: " + (f"rank {failed[0]} prints: " + pathlib.Path(outputs[failed[0]]).read_text() if failed else "no end"))
        if not child:
            time.sleep(0.02)
    return "".join(pathlib.Path(output).read_text() for output in outputs)


def output_of(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise Fails(f"{' '.join(str(word) for word in command)} ends with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def torchrun(ranks, *command):
    return output_of(pathlib.Path(sys.executable).with_name("torchrun"), "--nproc-per-node", ranks, "--master-port", free_port(), *command)


def spawned(script):
    """Of a script that starts its ranks itself."""
    os.environ["MASTER_PORT"] = str(free_port())
    try:
        return output_of(sys.executable, script)
    finally:
        del os.environ["MASTER_PORT"]


def figures(text):
    """The lines of a script, sorted: ranks may be overtaken by others. Launchers put a rank's number before each, and Gloo has lines of its own."""
    lines = [re.sub(r"^\[rank \d+\] ", "", line) for line in text.splitlines()]
    return sorted(line for line in lines if re.fullmatch(r"(\w+ )+-?[\d.]+(e[+-]\d+)?", line))


def compare(name, python, cpp, tolerance):
    """Every number within `tolerance`, of the larger of the two."""
    global compared
    left, right = figures(python), figures(cpp)
    if not left or len(left) != len(right):
        raise Fails(f"{name}: Python prints {len(left)} lines and C++ {len(right)}: {python}\n{cpp}")
    for number, (mine, other) in enumerate(zip(left, right), 1):
        a, b = mine.split(), other.split()
        x, y = float(a[-1]), float(b[-1])
        if a[:-1] != b[:-1] or not abs(x - y) <= tolerance * max(abs(x), abs(y)):
            raise Fails(f"{name}, line {number}: Python prints '{mine}' and C++ '{other}', which may differ by {tolerance:g} of the number")
        compared += 1


def pair(name, ranks, *arguments, tolerance=0):
    python = forked(scripts / f"{name}.py", ranks, arguments)
    compare(name, python, output_of(programs / name, "--ranks", max(ranks, 1), *arguments), tolerance)


def resumed(run):
    """Of a script that is run twice, and goes on where it was."""
    return run("--epochs", "3") + run("--epochs", "6", "--resume")


def write_points():
    x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([x, x.sum(1, keepdim=True)], 1)
    with lmdb.open(data, subdir=False, map_size=1 << 20) as file, file.begin(write=True) as records:
        for i, row in enumerate(rows):
            records.put(i.to_bytes(8, "big"), struct.pack("11f", *row.tolist()))


def compare_all():
    """Sums of two ranks are the same in any order, so that numbers of two ranks are equal. Four ranks and replicas are added in another order than in Python."""
    script = scripts / "minimal_ddp.py"
    launched = torchrun(2, script)
    compare("minimal_ddp", launched, output_of(programs / "minimal_ddp", "--ranks", 2), 0)
    compare("minimal_ddp by torchrun", launched, torchrun(2, "--no-python", programs / "minimal_ddp"), 0)
    compare("minimal_ddp_spawn", spawned(scripts / "minimal_ddp_spawn.py"), output_of(programs / "minimal_ddp_spawn"), 0)
    pair("dp_flag", 2)
    pair("dp_flag", 0, "--dp", tolerance=5e-6)
    # Adam's updates are computed in another order in C++ than in Python, in one process already.
    folder = ("--folder", work.name)
    compare("train", resumed(lambda *words: forked(scripts / "train.py", 2, (*words, *folder))),
            resumed(lambda *words: output_of(programs / "train", "--ranks", 2, *words, *folder)), 2e-5)
    # PyTorch's SyncBatchNorm has no code for CPUs: Python has the samples of both ranks in one process.
    compare("sync_batch_norm", forked(scripts / "sync_batch_norm.py", 0, []), output_of(programs / "sync_batch_norm", "--ranks", 2), 5e-6)
    pair("rl_seeds", 2, "--seed", "7")
    pair("log_loss", 2)
    if (programs / "groups").exists():
        pair("groups", 4, tolerance=2e-6)
        for ranks in (2, 4):
            pair("fully_shard", ranks, tolerance=1e-6)
    else:
        print("skipped: groups with their own backend and sharded parameters (no gloo/allreduce.h here)")
    if lmdb:
        write_points()
        pair("lmdb_leaders", 4, "--data", data, tolerance=2e-6)
    else:
        print("skipped: an LMDB that leaders read (Python has no module lmdb here)")


try:
    compare_all()
except (Fails, subprocess.TimeoutExpired) as problem:
    sys.exit(f"FAILED: {problem}")
print(f"{compared} numbers of PyTorch's scripts and lockstep's programs are the same, to rounding where sums have another order")
