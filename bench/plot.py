#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what benchmarks have measured, as SVG files under docs/images, and writes README's table of the same figures: `./x plot [FOLDER...]`.
`./x plot --compare BEFORE AFTER` draws two runs of the same benchmarks against each other, as AFTER/compared.svg.

A folder holds the JSON files that `./x bench` writes (build/bench unless others are named), the file `machine.txt` that it
writes beside them, and optionally fashion_mnist.jsonl, the log of the main example (`./x train --log FILE`). One folder is
one machine. A plot whose file is in no folder is left as it is.
"""
import json
import pathlib
import re
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

OWN, PEER, FLOOR, OTHER = "#3b6fb6", "#d9822b", "#8a949e", "#3f8f5b"
SHADES = ("#3b6fb6", "#9dbbe0", "#5b4a8a")
plt.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.family": "DejaVu Sans",
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e3e8ed",
    "axes.axisbelow": True, "figure.facecolor": "white", "savefig.facecolor": "white", "legend.frameon": False,
})
IMAGES = pathlib.Path(__file__).resolve().parent.parent / "docs" / "images"


class Machine:
    """One folder of results."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        named = self.folder / "machine.txt"
        self.name = named.read_text().strip() if named.exists() else "this machine"
        self.short = self.name.split()[-1]  # its processor or GPU

    def rows(self, name):
        """The rows of a benchmark, none where it was not run."""
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else []

    def find(self, name, text):
        """The row of a benchmark whose measure contains a text and whose peer was measured."""
        for row in self.rows(name):
            if text in row.get("measure", "") and row.get("peer") is not None and row.get("ratio") is not None:
                return row
        return None


def save(figure, name):
    figure.savefig(IMAGES / name, metadata={"Date": None}, bbox_inches="tight", pad_inches=0.15)
    plt.close(figure)
    print(f"docs/images/{name}")


def time_text(seconds):
    for unit, size in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def seconds_of(name, row, value):
    return value * (1 if "seconds" in row["measure"] else 1e-3 if name == "checkpoint" else 1e-6)


def ratio_text(ratio):
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


# What the overview and the plot of steps show: benchmark, a text in its measure, a label, the peer's name.
STEPS = (
    ("step", "Linear(10,1), batch 4, W=2 against PyTorch", "step of Linear(10, 1), 2 ranks", "PyTorch DDP + Gloo"),
    ("step", "MLP 784-256-256-10, batch 32, W=2 against PyTorch", "step of an MLP 784-256-256-10, 2 ranks", "PyTorch DDP + Gloo"),
    ("gpu", "SGD: graph against PyTorch DDP eager", "step of an MLP 784-512-512-10, GPU", "PyTorch DDP"),
    ("gpu", "SGD: graph against PyTorch DDP in a graph", "step of an MLP 784-512-512-10, one CUDA graph", "PyTorch DDP in a CUDA graph"),
)
OVERVIEW = (
    ("launch", "first step", "launch to first step, 2 ranks", "torchrun + Gloo"),
    ("allreduce", "25 MiB, W=2, us, against Gloo", "all-reduce of 25 MiB, 2 ranks", "Gloo"),
    ("allreduce", "25 MiB, W=8, us, against Gloo", "all-reduce of 25 MiB, 8 ranks", "Gloo"),
) + STEPS + (
    ("gpu", "fused AdamW against torch fused", "AdamW of 124 M parameters, GPU", "PyTorch fused"),
    ("zero", "Shm, ZeroRedundancy against PyTorch, zero", "step with sharded AdamW states, 2 ranks", "PyTorch's ZeroRedundancyOptimizer"),
    ("torch", ", W=2 against Python DDP + Gloo", "step of a LibTorch MLP, 2 ranks", "PyTorch DDP + Gloo"),
    ("checkpoint", "save against torch.save + fsync", "save a job's state to disk", "torch.save and fsync"),
    ("sampler", "list of 1 M", "shuffle of 1 M samples", "PyTorch"),
    ("loader", "npy, batch 64, 0 workers, us a batch, against PyTorch", "a batch of 64 images of a .npy file", "PyTorch's DataLoader"),
    ("allreduce", "25 MiB, W=8, us, against concurrent memcpy", "all-reduce of 25 MiB, 8 ranks", "memcpy by 8 processes"),
)


