"""The figures of ablations.py, and the means that they show."""

import statistics

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.variants import VARIANTS
from support.files import save_figure
from support.sources import stsb_label

POINTS = {"dev_best": "dev, best", "dev_last": "dev, last", "test_best": "test, at the best dev step"}
PATHS = {
    "p = 0": ("no dropout", "tab:blue", 9),
    "p = 0.1": ("dropout 0.1", "tab:red", 7),
    "one mask, p = 0.1": ("one mask for both views", "tab:orange", 4),
}


def summary(table, group, column):
    """Mean, standard deviation (0 for one seed) and number of the seeds' values, for each variant that has rows."""
    found = {}
    for variant in VARIANTS[group]:
        rows = [row for row in table if (row["group"], row["variant"]) == (group, variant)]
        values = [float(row[column]) for row in rows]
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            found[variant] = statistics.mean(values), spread, len(values)
    return found


def draw_group(table, group, folder):
    """A group's scores as points with their spread over the seeds, and a line where the start was on dev."""
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    axis = figure.subplots()
    before = summary(table, group, "dev_start")
    for offset, (column, label) in zip((-0.2, 0, 0.2), POINTS.items(), strict=True):
        scores = summary(table, group, column).values()
        places = [x + offset for x in range(len(before))]
        means, spreads = [mean for mean, _, _ in scores], [spread for _, spread, _ in scores]
        axis.errorbar(places, means, spreads, fmt="o", capsize=3, label=label)
    for x, (mean, _, _) in enumerate(before.values()):
        label = "dev, before training" if x == 0 else None
        axis.hlines(mean, x - 0.42, x + 0.42, colors="black", linestyles="dashed", label=label)
    slanted = {"rotation": 20, "ha": "right", "rotation_mode": "anchor"} if len(before) > 5 else {}
    axis.set_xticks(range(len(before)), before.keys(), **slanted)
    axis.set(title=group, ylabel=f"Spearman x 100 ({stsb_label()})")
    axis.grid(axis="y", alpha=0.3)
    figure.legend(fontsize="small", ncols=4, loc="outside lower center")
    save_figure(figure, folder / f"ablations_{group}.png")


def mean_path(table, steps, variant, columns):
    """A variant's way through training, from the group dropout: for every step a tuple of means over the seeds."""
    known_by = [
        (row["setup"], row["seed"]) for row in table if (row["group"], row["variant"]) == ("dropout", variant)
    ]
    rows = [row for row in steps if (row["setup"], row["seed"]) in known_by]
    path = []
    for step in sorted({int(row["step"]) for row in rows}):
        now = [row for row in rows if int(row["step"]) == step]
        path.append(tuple(statistics.mean(float(row[column]) for row in now) for column in columns))
    return path


def draw_paths(table, steps, folder):
    """How alignment and uniformity move in training, as in the paper's Figure 2; and beside it what the views do."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    pictures = {"alignment": "pairs scored above 4", "views_alignment": "the two views"}
    for axis, (column, pairs) in zip(figure.subplots(1, 2, sharex=True), pictures.items(), strict=True):
        for variant, (label, color, size) in PATHS.items():
            path = mean_path(table, steps, variant, ("uniformity", column))
            for start, end in zip(path, path[1:], strict=False):
                axis.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color})
            if path:
                axis.plot(*zip(*path[1:], strict=True), "o", markersize=size, color=color, label=label)
                axis.plot(*path[0], "k*", markersize=11)
        axis.set(
            title=f"alignment of {pairs}, from the star on",
            xlabel=f"uniformity, {stsb_label()} dev (lower is better)",
            ylabel="alignment (lower is better)",
        )
        axis.xaxis.set_major_locator(MaxNLocator(6))
        axis.legend()
    save_figure(figure, folder / "figure2.png")
