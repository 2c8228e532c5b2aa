"""The chapter's exercises and the paper's claims, measured: variants of train.py over several seeds, in this process.

Writes results/ablations.csv, a row a run; results/ablations_steps.csv, a row a score on the way; and a figure a group. A run
that has its row is not run again, unless its settings, the data or the starting encoder have changed; then it gets another row,
and only rows of the present ones are averaged and drawn. One that was stopped goes on, and settings that several groups share
run once. One process at a time: two would overwrite each other's rows.
"""

import contextlib
import csv
import functools
import hashlib
import os
import re
import shutil
import statistics

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from safetensors import SafetensorError
from safetensors.torch import load_file, save as to_safetensors

import config
import train
from checkpoint import local_folder, write_atomically
from config import first_line
from evaluate import evaluate_stsb, measure, pick_device, stsb_name
from model import SimCSEEncoder, alignment_and_uniformity, simcse_loss
from runs import conditions, fingerprints, read_metrics, read_run, save_figure, training_settings, write_table

HEAD_IN_BOTH = "head in both"
# encoders that ablations.py does without where they are not there: the knobs of pretrain.py that make them
VALLEY, PLAIN, MOMENT, HALF, TWICE = (f"checkpoints/mlm_{name}" for name in ("valley", "plain", "moment", "half", "twice"))
RECIPES = {VALLEY: "CLS_WEIGHT=0 MAX_TOKENS=300_000 DECAY_SHARE=0 DROPOUT_SHARE=0", PLAIN: "CLS_WEIGHT=0 MAX_TOKENS=2_000_000",
           MOMENT: "MAX_TOKENS=800_000", HALF: "MAX_TOKENS=10_250_000",
           TWICE: "MLM_INIT=checkpoints/mlm_encoder SEED=43 MAX_TOKENS=21_000_000 DECAY_SHARE=0.1 DROPOUT_SHARE=0.1"}
SMALL = {"MAX_SENTENCES": 4_000, "EVAL_INTERVAL": 10}        # unless the shell says otherwise: the best score comes early
# group -> variant -> the knobs in which it differs from the others
VARIANTS = {
    "setting": {"ours": {}, "the chapter's": {"DROPOUT": 0.1, "LEARNING_RATE": 5e-5, "USE_MLP_HEAD": True, "MAX_SEQ_LEN": 32}},
    "dropout": {f"p = {p:g}": {"DROPOUT": p} for p in (0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.5)}
    | {"one mask, p = 0.1": {"DROPOUT": 0.1, "FIXED_MASK": True}},
    "pooling": {pooler: {"POOLER": pooler} for pooler in ("cls", "mean")},
    "head": {"no head": {"USE_MLP_HEAD": False}, "head in training only": {"USE_MLP_HEAD": True},
             HEAD_IN_BOTH: {"USE_MLP_HEAD": True}},
    "data": {f"{n // 1000}k x {epochs}": {"MAX_SENTENCES": n, "EPOCHS": epochs, "EVAL_INTERVAL": 50}
             for n, epochs in ((10_000, 1), (10_000, 3), (10_000, 5), (30_000, 1), (100_000, 1))},     # 10k x 3: the steps of 30k x 1
    "longer": {variant: knobs | {"MAX_SENTENCES": 10_000, "EPOCHS": 3, "EVAL_INTERVAL": 50}
               for variant, knobs in (("p = 0", {"DROPOUT": 0.0}), ("p = 0.1", {}), ("one mask, p = 0.1", {"FIXED_MASK": True}))},
    "tokens": {f"{n} tokens": {"MAX_SEQ_LEN": n} for n in (8, 10, 16, 32)},
    "temperature": {f"tau = {tau:g}": {"TEMPERATURE": tau} for tau in (0.01, 0.05, 0.1, 0.5)},
    "batch": {f"N = {n}": {"BATCH_SIZE": n} for n in (32, 64, 128, 256)},
    "start": {"random weights": {"INIT": "random"}, "[CLS] in its valley": {"INIT": VALLEY},
              "pre-trained, [CLS] without a task": {"INIT": PLAIN},
              "pre-trained for a moment": {"INIT": MOMENT}, "pre-trained on half the tokens": {"INIT": HALF}, "pre-trained": {},
              "pre-trained on twice the tokens": {"INIT": TWICE}},
}
METRICS = ["alignment", "uniformity", "length", "views_loss", "views_alignment"]
TABLE = ["group", "variant", "seed", "dev_start", "dev_best", "dev_last", "test_best", "step_best", "step_last",
         *(f"{name}_{when}" for name in METRICS for when in ("start", "best", "last")), "seconds", "setup", "settings"]
