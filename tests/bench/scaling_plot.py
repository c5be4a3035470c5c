#!/usr/bin/env python3
"""Weak and strong scaling, from what bench_layouts_gpu --rows has written of scaling_h200.txt.

  scaling_plot.py ROWS OUT.svg

Prints a table: tokens/s, and the share of N times the one-GPU row of the same model. Needs matplotlib.
"""

import argparse
import pathlib
import re
import sys

NAME = re.compile(r"(?P<model>[^ ,]+) ?(?P<layout>[^,]*)(, (?P<kind>weak|strong))?, (?P<gpus>\d+) GPUs?$")


def read(path):
    """One-GPU tokens/s by model, and (kind, model and layout) -> {GPUs: tokens/s}."""
    alone, lines = {}, {}
    for text in path.read_text().splitlines():
        cells = [cell.strip() for cell in text.split("|")]
        name = NAME.match(cells[1]) if len(cells) > 4 else None
        if not name:
            continue
        tokens, gpus = float(cells[3]), int(name["gpus"])
        if gpus == 1:
            alone[name["model"]] = tokens
        else:
            lines.setdefault((name["kind"], name["model"], name["layout"]), {})[gpus] = tokens
    return alone, lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    options = parser.parse_args()
    alone, lines = read(options.rows)
    if not lines:
        sys.exit(f"{options.rows}: no row of scaling_h200.txt in it")

    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "muster"
    import matplotlib.pyplot as pyplot
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    panels = {"weak": axes[0], "strong": axes[1]}
    titles = {"weak": "weak: as many tokens per GPU", "strong": "strong: as many tokens in all"}
    print("| | GPUs | tokens/s | of n x one GPU |\n|---|---|---|---|")
    for (kind, model, layout), by_gpus in lines.items():
        shares = {1: 1.0}
        for gpus, tokens in sorted(by_gpus.items()):
            shares[gpus] = tokens / (gpus * alone[model])
            print(f"| {model} {layout}, {kind} | {gpus} | {tokens:.0f} | {100 * shares[gpus]:.1f} % |")
        panels[kind].plot(list(shares), [100 * share for share in shares.values()], "o-",
                          label=f"{model}, {layout}")
    for kind, panel in panels.items():
        panel.set(xlabel="GPUs", title=titles[kind], xticks=[1, 2, 4], ylim=(0, 105))
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("% of n x one GPU")
    axes[0].legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out, metadata={"Date": None})


main()
