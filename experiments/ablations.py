"""The chapter's exercises and the paper's claims, measured: the variants of variants.py over several seeds.

python -m experiments.ablations ONLY=dropout,head SEEDS=0,1,2 runs each of them as python -m experiments.run_variant,
which can be typed as well. It writes results/ablations.csv, a row a run; results/ablations_steps.csv, a row a score on
the way; and a figure a group. A run that has its row is not run again, one that was stopped goes on, and one that
several groups share is run once. A run of other settings, data, starting encoder or number format gets another row,
and only rows of the present ones are averaged and drawn.
"""

import csv
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import config as root_config
import train
from experiments import config
from experiments.figures import draw_group, draw_paths, summary
from experiments.run_variant import remove_run
from experiments.variants import RECIPES, VARIANTS
from support import command_line, files, hub, runs
from support.device import pick_device, pick_precision
from support.sources import stsb_label

# What a run is known by, beside its data, its starting encoder and its number format
SETTINGS = [*train.SETTINGS, "HEAD_AT_EVALUATION"]
KNOBS = ["ONLY", "SEEDS", *(name for name in SETTINGS if name != "SEED"), "DEVICE", "PRECISION"]

RESULTS = Path(__file__).resolve().parent / "results"
METRICS = ["alignment", "uniformity", "length", "views_loss", "views_alignment"]
COLUMNS = {
    "ablations.csv": [
        "group", "variant", "seed", "dev_start", "dev_best", "dev_last", "test_best", "step_best", "step_last",
        *(f"{name}_{when}" for name in METRICS for when in ("start", "best", "last")),
        "seconds", "precision", "setup", "settings",
    ],
    "ablations_steps.csv": ["setup", "seed", "step", "loss", "spearman", "test", *METRICS],
}  # fmt: skip


# ---- what is asked for


def chosen_groups():
    """The groups that ONLY names; raises ValueError where it names others or none."""
    groups = [name for name in config.ONLY.split(",") if name]
    if not groups or not set(groups) <= set(VARIANTS):
        raise ValueError(f"ONLY={config.ONLY} must name some of {', '.join(VARIANTS)}, with commas between")
    return groups


def chosen_seeds():
    """The seeds that SEEDS names; raises ValueError where they are none."""
    seeds = config.SEEDS.split(",")
    if not all(re.fullmatch("[0-9]{1,10}", seed) and int(seed) < 2**32 for seed in seeds):
        rule = "whole numbers from 0 to 2**32 - 1, with commas between"
        raise ValueError(f"SEEDS={config.SEEDS} must be {rule}")
    return [int(seed) for seed in seeds]


def planned_runs(groups, seeds):
    """A triple (group, variant, seed) for every run, less the variants whose starting encoder is not there."""
    plan, missing = [], set()
    for group in groups:
        for variant, knobs in VARIANTS[group].items():
            init = knobs.get("INIT")
            if init in RECIPES and not hub.local_folder(init):
                missing.add(init)
            else:
                plan += [(group, variant, seed) for seed in seeds]
    for folder in sorted(missing):
        command = f"python -m pretraining.pretrain MLM_FOLDER={folder} {RECIPES[folder]}"
        print(f"the start {folder} is left out, as it isn't there: {command}")
    return plan


def knobs_of(group, variant, seed):
    """The knobs that run_variant is given, a dict from name to value: ours, with the variant's in their place."""
    values = command_line.constants([root_config, config]) | VARIANTS[group][variant] | {"SEED": seed}
    precision = pick_precision(values["PRECISION"], pick_device(values["DEVICE"]))
    return {name: values[name] for name in [*SETTINGS, "DEVICE"]} | {"PRECISION": precision}


def setup_of(knobs, conditions):
    """What a row is known by, the seed apart: a hash of its settings, data, starting encoder and number format."""
    known_by = {name: knobs[name] for name in SETTINGS if name != "SEED"}
    known_by |= {name: conditions[name] for name in ("corpus", "stsb", "init", "precision")}
    return hashlib.sha256(repr(sorted(known_by.items())).encode()).hexdigest()[:12]


# ---- one run


def run_as_process(arguments):
    """Run experiments.run_variant with some arguments, in a process of its own; raises ValueError where it fails."""
    try:
        status = subprocess.run([sys.executable, "-m", "experiments.run_variant", *arguments]).returncode
    except KeyboardInterrupt:
        status = 130
    if status == 130:
        raise KeyboardInterrupt("the same command goes on from the last score")
    if status:
        raise ValueError(f"the run has ended with exit status {status}: what it said is above")


def state_of(folder, conditions):
    """Where a run stands: "new", "stopped" or "finished".

    One that is damaged, or was computed on another device or with another number of threads, is removed, and is new.
    """
    if not folder.exists():
        return "new"
    with files.lock(folder, f"the run {folder.name}"):
        try:
            begun = runs.read_run(folder)
            runs.read_metrics(folder)
            if not begun["finished"]:
                files.load_state(folder / "state.pt")
            usable = all(begun["conditions"][name] == conditions[name] for name in ("device", "threads"))
        except (OSError, ValueError):
            usable = False
        if not usable:
            shutil.rmtree(folder)
            return "new"
    return "finished" if begun["finished"] else "stopped"