STEPS = ["setup", "seed", "step", "epoch", "loss", "spearman", *METRICS]
TITLES = {"dev_best": "dev, best", "dev_last": "dev, last", "test_best": "test, at the best dev step"}
PATHS = {"p = 0": "no dropout", "p = 0.1": "dropout 0.1", "one mask, p = 0.1": "one mask for both views"}


def measure_views(encoder, sentences):
    """Loss and alignment of the two views, as training sees them, over the first four batches' worth of sentences.

    The masks are the same at every call, and what the run will draw next is left as it was. Returns a dict of floats.
    """
    N, device = config.BATCH_SIZE, encoder.token_embedding.weight.device
    idx, attention_mask = (tensor.to(device) for tensor in encoder.tokenize(sentences[:4 * N], config.MAX_SEQ_LEN))
    encoder.train()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        views = [train.two_views(encoder, *batch) for batch in zip(idx.split(N), attention_mask.split(N)) if len(batch[0]) == N]
    losses = [simcse_loss(z1, z2, config.TEMPERATURE).item() for z1, z2 in views]
    return {"views_loss": statistics.mean(losses),
            # on the CPU, as Apple's GPU has no pdist
            "views_alignment": statistics.mean(alignment_and_uniformity(z1.cpu(), z2.cpu())[0] for z1, z2 in views)}


@contextlib.contextmanager
def as_variant(group, variant, seed):
    """The knobs, and where it takes more the code, of a variant; as before when it is left."""
    knobs, checkpoints = {name: getattr(config, name) for name in config.DEFAULTS}, config.checkpoints
    encode, save = SimCSEEncoder.encode, SimCSEEncoder.save_pretrained
    name = re.sub(r"[^\w.+-]+", "_", f"{group} {variant} {seed}")
    vars(config).update(VARIANTS[group][variant], SEED=seed, RUN_NAME=name, checkpoints=os.path.join(checkpoints, "ablations"))

    def save_with_head(encoder, folder):
        save(encoder, folder)
        head = to_safetensors({name: tensor.cpu() for name, tensor in encoder.mlp_head.state_dict().items()})
        write_atomically(os.path.join(folder, "head.safetensors"), head)            # the test score wants it where it is in both
    SimCSEEncoder.save_pretrained = save_with_head
    sentences = functools.cache(train.load_sentences)           # read at the first score, and not at every one
    train.measure = lambda encoder, split: measure(encoder, split) | measure_views(encoder, sentences())
    if variant == HEAD_IN_BOTH:
        SimCSEEncoder.encode = lambda self, idx, attention_mask, project=False: encode(self, idx, attention_mask, project=True)
    try:
        config.check()
        yield os.path.join(config.checkpoints, name)
    finally:
        vars(config).update(knobs, checkpoints=checkpoints)
        train.measure, SimCSEEncoder.encode, SimCSEEncoder.save_pretrained = measure, encode, save


def setup_of(variant):
    """What a row is of, seed apart: all knobs, as a string, and a fingerprint of them, the data and the starting encoder."""
    settings = [f"{name}={value}" for name, value in training_settings().items() if name != "SEED"]
    settings = " ".join(settings + [HEAD_IN_BOTH.replace(" ", "_")] * (variant == HEAD_IN_BOTH))
    reads = fingerprints(train.load_sentences(), config.INIT, ("validation", "test"))
    return settings, hashlib.sha256(repr((settings, reads)).encode()).hexdigest()[:12]


