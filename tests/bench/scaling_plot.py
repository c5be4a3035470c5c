#!/usr/bin/env python3
"""Weak and strong scaling, from what bench_layouts_gpu --rows has written of scaling_h200.txt.

  scaling_plot.py ROWS OUT.svg

Prints a table: step, tokens/s, and the share of n times the one-GPU row of the same model. Needs matplotlib.
"""

import argparse
import pathlib
import re
import sys

NAME = re.compile(r"(?P<model>[^ ,]+) ?(?P<layout>[^,]*)(, (?P<kind>weak|strong))?, (?P<gpus>\d+) GPUs?$")
# Told apart without colours too.
STYLES = [("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", "-."), ("#cc79a7", "D", ":")]


def read(path):
    """One-GPU rows by model, and (kind, model and layout) -> {GPUs: row}; a row is (step, tokens/s)."""
    alone, lines = {}, {}
    for text in path.read_text().splitlines():
        cells = [cell.strip() for cell in text.split("|")]
        name = NAME.match(cells[1]) if len(cells) > 4 else None
        if not name:
            continue
        row, gpus = (cells[2], float(cells[3])), int(name["gpus"])
        if gpus == 1:
            alone[name["model"]] = row
        else:
            lines.setdefault((name["kind"], name["model"], name["layout"]), {})[gpus] = row
    return alone, lines


def spread(values, gap):
    """The values, moved apart until neighbours are `gap` away from each other."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    at = [values[i] for i in order]
    for _ in range(100):
        for low in range(len(at) - 1):
            missing = gap - (at[low + 1] - at[low])
            if missing > 0:
                at[low] -= missing / 2
                at[low + 1] += missing / 2
    return {i: y for i, y in zip(order, at)}


def draw(panel, lines, gap):
    """One panel; `lines` is [(label, {GPUs: % of n x one})]. Writes the shares beside the last points."""
    panel.axhline(100, color="#555555", linewidth=1)
    for (label, shares), (color, marker, style) in zip(lines, STYLES):
        panel.plot(list(shares), list(shares.values()), color=color, marker=marker, linestyle=style,
                   linewidth=1.8, markersize=6, label=label)
    last = [list(shares.items())[-1] for _, shares in lines]
    for i, y in spread([share for _, share in last], gap).items():
        panel.annotate(f"{last[i][1]:.1f} %", (last[i][0], y), xytext=(8, 0), textcoords="offset points",
                       va="center", color=STYLES[i][0], fontsize=10)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    options = parser.parse_args()
    alone, lines = read(options.rows)
    if not lines:
        sys.exit(f"{options.rows}: no row of scaling_h200.txt in it")

    panels = {"weak": [], "strong": []}
    print("| work | GPUs | step | tokens/s | of n x one GPU |\n|---|---|---|---|---|")
    for model, (step, tokens) in alone.items():
        print(f"| {model} | 1 | {step} | {tokens:.0f} | |")
    for (kind, model, layout), by_gpus in lines.items():
        shares = {1: 100.0}
        for gpus, (step, tokens) in sorted(by_gpus.items()):
            shares[gpus] = 100 * tokens / (gpus * alone[model][1])
            print(f"| {model} {layout}, {kind} | {gpus} | {step} | {tokens:.0f} | {shares[gpus]:.1f} % |")
        panels[kind].append((f"{model}, {layout}", shares))

    import matplotlib
    matplotlib.use("svg")
    # Text stays text: smaller, and it can be searched.
    matplotlib.rcParams.update({"svg.hashsalt": "muster", "svg.fonttype": "none", "font.size": 11,
                                "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"]})
    import matplotlib.pyplot as pyplot
    figure, axes = pyplot.subplots(1, 2, figsize=(9.6, 4.2), sharey=True)
    bottom = min(min(shares.values()) for of_kind in panels.values() for _, shares in of_kind) // 10 * 10
    titles = {"weak": "weak: as many tokens per GPU", "strong": "strong: as many tokens in all"}
    for panel, kind in zip(axes, panels):
        draw(panel, panels[kind], gap=0.06 * (104 - bottom))
        panel.set_xscale("log", base=2)
        panel.set(xlabel="GPUs", title=titles[kind], ylim=(bottom, 104), xlim=(0.9, 5.4))
        panel.set_xticks([1, 2, 4], labels=["1", "2", "4"])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("% of n x one GPU")
    handles, labels = max((panel.get_legend_handles_labels() for panel in axes), key=lambda both: len(both[1]))
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(options.out, metadata={"Date": None})


main()