def overview(machines):
    """How many times as fast as its peer, on a logarithmic scale; every machine that has the row."""
    bars = []
    for name, text, label, peer in OVERVIEW:
        for m, machine in enumerate(machines):
            row = machine.find(name, text)
            if row:
                own, other = (seconds_of(name, row, row[which]) for which in ("lockstep", "peer"))
                bars.append((f"{label}, against {peer}", other / own, m, f"{time_text(own)} against {time_text(other)}"))
    if not bars:
        return
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.36 * len(bars)))
    labels = []
    for i, (label, ratio, m, times) in enumerate(bars):
        lost = ratio < 1
        axes.barh(i, ratio - 1, left=1, color="#c23b3b" if lost else SHADES[m % len(SHADES)], height=0.68)
        axes.text(max(ratio, 1) * 1.12, i, f"{ratio_text(ratio)} ({times})", va="center", fontsize=8.5, color="#1f2933")
        labels.append(label if i == 0 or label != bars[i - 1][0] else "")
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, 0.8 * min(b[1] for b in bars)), 200 * max(b[1] for b in bars))
    axes.axvline(1, color="#1f2933", linewidth=1)
    axes.set_yticks(range(len(bars)), labels, fontsize=8.5)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("times as fast as the peer (logarithmic; red: slower)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}x")
    used = sorted({b[2] for b in bars})
    handles = [plt.Rectangle((0, 0), 1, 1, color=SHADES[m % len(SHADES)]) for m in used]
    axes.legend(handles, [machines[m].name for m in used], loc="lower center", bbox_to_anchor=(0.3, 1.0), fontsize=8.5, ncols=1)
    save(figure, "bench-overview.svg")


# Rows of the overview that README leaves out.
LEFT_OUT = ("25 MiB, W=8, us, against Gloo", "PyTorch DDP eager", "fused AdamW", "torch.save", "list of 1 M")


def readme(machines):
    """The table of README and of docs/benchmarks.md: what the overview shows, from the first machine that has it, with the ratios
    of the others."""
    names = "; ".join(f"{machine.short}: {machine.name}" for machine in machines)
    lines = [f"| ({names}) | machine | lockstep | peer | ratio |", "|---|---|---|---|---|"]
    for name, text, label, peer in OVERVIEW:
        rows = [(machine, row) for machine in machines if (row := machine.find(name, text))]
        if not rows or any(part in text for part in LEFT_OUT):
            continue
        (machine, row), others = rows[0], [f"{m.short}: {ratio_text(r['peer'] / r['lockstep'])}" for m, r in rows[1:]]
        own, other = (seconds_of(name, row, row[which]) for which in ("lockstep", "peer"))
        lost = "lost: " if own > other else ""
        lines.append(f"| {lost}{label} | {machine.short} | {time_text(own)} | {peer} {time_text(other)} | {ratio_text(other / own)}{' (' + ', '.join(others) + ')' if others else ''} |")
    if len(lines) == 2:
        return
    root = IMAGES.parent.parent
    for page, before in ((root / "README.md", "## How fast"), (root / "docs" / "benchmarks.md", "README's rows:")):
        text, written = re.subn(rf"({before}\n\n)\|.*?(\n\n)", lambda m: m[1] + "\n".join(lines) + m[2], page.read_text(), count=1, flags=re.S)
        if not written:
            sys.exit(f"{page} has no table below '{before}'")
        page.write_text(text)
        print(page.relative_to(root))


