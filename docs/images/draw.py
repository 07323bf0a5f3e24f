#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the diagrams of the documents: `docs/images/draw.py` writes every SVG file beside itself.

The standard library is enough. `./x plot` runs this script, then bench/plot.py for the plots of measurements.
Every picture has a white background, so that it is readable on a dark page too.
"""
import pathlib
import re
import xml.sax.saxutils

INK, SOFT, LINE = "#1f2933", "#5f6c7b", "#9aa5b1"
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#3b6fb6", "#d9822b", "#3f8f5b", "#7a5aa6", "#c23b3b", "#dfe4ea"
PALE = {BLUE: "#dbe7f6", ORANGE: "#fbe7d0", GREEN: "#dcefe2", PURPLE: "#e8e0f3", RED: "#f9dcdc", GREY: "#f1f4f7"}
SANS, MONO = "DejaVu Sans, Verdana, sans-serif", "DejaVu Sans Mono, Menlo, Consolas, monospace"


def width_of(text, size, mono=False):
    """A generous estimate of how wide a line of text is."""
    return len(text) * size * (0.605 if mono else 0.58)


class Picture:
    def __init__(self, name, width, height, title):
        self.name, self.width, self.height = name, width, height
        self.parts = []
        self.rect(0, 0, width, height, fill="#ffffff", stroke="#d5dbe1", radius=8)
        if title:
            self.text(24, 32, title, size=16, bold=True)

    def rect(self, x, y, w, h, fill="none", stroke="none", radius=4, line=1.2, dash=""):
        dash = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius}" fill="{fill}" '
                          f'stroke="{stroke}" stroke-width="{line}"{dash}/>')

    def text(self, x, y, text, size=13, color=INK, anchor="start", bold=False, mono=False, italic=False):
        style = ' font-weight="600"' if bold else ""
        style += ' font-style="italic"' if italic else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-family="{MONO if mono else SANS}" font-size="{size}" '
                          f'fill="{color}" text-anchor="{anchor}"{style}>{xml.sax.saxutils.escape(text)}</text>')

    def lines(self, x, y, lines, step=18, **style):
        for i, line in enumerate(lines):
            self.text(x, y + i * step, line, **style)

    def box(self, x, y, w, h, label="", color=BLUE, size=12, mono=False, solid=False, second="", dash=""):
        """A labelled box. Its text must fit: a picture whose text runs over is not written."""
        for line in (label, second):
            if width_of(line, size, mono) > w + 6:
                raise SystemExit(f"{self.name}: '{line}' is wider than its box of {w}")
        self.rect(x, y, w, h, fill=color if solid else PALE[color], stroke=color if color != GREY else LINE, dash=dash)
        ink = "#ffffff" if solid else INK
        middle = y + h / 2 + size * 0.36
        if second:
            self.text(x + w / 2, middle - size * 0.65, label, size=size, color=ink, anchor="middle", mono=mono)
            self.text(x + w / 2, middle + size * 0.7, second, size=size, color=ink, anchor="middle", mono=mono)
        elif label:
            self.text(x + w / 2, middle, label, size=size, color=ink, anchor="middle", mono=mono)

    def circle(self, x, y, r, label, color, solid=True):
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{r:g}" fill="{color if solid else PALE[color]}" '
                          f'stroke="{color}" stroke-width="1.5"/>')
        self.text(x, y + 5, label, size=14, color="#ffffff" if solid else INK, anchor="middle", bold=True)

    def line(self, points, color=SOFT, width=1.4, dash="", arrow=False):
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = f' stroke-dasharray="{dash}"' if dash else ""
        head = f' marker-end="url(#arrow{color[1:]})"' if arrow else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dash}{head}/>')

    def arrow(self, *points, color=SOFT, width=1.4, dash=""):
        self.line(points, color, width, dash, arrow=True)

    def curve(self, a, b, bend, color=SOFT, width=1.4):
        """An arrow from a to b that leaves and arrives vertically."""
        (x0, y0), (x1, y1) = a, b
        self.parts.append(f'<path d="M{x0:g},{y0:g} C{x0:g},{y0 + bend:g} {x1:g},{y1 - bend:g} {x1:g},{y1:g}" fill="none" '
                          f'stroke="{color}" stroke-width="{width}" marker-end="url(#arrow{color[1:]})"/>')

    def hatch(self, x, y, w, h):
        self.rect(x, y, w, h, fill="url(#hatch)", stroke=LINE, radius=0)

    def save(self, folder):
        colors = (INK, SOFT, LINE, BLUE, ORANGE, GREEN, PURPLE, RED)
        heads = "".join(f'<marker id="arrow{c[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
                        f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{c}"/></marker>' for c in colors)
        hatch = ('<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
                 f'<rect width="6" height="6" fill="#ffffff"/><line x1="0" y1="0" x2="0" y2="6" stroke="{LINE}" '
                 'stroke-width="2"/></pattern>')
        (folder / self.name).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}">\n<defs>{heads}{hatch}</defs>\n' + "\n".join(self.parts) + "\n</svg>\n")


def step_timeline():
    p = Picture("step-timeline.svg", 900, 544, "One training step on two ranks")
    left, lane = 124, 34
    layers = (("fc3", ORANGE, 60), ("fc2", ORANGE, 110), ("fc1", ORANGE, 130))

    def forward_and_backward(y, start):
        """Draws a rank's forward and backward; returns where each layer's backward ends."""
        p.box(start, y, 150, lane, "forward", BLUE)
        x, ends = start + 154, []
        for name, color, w in layers:
            p.box(x, y, w, lane, name, color)
            x += w + 4
            ends.append(x - 4)
        return ends

    def time_axis(y):
        p.arrow((left, y), (876, y), color=LINE)
        p.text(876, y + 16, "time", size=11, color=SOFT, anchor="end")

    # Replicated: buckets travel during backward.
    p.text(24, 66, "Sharding<Replicated>", size=13, bold=True, mono=True)
    p.text(214, 66, "a bucket's all-reduce starts with its last gradient, while backward goes on", size=12, color=SOFT)
    ends = []
    for rank, start in ((0, left), (1, left + 16)):
        y = 84 + rank * 46
        p.text(24, y + 22, f"rank {rank}", bold=True)
        ends.append(forward_and_backward(y, start))
    y = 84 + 2 * 46
    p.text(24, y + 22, "reductions", bold=True)
    begins = [max(a, b) + 6 for a, b in zip(*ends)]
    lengths = (90, 112, 80)
    free, landed = 0, []
    for k, (begin, length) in enumerate(zip(begins, lengths)):
        begin = max(begin, free)
        p.box(begin, y, length, lane, f"bucket {k}", GREEN)
        p.line([(begins[k] - 6, 84 + 46 + lane), (begins[k] - 6, y - 3)], color=GREEN, dash="3 3")
        free = begin + length + 6
        landed.append(begin + length)
    first = ends[1][2] + 8
    for rank in (0, 1):
        x = first
        for k in range(3):
            x = max(x, landed[k] + 4)
            p.box(x, 84 + rank * 46, 40, lane, f"u{k}", PURPLE)
            x += 44
    p.text(24, y + lane + 26, "fc3, fc2, fc1: backward, last layer first. u0, u1, u2: the update of a bucket's parameters, when it has "
           "landed and backward is over", size=11.5, color=SOFT)
    time_axis(y + lane + 42)

    # HostShared: one pass after backward.
    top = 316
    p.text(24, top, "Sharding<HostShared>", size=13, bold=True, mono=True)
    p.text(214, top, "parameters lie once in memory that all ranks share; default on the CPU with Shm", size=12, color=SOFT)
    ends = []
    for rank, start in ((0, left), (1, left + 16)):
        y = top + 18 + rank * 46
        p.text(24, y + 22, f"rank {rank}", bold=True)
        ends.append(forward_and_backward(y, start)[2])
    meet = max(ends) + 12
    bottom = top + 18 + 46 + lane
    p.line([(meet, top + 10), (meet, bottom + 8)], color=RED, width=2, dash="5 4")
    p.text(meet, bottom + 24, "all gradients are there", size=11, color=RED, anchor="middle")
    for rank, half in ((0, "first half"), (1, "second half")):
        p.box(meet + 10, top + 18 + rank * 46, 176, lane, "average and update,", GREEN, size=11, second=half + " of all elements")
    done = meet + 200
    p.line([(done, top + 10), (done, bottom + 8)], color=RED, width=2, dash="5 4")
    p.text(done, bottom + 24, "all parameters are new", size=11, color=RED, anchor="middle")
    p.lines(24, bottom + 54, (
        "Each rank reads its slice of every rank's gradients, averages it in registers and applies the optimizer to its slice of",
        "the parameters: one pass over memory, and every rank keeps the optimizer's states of its own slice only."),
        size=12, color=SOFT)
    time_axis(bottom + 90)
    return p


def bucket_layout():
    p = Picture("bucket-layout.svg", 900, 430, "From declarations to buckets")
    p.text(24, 56, "Declared in forward order (an MLP 784-1024-1024-10, float)", size=12, color=SOFT)
    tensors = (("fc1.weight", "3.1 MiB", BLUE), ("fc1.bias", "4 KiB", BLUE), ("fc2.weight", "4 MiB", ORANGE),
               ("fc2.bias", "4 KiB", ORANGE), ("fc3.weight", "40 KiB", GREEN), ("fc3.bias", "40 B", GREEN))
    centers = {}
    for i, (name, size, color) in enumerate(tensors):
        x = 24 + i * 144
        p.box(x, 70, 132, 44, name, color, size=12, mono=True, second=size)
        centers[name] = x + 66
    # The buckets, not to scale.
    y, h = 236, 58
    pieces = (("fc3.bias", 30, GREEN), (None, 26, None), ("fc3.weight", 110, GREEN), ("fc2.bias", 74, ORANGE),
              ("fc2.weight", 230, ORANGE))
    second = (("fc1.bias", 74, BLUE), ("fc1.weight", 256, BLUE))
    x, ticks = 36, []

    def lay(parts, x):
        for name, w, color in parts:
            if name is None:
                p.hatch(x, y, w, h)
            else:
                p.rect(x, y, w, h, fill=PALE[color], stroke=color, radius=0)
                if w > 60:
                    p.text(x + w / 2, y + h / 2 + 4, name, size=11 if w > 100 else 9.5, mono=True, anchor="middle")
                p.curve((centers[name], 116), (x + w / 2, y - 2), 70, color=color)
                ticks.append(x)
            x += w
        return x

    end0 = lay(pieces, x)
    start1 = end0 + 24
    end1 = lay(second, start1)
    for tick in ticks:
        p.line([(tick, y + h), (tick, y + h + 9)], color=INK)
    for begin, end, title, note in ((36, end0, "bucket 0: travels first", "closed when it has reached 1 MiB"),
                                    (start1, end1, "bucket 1", "would be closed at 25 MiB")):
        p.line([(begin, y + h + 24), (begin, y + h + 30), (end, y + h + 30), (end, y + h + 24)], color=SOFT)
        p.text((begin + end) / 2, y + h + 50, title, anchor="middle", bold=True)
        p.text((begin + end) / 2, y + h + 68, note, size=12, color=SOFT, anchor="middle")
    p.text(876, 204, "in memory,", size=12, color=SOFT, anchor="end")
    p.text(876, 220, "last layer first", size=12, color=SOFT, anchor="end")
    p.hatch(24, 394, 22, 14)
    p.text(54, 406, "padding: every tensor begins at a multiple of 256 bytes (ticks). Bars are not to scale.", size=12, color=SOFT)
    return p


def composition():
    p = Picture("composition.svg", 900, 500, "A job is a type: a model and one choice on every axis")
    cx, cy = 450, 231
    p.rect(cx - 92, cy - 40, 184, 80, fill=INK, stroke=INK, radius=10)
    p.text(cx, cy - 8, "your model", size=15, color="#ffffff", anchor="middle", bold=True)
    p.text(cx, cy + 16, "forward and backward", size=12, color="#ffffff", anchor="middle")
    slots = (("ParallelStrategy", (("DDP", 1), ("DP", 0)), 24, 78),
             ("Device", (("Cpu", 1), ("Cuda", 0)), 24, 192),
             ("World", (("4", 1), ("dynamic", 0)), 24, 306),
             ("Sampler", (("Padding", 1), ("DropLast, Exact, Masked", 0)), 612, 78),
             ("Optimizer", (("AdamW", 1), ("SGD, Adam, ...", 0)), 612, 192),
             ("Backend", (("Nccl", 2), ("Shm, Gloo, Hierarchical", 0)), 612, 306))
    for axis, choices, x, y in slots:
        p.rect(x, y, 264, 78, fill="#ffffff", stroke=LINE)
        p.text(x + 12, y + 22, axis + "<...>", size=13, mono=True, bold=True)
        at = x + 12
        for name, state in choices:
            w = width_of(name, 11, True) + 14
            p.box(at, y + 36, w, 28, name, (GREY, BLUE, RED)[state], size=11, mono=True)
            at += w + 8
        side = cx - 92 if x < cx else cx + 92
        edge = x + 264 if x < cx else x
        bad = axis == "Backend"
        p.line([(edge, y + 39), ((edge + side) / 2, y + 39), ((edge + side) / 2, cy), (side, cy)],
               color=RED if bad else BLUE, width=2 if bad else 1.6, dash="5 4" if bad else "")
    p.text(24, 412, "blue: chosen", size=12, color=BLUE, bold=True)
    p.text(134, 412, "grey: other choices; an axis that is not named has its default", size=12, color=SOFT)
    p.rect(24, 428, 852, 54, fill=PALE[RED], stroke=RED)
    p.lines(38, 450, ("error: static assertion failed: lockstep: Backend<Nccl> moves GPU memory and this is a CPU job;",
                      "add Device<Cuda>, or choose Backend<Shm> or Backend<Gloo>"), size=12, mono=True, step=20)
    return p


def grid():
    p = Picture("grid.svg", 760, 300, "Six ranks in groups of three, and across the groups")
    colors = (BLUE, ORANGE)
    for side, (title, note) in enumerate((("Grid<6, 3>", "2 groups of 3: each shares a batch"),
                                          ("transpose(Grid<6, 3>{})", "3 groups of 2: the first is that of the leaders"))):
        left = 60 + side * 360
        p.text(left - 20, 66, title, size=14, mono=True, bold=True)
        p.text(left - 20, 86, note, size=12, color=SOFT)
        if side == 0:
            for row in range(2):
                p.rect(left - 22, 106 + row * 84, 228, 64, fill=PALE[colors[row]], stroke=colors[row], radius=32)
        else:
            for column, color in enumerate((GREEN, PURPLE, RED)):
                p.rect(left + 12 + column * 80 - 32, 100, 64, 162, fill=PALE[color], stroke=color, radius=32)
        for rank in range(6):
            row, column = divmod(rank, 3)
            color = colors[row] if side == 0 else (GREEN, PURPLE, RED)[column]
            p.circle(left + 12 + column * 80, 138 + row * 84, 20, str(rank), color)
    p.text(24, 286, "[0 1 2] [3 4 5]", size=12, mono=True, color=SOFT)
    p.text(400, 286, "[0 3] [1 4] [2 5]", size=12, mono=True, color=SOFT)
    return p


def hierarchical():
    p = Picture("hierarchical.svg", 900, 470, "An all-reduce in Backend<Hierarchical<Shm, Gloo>>, two hosts of two ranks")
    stages = (("1", "reduce-scatter inside each host", "each rank adds up its half of the host's data"),
              ("2", "all-reduce between hosts", "ranks with the same place exchange their halves"),
              ("3", "gather inside each host", "ranks take the other half from their neighbour"))
    for s, (number, title, note) in enumerate(stages):
        top = 56 + s * 134
        p.circle(42, top + 50, 16, number, INK)
        p.text(72, top + 44, title, bold=True)
        p.text(72, top + 64, note, size=11, color=SOFT)
        for host in range(2):
            left = 400 + host * 250
            p.rect(left, top, 230, 112, fill="#fafbfc", stroke=LINE, radius=8)
            p.text(left + 10, top + 18, f"host {host}", size=11, color=SOFT)
            for rank in range(2):
                x, y = left + 12 + rank * 120, top + 28
                p.text(x + 43, y + 77, f"rank {2 * host + rank}", size=11, anchor="middle")
                for half in range(2):
                    label, color = (("own", GREY), ("host's sum", ORANGE) if half == rank else ("", GREY), ("sum of all", GREEN))[s]
                    p.box(x, y + half * 31, 86, 28, label, color, size=10)
            for half in range(2):
                if s == 1:
                    continue
                to_left = (half == 0) == (s == 0)  # a half goes to the rank that has it, and back
                ends = (left + 131, left + 100) if to_left else (left + 100, left + 131)
                p.arrow(*((x, top + 42 + half * 31) for x in ends), color=BLUE, width=1.6)
        if s == 1:
            p.line([(470, top + 27), (470, top - 9), (720, top - 9), (720, top + 27)], color=RED, width=2)
            p.line([(602, top + 88), (602, top + 121), (852, top + 121), (852, top + 88)], color=RED, width=2)
    p.line([(24, 456), (50, 456)], color=BLUE, width=2)
    p.text(58, 460, "through shared memory", size=11, color=SOFT)
    p.line([(230, 456), (256, 456)], color=RED, width=2)
    p.text(264, 460, "through the network: every byte crosses it once for each host, not once for each rank", size=11, color=SOFT)
    return p


def dp_and_ddp():
    p = Picture("dp-ddp.svg", 900, 400, "DP beside DDP, two replicas of one model")
    p.text(24, 66, "ParallelStrategy<DP>", mono=True, bold=True)
    p.text(24, 86, "one process; threads are replicas", size=12, color=SOFT)
    p.rect(24, 100, 408, 244, fill="#fafbfc", stroke=LINE, radius=8)
    p.text(36, 120, "process", size=11, color=SOFT)
    p.box(158, 112, 140, 34, "batch of 64", BLUE)
    for replica in range(2):
        x = 44 + replica * 200
        p.arrow((228, 148), (x + 84, 168), color=BLUE)
        p.box(x, 170, 168, 30, "32 samples", BLUE, size=11)
        p.box(x, 206, 168, 30, f"replica {replica}: forward", ORANGE, size=11)
        p.box(x, 240, 168, 30, "backward", ORANGE, size=11)
        p.arrow((x + 84, 272), (x + 84, 288), color=GREEN)
    p.box(44, 290, 368, 38, "average gradients, update; all replicas go on", GREEN, size=12)
    p.text(24, 372, "./job --replicas 2", mono=True, size=12)
    p.text(180, 372, "samples and step see the whole batch", size=12, color=SOFT)

    p.text(468, 66, "ParallelStrategy<DDP>", mono=True, bold=True)
    p.text(468, 86, "a process for each rank, on one host or many", size=12, color=SOFT)
    for rank in range(2):
        x = 468 + rank * 210
        p.rect(x, 100, 198, 244, fill="#fafbfc", stroke=LINE, radius=8)
        p.text(x + 12, 120, f"process of rank {rank}", size=11, color=SOFT)
        p.box(x + 14, 130, 170, 30, "a batch of 32, its own", BLUE, size=11)
        p.box(x + 14, 166, 170, 30, f"rank {rank}: forward", ORANGE, size=11)
        p.box(x + 14, 200, 170, 30, "backward", ORANGE, size=11)
        p.box(x + 14, 304, 170, 30, "update", PURPLE, size=11)
        for y in (232, 288):
            p.arrow((x + 99, y), (x + 99, y + 14), color=GREEN)
    p.box(482, 248, 380, 38, "average gradients, through Shm, Gloo or NCCL", GREEN, size=12)
    p.text(468, 372, "./job --ranks 2", mono=True, size=12)
    p.text(602, 372, "or torchrun, mpirun, srun", size=12, color=SOFT)
    return p


def sharding():
    p = Picture("sharding.svg", 900, 420, "What each of four ranks keeps, with AdamW")
    rows = ("parameters", "gradients", "states")
    ways = (("Replicated", (4, 4, 4)), ("HostShared", (0, 4, 1)), ("ZeroRedundancy", (4, 4, 1)),
            ("ZeRO, Gradients", (4, 1, 1)), ("FullyShard", (1, 1, 1)))
    for w, (name, whole) in enumerate(ways):
        x = 112 + w * 157
        p.text(x + 68, 66, name, mono=True, bold=True, size=12, anchor="middle")
        for r, row in enumerate(rows):
            y = 84 + r * 96
            if w == 0:
                p.text(24, y + 42, row, size=12)
            if whole[r] == 0:
                p.box(x, y, 136, 68, "once, for all", GREEN, size=12)
                continue
            for rank in range(4):
                p.rect(x + rank * 34, y, 30, 68, fill=PALE[GREY], stroke=LINE)
                part = 68 if whole[r] == 4 else 17
                top = y + (0 if whole[r] == 4 else 17 * rank)
                p.rect(x + rank * 34, top, 30, part, fill=PALE[BLUE], stroke=BLUE)
        for rank in range(4):
            if whole[0] != 0:
                p.text(x + rank * 34 + 15, 370, f"{rank}", size=11, color=SOFT, anchor="middle")
        if whole[0] == 0:
            p.text(x + 68, 370, "ranks of one host", size=11, color=SOFT, anchor="middle")
    p.text(24, 370, "rank", size=11, color=SOFT)
    p.text(24, 402, "FullyShard gathers the parameters of a unit while it computes: three units at a time, in a ring beside its slices.",
           size=12, color=SOFT)
    return p


def includes_of_folders():
    """Which folder of include/lockstep/detail includes which, from the headers themselves."""
    root = pathlib.Path(__file__).resolve().parents[2] / "include" / "lockstep" / "detail"
    edges = {}
    for header in root.rglob("*"):
        if header.suffix not in (".hpp", ".cuh", ".ipp"):
            continue
        folder = header.relative_to(root).parts[0]
        found = re.findall(r'^#include "lockstep/detail/(\w+)/', header.read_text(), flags=re.M)
        edges.setdefault(folder, set()).update(name for name in found if name != folder)
    return edges


def folders():
    edges = includes_of_folders()

    def reach(folder):
        return set().union(*({to} | reach(to) for to in edges[folder]))

    # An arrow that a longer way says as well is left out.
    direct = {f: {to for to in tos if not any(to in reach(other) for other in tos - {to})} for f, tos in edges.items()}
    level = {}

    def level_of(folder):
        if folder not in level:
            level[folder] = 1 + max((level_of(to) for to in edges[folder]), default=-1)
        return level[folder]

    rows = [sorted(f for f in edges if level_of(f) == i) for i in range(1 + max(map(level_of, edges)))]
    wide, high, gap = 130, 30, 62
    p = Picture("folders.svg", 24 * 2 + 5 * (wide + 40), 60 + len(rows) * gap + 20, "Folders of include/lockstep/detail, and what includes what")
    at = {}
    for i, row in enumerate(rows):
        y = 60 + (len(rows) - 1 - i) * gap
        for k, folder in enumerate(row):
            at[folder] = (p.width / 2 + (k - (len(row) - 1) / 2) * (wide + 40), y)
    for folder, tos in sorted(direct.items()):
        for to in sorted(tos):
            (x, y), (tx, ty) = at[folder], at[to]
            p.arrow((x + (tx - x) * 0.05, y + high), (tx - (tx - x) * 0.05, ty - 3), color=LINE)
    for folder, (x, y) in at.items():
        p.box(x - wide / 2, y, wide, high, folder + "/", BLUE, mono=True)
    return p


PICTURES = (step_timeline, bucket_layout, composition, grid, hierarchical, dp_and_ddp, sharding, folders)

if __name__ == "__main__":
    folder = pathlib.Path(__file__).resolve().parent
    for draw in PICTURES:
        draw().save(folder)
    print(f"{len(PICTURES)} diagrams in docs/images")