def read_table(path, columns):
    """The rows of a CSV file, all strings; none where there is no file. Raises ValueError where it is not as written here."""
    if not os.path.exists(path):
        return []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        if reader.fieldnames != columns or any(None in (*row, *row.values()) for row in rows):
            raise ValueError("a column too many or too few")
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path} is not as ablations.py writes it ({first_line(error)}): move it away") from None
    return rows


def run(folder):
    """Train the variant that config holds, from where it was stopped if it was.

    Returns run.json's content, the metrics, and the test score of the encoder that was the best on dev.
    """
    device, was_there = pick_device(config.DEVICE), os.path.exists(folder)
    try:
        begun = read_run(folder) if was_there else None
        if begun and (begun["settings"], begun["data"]) != (training_settings(), conditions(train.load_sentences(), config.INIT, device)):
            begun = None
        if not (begun and begun["finished"]):
            config.RESUME = begun is not None and os.path.exists(os.path.join(folder, "state.safetensors"))
            config.OVERWRITE = not config.RESUME
            train.main()
        encoder = SimCSEEncoder.from_pretrained(folder)
        encoder.mlp_head.load_state_dict(load_file(os.path.join(folder, "head.safetensors")))
        return read_run(folder), read_metrics(folder), evaluate_stsb(encoder.to(device), "test")
    except (OSError, ValueError, SafetensorError):
        if not was_there:
            raise
        shutil.rmtree(folder)                                       # what an earlier run left there is damaged: it begins again
        return run(folder)


def summary(table, group, column):
    """Mean and standard deviation over the seeds (0 for one seed) of a column, for each variant of a group that has rows."""
    values = {variant: [float(row[column]) for row in table if (row["group"], row["variant"]) == (group, variant)]
              for variant in VARIANTS[group]}
    return {variant: (statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0, len(found))
            for variant, found in values.items() if found}


def draw_group(table, group, folder):
    """A group's scores as points with their spread over the seeds, and a line where the start was on dev."""
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    axis = figure.subplots()
    for i, (column, title) in enumerate(TITLES.items()):
        found = summary(table, group, column)
        axis.errorbar([x + 0.2 * (i - 1) for x in range(len(found))], [mean for mean, _, _ in found.values()],
                      [spread for _, spread, _ in found.values()], fmt="o", capsize=3, label=title)
    for x, (mean, _, _) in enumerate(summary(table, group, "dev_start").values()):
        axis.hlines(mean, x - 0.42, x + 0.42, colors="black", linestyles="dashed", label="dev, before training" if x == 0 else None)
    many = {"rotation": 20, "ha": "right", "rotation_mode": "anchor"} if len(found) > 5 else {}
    axis.set_xticks(range(len(found)), found.keys(), **many)
    axis.set(title=group, ylabel=f"Spearman x 100 ({stsb_name()})")
    axis.grid(axis="y", alpha=0.3)
    figure.legend(fontsize="small", ncols=4, loc="outside lower center")
    save_figure(figure, os.path.join(folder, f"ablations_{group}.png"))