def all_reduce_times(machines):
    """Microseconds of all-reduces by machine and world, then by who made them and how many bytes they had."""
    worlds = {}
    for m, machine in enumerate(machines):
        for row in machine.rows("allreduce"):
            found = re.fullmatch(r"(\d+) (KiB|MiB), W=(\d+), us, against (Gloo|concurrent memcpy)", row["measure"])
            if not found or row["lockstep"] is None:
                continue
            size = int(found[1]) * (1024 if found[2] == "KiB" else 1024 ** 2)
            lines = worlds.setdefault((m, int(found[3])), {"lockstep": {}, "Gloo": {}, "concurrent memcpy": {}})
            lines["lockstep"][size] = row["lockstep"]
            if row["peer"] is not None:
                lines[found[4]][size] = row["peer"]
    return worlds


def all_reduce(machines):
    """Time over size, for every world, against Gloo and against memcpy of as many bytes."""
    worlds = all_reduce_times(machines)
    if not worlds:
        return
    used = sorted({m for m, _ in worlds})
    columns = max(sum(1 for m, _ in worlds if m == machine) for machine in used)
    figure, grid = plt.subplots(len(used), columns, figsize=(3.3 * columns, 3.1 * len(used)), sharey=True, squeeze=False)
    for row, m in enumerate(used):
        for axes in grid[row]:
            axes.set_visible(False)
        for axes, (key, lines) in zip(grid[row], sorted((k, v) for k, v in worlds.items() if k[0] == m)):
            axes.set_visible(True)
            for name, color, label in (("Gloo", PEER, "Gloo"), ("lockstep", OWN, "lockstep"),
                                       ("concurrent memcpy", FLOOR, "memcpy of as many bytes")):
                points = sorted(lines[name].items())
                axes.plot([p[0] for p in points], [p[1] for p in points], color=color, label=label, marker="o", markersize=3,
                          linestyle="--" if name == "concurrent memcpy" else "-")
            axes.set_xscale("log", base=2)
            axes.set_xlim(2 ** 9.5, 2 ** 26.8)
            axes.set_yscale("log")
            axes.set_xticks([2 ** 10, 2 ** 15, 2 ** 20, 2 ** 26], ["1 KiB", "32 KiB", "1 MiB", "64 MiB"], fontsize=8)
            axes.set_title(f"{key[1]} ranks", fontsize=10)
        grid[row][0].set_ylabel(f"{machines[m].name}\nmicroseconds", fontsize=8.5)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    save(figure, "bench-allreduce.svg")


def ranks(machines):
    """Time over ranks: all-reduces of three sizes."""
    worlds = all_reduce_times(machines)
    sizes = [size for size in (1024, 1024 ** 2, 25 * 1024 ** 2) if any(size in lines["lockstep"] for lines in worlds.values())]
    used = sorted({m for m, _ in worlds})
    if not sizes:
        return
    figure, grid = plt.subplots(1, len(used), figsize=(4.4 * len(used), 3.6), sharey=True, squeeze=False)
    for axes, m in zip(grid[0], used):
        for who, style in (("lockstep", "-"), ("Gloo", "--")):
            for size, color in zip(sizes, (OTHER, OWN, PEER)):
                points = sorted((world, lines[who][size]) for (machine, world), lines in worlds.items() if machine == m and size in lines[who])
                label = f"{who}, {size // 1024} KiB" if size < 1024 ** 2 else f"{who}, {size // 1024 ** 2} MiB"
                axes.plot([p[0] for p in points], [p[1] for p in points], color=color, linestyle=style, marker="o", markersize=4, label=label)
        axes.set_yscale("log")
        axes.set_xticks(sorted(world for machine, world in worlds if machine == m))
        axes.set_xlabel("ranks")
        axes.set_title(machines[m].name, fontsize=9)
    grid[0][0].set_ylabel("all-reduce, microseconds")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="lower center", ncols=3, bbox_to_anchor=(0.5, 1.0), fontsize=8.5)
    figure.tight_layout()
    save(figure, "bench-ranks.svg")