def finish_run(knobs, setup, conditions, run):
    """Train a variant, or go on with it, and add its scores to the table of steps.

    Returns its row of the other table, without group and variant, and its folder, which is no longer needed then.
    """
    folder = files.CHECKPOINTS / f"ablation-{setup}-{knobs['SEED']}"
    state = state_of(folder, conditions)
    if state != "finished":
        arguments = [f"{name}={value}" for name, value in knobs.items()]
        run([*arguments, f"RUN_NAME={folder.name}", f"RESUME={state == 'stopped'}"])
    add_rows(
        "ablations_steps.csv",
        [{"setup": setup, "seed": knobs["SEED"], **scores} for scores in runs.read_metrics(folder)],
        replaced=lambda row: (row["setup"], row["seed"]) == (setup, str(knobs["SEED"])),
    )
    result = runs.read_run(folder)
    start, best, last = result["start"], result["best"], result["last"]
    row = {
        "seed": knobs["SEED"],
        "dev_start": start["spearman"],
        "dev_best": best["spearman"],
        "dev_last": last["spearman"],
        "test_best": best["test"],
        "step_best": best["step"],
        "step_last": last["step"],
        "seconds": round(result["seconds"]),
        "precision": knobs["PRECISION"],
        "setup": setup,
        "settings": shlex.join(f"{name}={knobs[name]}" for name in SETTINGS if name != "SEED"),
    }
    for name in METRICS:
        row |= {f"{name}_start": start[name], f"{name}_best": best[name], f"{name}_last": last[name]}
    return row, folder


# ---- tables


def read_table(name):
    """The rows of a table in results/, all strings; none where there is no file.

    Raises ValueError where it is not as it is written here.
    """
    path = RESULTS / name
    if not path.exists():
        return []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        if reader.fieldnames != COLUMNS[name] or any(None in (*row, *row.values()) for row in rows):
            raise ValueError("a column too many or too few")
    except (csv.Error, ValueError) as error:
        problem = f"is not as ablations.py writes it ({files.first_line(error)})"
        raise ValueError(f"{path} {problem}: move it away") from None
    return rows


def add_rows(name, rows, replaced=lambda row: False):
    """Add rows to a table in results/; those of before for which `replaced` holds go."""
    kept = [row for row in read_table(name) if not replaced(row)]
    new = [{column: row[column] for column in COLUMNS[name]} for row in rows]
    files.write_table(RESULTS / name, kept + new)


def print_group(table, group):
    """Mean and standard deviation over the seeds, a line a variant."""
    heads = ("seeds", "before", "best dev", "last dev", "test")
    print(f"\n{f'{group}, {stsb_label()}':34}{heads[0]:>6}" + "".join(f"{head:>14}" for head in heads[1:]))
    columns = [summary(table, group, column) for column in ("dev_start", "dev_best", "dev_last", "test_best")]
    for variant, (_, _, count) in columns[0].items():
        cells = [f"{column[variant][0]:.1f} ± {column[variant][1]:.1f}" for column in columns]
        print(f"{variant:34}{count:6}" + "".join(f"{cell:>14}" for cell in cells))


def main(run=run_as_process):
    """Run what has no row yet, then draw and print. run: what takes the command line of run_variant and runs it."""
    groups, seeds = chosen_groups(), chosen_seeds()
    plan = planned_runs(groups, seeds)
    train.load_sentences()  # raises where there are none
    corpus = (files.DATA / "sentences.txt").read_text(encoding="utf-8")  # whole, whatever MAX_SENTENCES takes
    present = set()
    with files.lock(RESULTS / "ablations.csv", "the table of results"):
        for name in COLUMNS:
            read_table(name)  # raises before anything runs
        for number, (group, variant, seed) in enumerate(plan, start=1):
            knobs = knobs_of(group, variant, seed)
            conditions = runs.conditions(
                [corpus], knobs["INIT"], pick_device(knobs["DEVICE"]), knobs["PRECISION"]
            )
            setup = setup_of(knobs, conditions)
            present.add((group, variant, setup))
            table = read_table("ablations.csv")
            same = [row for row in table if (row["setup"], row["seed"]) == (setup, str(seed))]
            if any((row["group"], row["variant"]) == (group, variant) for row in same):
                continue
            if same:  # another group has run it
                add_rows("ablations.csv", [same[0] | {"group": group, "variant": variant}])
                continue
            print(f"\n{number} of {len(plan)}: {group}, {variant}, seed {seed}", flush=True)
            row, folder = finish_run(knobs, setup, conditions, run)
            add_rows("ablations.csv", [row | {"group": group, "variant": variant}])
            remove_run(folder)
        table = [
            row
            for row in read_table("ablations.csv")
            if (row["group"], row["variant"], row["setup"]) in present
        ]
        for group in groups:
            draw_group(table, group, RESULTS)
            print_group(table, group)
        if "dropout" in groups:
            draw_paths(table, read_table("ablations_steps.csv"), RESULTS)


if __name__ == "__main__":
    command_line.run(main, "-m experiments.ablations", [root_config, config], KNOBS)