def draw_paths(table, steps, folder):
    """The paper's Figure 2, how alignment and uniformity move during training, mean over the seeds; and what the views do."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axis, column, pairs in zip(figure.subplots(1, 2, sharex=True), ("alignment", "views_alignment"), ("pairs scored above 4", "the two views")):
        for color, size, (variant, label) in zip(("tab:blue", "tab:red", "tab:orange"), (9, 7, 4), PATHS.items()):
            runs = [(row["setup"], row["seed"]) for row in table if (row["group"], row["variant"]) == ("dropout", variant)]
            rows = [row for row in steps if (row["setup"], row["seed"]) in runs]
            points = [tuple(statistics.mean(float(row[name]) for row in rows if row["step"] == step)
                            for name in ("uniformity", column))
                      for step in sorted({row["step"] for row in rows}, key=int)]
            for start, end in zip(points, points[1:]):
                axis.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color})
            if points:
                axis.plot(*zip(*points[1:]), "o", markersize=size, color=color, label=label)
                axis.plot(*points[0], "k*", markersize=11)
        axis.set(xlabel=f"uniformity, {stsb_name()} dev (lower is better)", ylabel="alignment (lower is better)",
                 title=f"alignment of {pairs}, from the star on")
        axis.xaxis.set_major_locator(MaxNLocator(6))
        axis.legend()
    save_figure(figure, os.path.join(folder, "figure2.png"))


def main():
    groups = [name for name in config.ONLY.split(",") if name]
    unknown = [name for name in groups if name not in VARIANTS]
    if unknown or not groups:
        raise ValueError(f"ONLY={config.ONLY} must name some of {', '.join(VARIANTS)}, with commas between")
    try:
        seeds = [int(seed) for seed in config.SEEDS.split(",")]
    except ValueError:
        seeds = [-1]
    if not all(0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"SEEDS={config.SEEDS} must be whole numbers from 0 to 2**32 - 1 with commas between")
    idle = config.overridden & {"SEED", "RUN_NAME", "RESUME", "OVERWRITE"}
    if idle:
        raise ValueError(f"ablations.py sets {' and '.join(sorted(idle))} by itself: SEEDS= takes seeds, and a stopped run goes on")
    missing = [folder for folder in RECIPES if "start" in groups and not local_folder(folder)]
    for folder in missing:
        print(f"the start {folder} is left out, as it isn't there: python pretrain.py MLM_FOLDER={folder} {RECIPES[folder]}")
    vars(config).update({name: value for name, value in SMALL.items() if name not in config.overridden})
    folder = config.results
    os.makedirs(folder, exist_ok=True)
    table_path, steps_path = os.path.join(folder, "ablations.csv"), os.path.join(folder, "ablations_steps.csv")
    table, steps, current = read_table(table_path, TABLE), read_table(steps_path, STEPS), set()
    plan = [(group, variant, str(seed)) for group in groups for variant, knobs in VARIANTS[group].items()
            if knobs.get("INIT") not in missing for seed in seeds]
    for at, (group, variant, seed) in enumerate(plan, start=1):
        with as_variant(group, variant, int(seed)) as run_folder:
            settings, setup = setup_of(variant)
            current.add((group, variant, setup))
            same = [row for row in table if (row["setup"], row["seed"]) == (setup, seed)]
            if any((row["group"], row["variant"]) == (group, variant) for row in same):
                continue
            print(f"\n{at} of {len(plan)}: {group}, {variant}, seed {seed}")
            if same:
                row = same[0] | {"group": group, "variant": variant}
            else:
                done, rows, test = run(run_folder)
                start, best, last = done["start"], done["best"], done["last"]
                row = {"group": group, "variant": variant, "seed": seed, "dev_start": start["spearman"],
                       "dev_best": best["spearman"], "dev_last": last["spearman"], "test_best": test,
                       "step_best": best["step"], "step_last": last["step"],
                       **{f"{name}_{when}": of[name] for name in METRICS
                          for when, of in (("start", start), ("best", best), ("last", last))},
                       "seconds": round(done["seconds"]), "setup": setup, "settings": settings}
                steps = [row for row in steps if (row["setup"], row["seed"]) != (setup, seed)]
                write_table(steps_path, steps + [{"setup": setup, "seed": seed} | row for row in rows])
            write_table(table_path, [*table, row])
            table, steps = read_table(table_path, TABLE), read_table(steps_path, STEPS)
            shutil.rmtree(run_folder, ignore_errors=True)           # its figures are in the tables
    table = [row for row in table if (row["group"], row["variant"], row["setup"]) in current]
    for group in groups:
        draw_group(table, group, folder)
        print(f"\n{f'{group}, {stsb_name()}':34}{'seeds':>6}{'before':>14}{'best dev':>14}{'last dev':>14}{'test':>14}")
        columns = [summary(table, group, column) for column in ("dev_start", "dev_best", "dev_last", "test_best")]
        for variant, (_, _, count) in columns[0].items():
            cells = "".join(f"{f'{column[variant][0]:.1f} ± {column[variant][1]:.1f}':>14}" for column in columns)
            print(f"{variant:34}{count:6}{cells}")
    if "dropout" in groups:
        draw_paths(table, steps, folder)


if __name__ == "__main__":
    config.run(main, __file__)