def compare(before, after):
    """Two runs of the same benchmarks: what each row that both have takes now, as a share of what it took."""
    ratios = {}  # a row of lockstep's stands beside each of its peers
    for file in sorted(after.folder.glob("*.json")):
        old = {row["measure"]: row["lockstep"] for row in before.rows(file.stem) if row.get("lockstep") and "measure" in row}
        for row in after.rows(file.stem):
            if row.get("lockstep") and row.get("measure") in old:
                ratios[f"{file.stem}: {row['measure'].split(', against')[0]}"] = row["lockstep"] / old[row["measure"]]
    bars = sorted(ratios.items(), key=lambda bar: bar[1])
    if not bars:
        sys.exit(f"{before.folder} and {after.folder} have no row of the same benchmark")
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.26 * len(bars)))
    for i, (_, ratio) in enumerate(bars):
        axes.barh(i, ratio - 1, left=1, color=OTHER if ratio < 0.99 else "#c23b3b" if ratio > 1.01 else FLOOR, height=0.68)
        axes.text(max(ratio, 1) + 0.01, i, f"{ratio:.3f}", va="center", fontsize=8)
    axes.axvline(1, color="#1f2933", linewidth=1)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"after / before (grey: within 1%), {after.name}")
    file = after.folder / "compared.svg"
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight", pad_inches=0.15)
    print(file)


def steps(machines):
    """A step's time beside PyTorch's, on a logarithmic scale."""
    pairs = []
    for name, text, label, peer in STEPS:
        for machine in machines:
            row = machine.find(name, text)
            if row:
                pairs.append((label, machine.name, peer, seconds_of(name, row, row["lockstep"]), seconds_of(name, row, row["peer"])))
    if not pairs:
        return
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.72 * len(pairs)))
    for i, (_, _, peer, own, other) in enumerate(pairs):
        for offset, value, color, who in ((-0.19, own, OWN, "lockstep"), (0.19, other, PEER, peer)):
            axes.barh(i + offset, value, color=color, height=0.34)
            axes.text(value * 1.15, i + offset, f"{time_text(value)}  {who}", va="center", fontsize=8.5)
    axes.set_xscale("log")
    low, high = min(p[3] for p in pairs), max(p[4] for p in pairs)
    axes.set_xlim(low / 3, high * 30)
    axes.set_yticks(range(len(pairs)), [f"{label}\n{machine}" for label, machine, *_ in pairs], fontsize=8.5)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xticks([t for t in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2) if low / 3 < t < high * 30])
    axes.set_xticklabels([time_text(t) for t in axes.get_xticks()])
    axes.set_xlabel("one training step (logarithmic)")
    save(figure, "bench-steps.svg")


def scaling(machines):
    """How much faster a step of one global batch gets with more ranks or replicas."""
    drawn = [(machine, machine.rows("dp")) for machine in machines if machine.rows("dp")]
    if not drawn:
        return
    figure, grid = plt.subplots(1, len(drawn), figsize=(4.4 * len(drawn), 3.6), squeeze=False)
    for axes, (machine, rows) in zip(grid[0], drawn):
        lines = {"DDP": {}, "DP": {}, "PyTorch": {}}
        torch = {}
        for row in rows:
            found = re.match(r"(DDP|DP), (\d+)(?: ranks?|, LossOnOutput)$", row["what"])
            if not found:
                continue
            lines[found[1]][int(found[2])] = row["speed_up"]
            if row.get("torch"):
                torch[int(found[2])] = row["torch"]
        if 1 in torch:
            lines["PyTorch"] = {n: torch[1] / time for n, time in torch.items()}
        most = max(n for line in lines.values() for n in line)
        axes.plot([1, most], [1, most], color=FLOOR, linestyle=":", label="ideal")
        for name, color, label in (("DDP", OWN, "lockstep, DDP"), ("DP", OTHER, "lockstep, DP"),
                                   ("PyTorch", PEER, "PyTorch, as many threads")):
            points = sorted(lines[name].items())
            if points:
                axes.plot([p[0] for p in points], [p[1] for p in points], color=color, marker="o", markersize=4, label=label,
                          linestyle="--" if name == "DP" else "-")
        axes.set_xticks(sorted(lines["DDP"]))
        axes.set_xlabel("ranks, replicas or threads")
        axes.set_title(machine.name, fontsize=9)
    grid[0][0].set_ylabel("speed-up over one")
    grid[0][0].legend(fontsize=8.5, loc="upper left")
    figure.tight_layout()
    save(figure, "bench-scaling.svg")


def simulated(machines):
    """Predicted scaling to a thousand ranks (`./x simulate`): a plot for each kind, a row for each platform, a column for each plan."""
    colors = {"flat": OWN, "islands": OTHER, "zero": PEER, "powersgd": SHADES[2]}
    labels = {"flat": "flat", "islands": "hierarchical", "zero": "ZeRO, flat", "powersgd": "PowerSGD<1>, flat"}
    for machine in machines:
        rows = machine.rows("simulate")
        if not rows:
            continue
        points = rows["scaling"]
        platforms, plans = (list(dict.fromkeys(point[key] for point in points)) for key in ("platform", "plan"))
        for kind, value in (("weak", "efficiency"), ("strong", "speed")):
            figure, grid = plt.subplots(len(platforms), len(plans), figsize=(9, 2.5 * len(platforms)), sharex=True)
            for row, platform in zip(grid, platforms):
                for axes, plan in zip(row, plans):
                    for way, color in colors.items():
                        line = [p for p in points if (p["kind"], p["platform"], p["plan"], p["way"]) == (kind, platform, plan, way)]
                        axes.plot([p["world"] for p in line], [p[value] for p in line], color=color, marker="o", markersize=3, label=labels[way])
                    axes.set_xscale("log", base=2)
                    axes.set_xticks(rows["worlds"], [f"{w:,}" for w in rows["worlds"]])
                    axes.set_title(f"{plan}, {platform}", fontsize=9)
                    if kind == "weak":
                        axes.set_ylim(0, 1.05)
                        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
                    else:
                        axes.plot(rows["worlds"], [w / 8 for w in rows["worlds"]], color=FLOOR, linestyle=":", label="ideal")
                        axes.set_yscale("log")
                        axes.yaxis.set_major_formatter(lambda speed, _: f"{speed:g}x")
            for axes in grid[-1]:
                axes.set_xlabel("ranks (predicted)")
            grid[0][0].legend(fontsize=7.5)
            figure.tight_layout()
            save(figure, f"simulated-{kind}.svg")


def loss(machines):
    """The main example's losses and accuracy, of the last run in the log."""
    for machine in machines:
        file = machine.folder / "fashion_mnist.jsonl"
        if not file.exists():
            continue
        records = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        epochs = [record for record in records if "epoch" in record]  # without headers of runs and lines of the program's own
        first = max(i for i, epoch in enumerate(epochs) if epoch["epoch"] == 1)
        epochs = epochs[first:]
        x = [epoch["epoch"] for epoch in epochs]
        figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.1))
        left.plot(x, [e["loss"] for e in epochs], color=OWN, marker="o", markersize=4, label="training")
        left.plot(x, [e["test_loss"] for e in epochs], color=PEER, marker="o", markersize=4, label="test")
        left.set_ylabel("loss")
        left.legend()
        right.plot(x, [100 * e["test_accuracy"] for e in epochs], color=OTHER, marker="o", markersize=4)
        right.set_ylabel("test accuracy, %")
        for axes in (left, right):
            axes.set_xlabel("epoch")
            axes.set_xticks(x)
        figure.tight_layout()
        save(figure, "loss.svg")
        return


if __name__ == "__main__":
    chosen = [Machine(folder) for folder in sys.argv[1:] if folder != "--compare"]
    if not chosen or ("--compare" in sys.argv and len(chosen) != 2):
        sys.exit("usage: plot.py FOLDER..., or plot.py --compare BEFORE AFTER")
    if "--compare" in sys.argv:
        compare(*chosen)
        sys.exit()
    for draw in (overview, readme, all_reduce, ranks, steps, scaling, simulated, loss):
        draw(chosen)
