"""Run folders: settings, metrics, curves, the best encoder, and what a stopped run needs to go on."""

import csv
import hashlib
import math
import os
import platform
import re
import shutil
import sys
import time
from itertools import islice
from pathlib import Path

import numpy
import tokenizers
import torch
from tqdm import tqdm

from support import files, hub
from support.device import random_source
from support.files import first_line, load_state, read_json, save_state, shown, write_json, write_table
from support.sources import recorded, stsb_label

TITLES = {
    "loss": "loss (nats)",
    "spearman": "Spearman x 100",
    "alignment": "alignment (lower is better)",
    "uniformity": "uniformity (lower is better)",
}


def run_folder(name, settings, defaults):
    """The folder of a run under checkpoints/; an empty name is made of the settings that are not the default."""
    changed = [f"{knob}={value}" for knob, value in settings.items() if value != defaults[knob]]
    return files.CHECKPOINTS / (name or re.sub(r"[^\w=.+-]+", "_", "-".join(["simcse", *changed]))[:200])


def read_run(folder):
    """What run.json of a run folder says, as a dict; raises ValueError where it is damaged."""
    run = read_json(Path(folder) / "run.json")
    if not {"settings", "conditions", "finished", "seconds", "init"} <= set(run):
        problem = f"{Path(folder) / 'run.json'} is not as train.py writes it"
        raise ValueError(f"{problem}: begin again under another RUN_NAME")
    return run


def newest_run():
    """The run folder that was written last; raises FileNotFoundError where there is none."""
    found = files.CHECKPOINTS.glob("[!.]*/run.json")  # a name with a dot is a run that was being replaced
    kept = [path for path in found if (path.parent / "model.safetensors").exists()]
    if not kept:
        command = "train one with python train.py, or name a CHECKPOINT="
        raise FileNotFoundError(f"there is no run in {files.CHECKPOINTS}: {command}")
    return max(kept, key=lambda path: path.stat().st_mtime).parent


def start_of(folder):
    """The encoder that a run started from: a folder, or a name on the Hub."""
    init = read_run(folder)["init"]
    if init == "random":
        return Path(folder) / "start"
    return files.ROOT / init if init.startswith("./") else init


def file_hash(paths):
    """The SHA-256 of files one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def fingerprints(sentences, init):
    """SHA-256, by name, of what a run reads: its sentences, STS-B, and the files of its starting encoder.

    init: that encoder's folder, name on the Hub, or "random".
    """
    folder = Path(hub.find(init)) if init != "random" else None
    names = (
        sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".txt", ".safetensors", ".bin"))
        if folder
        else []
    )
    return {
        "corpus": hashlib.sha256("\n".join(sentences).encode()).hexdigest(),
        "stsb": file_hash(sorted((files.DATA / "stsb").glob("*.csv"))),
        "init": file_hash(names),
    }


def conditions(sentences, init, device, precision):
    """What the outcome of a run depends on beside its settings: what it reads, and what it computes on. A dict."""
    # threads: a floating-point sum depends on how it is split among them
    computing = {"threads": torch.get_num_threads(), "device": device.type, "precision": precision}
    return fingerprints(sentences, init) | computing


def read_metrics(folder, last_step=None):
    """The rows of metrics.csv, numbers as numbers, empty cells as None; up to last_step, which must be there.

    Raises ValueError where the file is damaged.
    """
    path = Path(folder) / "metrics.csv"
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]
        rows = [
            row | {"step": int(row["step"])} for row in rows if last_step is None or row["step"] <= last_step
        ]
        if last_step is not None:
            missing = [
                name for row in rows for name, value in row.items() if value is None and name != "loss"
            ]
            if missing or not rows or rows[0]["step"] != 0 or rows[-1]["step"] != last_step:
                raise ValueError(f"it is not whole up to step {last_step}")
    except (KeyError, TypeError, ValueError, OSError, csv.Error) as error:
        raise ValueError(
            f"{path} can't be read ({first_line(error)}): begin again with OVERWRITE=True"
        ) from None
    return rows


def draw_curves(folder, rows, titles):
    """Draw columns of the rows over their "step" into curves.png, one picture a title (a dict from column to title)."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(4 * len(titles), 3.5), layout="constrained")
    for axis, (column, title) in zip(figure.subplots(1, len(titles)), titles.items(), strict=True):
        points = [(row["step"], row[column]) for row in rows if row.get(column) is not None]
        axis.plot([step for step, _ in points], [value for _, value in points], marker=".")
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    files.save_figure(figure, Path(folder) / "curves.png")


def rank(row):
    """What the best row of the metrics is chosen by: its Spearman, where that is defined."""
    return -math.inf if math.isnan(row["spearman"]) else row["spearman"]


class Run:
    """One training: `with Run(...) as run`, run.record at step 0, then run.steps, run.log, run.record, and run.finish.

    settings: what the reader chose; conditions: what else the outcome depends on (data, device, number format). Both
    are kept in run.json, and a run is resumed only where both are as they were. Raises ValueError in one line where
    they are not, where the folder is taken and neither resume nor overwrite says what to do, or where what it holds is
    damaged; OSError where another process trains into it.
    """

    def __init__(self, folder, settings, conditions, encoder, optimizer, resume=False, overwrite=False):
        self.folder, self.encoder, self.optimizer = Path(folder), encoder, optimizer
        self.settings, self.conditions = settings, conditions
        self.resume, self.overwrite = resume, overwrite
        self.device = encoder.token_embedding.weight.device
        self.losses, self.rows, self.done = [], [], 0
        self.trained_steps, self.trained_seconds, self.looked = 0, 0.0, 0.0
        self.started = time.time()
        self.held = files.lock(self.folder, f"the run {self.folder.name}")
        self.replaced = None  # where the run lies that this one replaces, until there is a score

    def __enter__(self):
        self.held.__enter__()
        try:
            self.prepare_folder()
            self.seconds_before = read_run(self.folder)["seconds"]
        except BaseException:
            self.leave_folder()
            raise
        return self

    def __exit__(self, kind, *_):
        self.leave_folder()
        if kind is KeyboardInterrupt and self.rows:
            raise KeyboardInterrupt("RESUME=True goes on from the last score") from None

    # ---- the folder

    def prepare_folder(self):
        """Make the folder of a new run, or take up the one that was stopped."""
        name = self.folder.name
        init = self.settings["INIT"]
        local = hub.local_folder(init) if init != "random" else None
        if local and Path(local).resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"INIT={init} lies in the folder of the run itself: choose another RUN_NAME")
        replaced = self.folder.parent / f".{name}.old"  # a name that no run can have
        if replaced.exists():  # a process was killed while it replaced this run
            if any((self.folder / kept).exists() for kept in ("state.pt", "model.safetensors")):
                shutil.rmtree(replaced)
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
                os.rename(replaced, self.folder)
        if (self.folder / "run.json").exists():
            run = read_run(self.folder)
            if self.resume:
                self.take_up(run)
                return
            if not self.overwrite:
                state = "finished: " if run["finished"] else "unfinished: go on with RESUME=True, "
                ways = "name another with RUN_NAME=, or replace it with OVERWRITE=True"
                raise ValueError(f"{name} is there already, {state}{ways}")
            os.rename(self.folder, replaced)
            self.replaced = replaced
        elif self.folder.is_dir() and any(not entry.name.endswith(".tmp") for entry in self.folder.iterdir()):
            raise ValueError(f"{self.folder} is there and is no run of train.py: choose another RUN_NAME")
        elif self.resume:
            raise ValueError(f"there is no run {name} to resume")
        self.begin(local)

    def leave_folder(self):
        """Let others have the folder; where this run came to no score, the one that it was to replace comes back."""
        if self.replaced:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.rename(self.replaced, self.folder)
        self.held.__exit__(None, None, None)

    def begin(self, local):
        """Write run.json of a new run, and with INIT=random the encoder that it starts from."""
        init = self.settings["INIT"]
        if local:  # "./" first where it lies beside the scripts, wherever those are moved to
            local = os.path.abspath(local)
            init = f"./{shown(local)}" if Path(local).is_relative_to(files.ROOT) else local
        versions = {module.__name__: module.__version__ for module in (torch, tokenizers, numpy)}
        run = {
            "settings": self.settings,
            "init": init,
            "conditions": self.conditions,
            "sources": recorded(),
            "finished": False,
            "seconds": 0.0,
            "versions": {"python": platform.python_version()} | versions,
            "platform": platform.platform(),
        }
        write_json(self.folder / "run.json", run)
        if init == "random":
            self.encoder.save_pretrained(self.folder / "start")

    def take_up(self, run):
        """Put the state of a stopped run back."""
        name = self.folder.name
        if run["finished"]:
            raise ValueError(f"{name} is finished: there is nothing to resume")
        was, now = run["settings"] | run["conditions"], self.settings | self.conditions
        for knob, value in now.items():
            if was.get(knob) != value:
                raise ValueError(f"{name} was begun with {knob}={was.get(knob)!r}, now it is {value!r}")
        if (self.folder / "state.pt").exists():
            state = load_state(self.folder / "state.pt")
            self.rows = read_metrics(self.folder, state["step"])
            self.encoder.load_state_dict(state["encoder"])
            self.optimizer.load_state_dict(state["optimizer"])
            random_source(self.device).set_rng_state(state["random"])
            self.done = state["step"]
        elif (self.folder / "model.safetensors").exists():
            raise ValueError(f"{name} has lost its state.pt: begin again with OVERWRITE=True")
        elif self.settings["INIT"] == "random":  # stopped before its first state
            self.encoder.save_pretrained(self.folder / "start")

    def update(self, **news):
        """Add to run.json."""
        write_json(self.folder / "run.json", read_run(self.folder) | news)

    # ---- the loop

    def steps(self, batches, total, batch_size):
        """Number the batches from 1 on, less those that a resumed run has behind it, under a progress bar."""
        self.batch_size = batch_size
        print(f"{stsb_label()}, validation: {self.rows[-1]['spearman']:.2f} at step {self.done}")
        quiet = 1 if sys.stderr.isatty() else 30  # seconds between two lines of a bar that is kept in a file
        with tqdm(total=total, initial=self.done, unit="step", mininterval=quiet) as self.bar:
            for step, batch in enumerate(islice(batches, self.done, None), start=self.done + 1):
                self.clock = time.time()
                yield step, batch
                self.bar.update()

    def log(self, loss):
        """Take note of a step's loss, a scalar tensor; raises ValueError where it is not finite, within a second."""
        self.losses.append(loss.detach())
        look = time.time() - self.looked > 1  # seldom, as to read a loss is to wait for the GPU
        last = self.finite_losses()[-1] if look else None
        self.trained_steps += 1
        self.trained_seconds += time.time() - self.clock
        if look:
            score = f"{stsb_label().split(',')[0]} {self.rows[-1]['spearman']:.2f}"
            speed = f"{self.sentences_per_second():.0f} sentences/s"
            self.bar.set_postfix_str(f"loss {last:.3g}, {score}, {speed}", refresh=False)
            self.looked = time.time()

    def sentences_per_second(self):
        """The rate of the steps alone, without the scores between them."""
        return self.trained_steps * self.batch_size / self.trained_seconds if self.trained_seconds else 0.0

    def finite_losses(self):
        """The losses since the last score as floats; raises ValueError where one is not finite."""
        losses = torch.stack(self.losses).tolist()
        for step, value in enumerate(losses, start=self.rows[-1]["step"] + 1):
            if not math.isfinite(value):
                kept = "there was no score yet, so no encoder was kept"
                if any(rank(row) > -math.inf for row in self.rows[1:]):
                    kept = f"the best encoder up to step {self.rows[-1]['step']} is in {shown(self.folder)}"
                raise ValueError(
                    f"the loss is {value} at step {step}: a lower LEARNING_RATE may help; {kept}"
                )
        return losses

    def record(self, step, scores):
        """Write a row of metrics.csv and draw it; keep the encoder if it is the best, and the state to go on from.

        scores: a dict of floats with the key spearman, by which the best is chosen.
        """
        losses = self.finite_losses() if self.losses else []
        row = {"step": step, "loss": sum(losses) / len(losses) if losses else None, **scores}
        best = max(map(rank, self.rows[1:]), default=-math.inf)
        self.losses.clear()
        self.rows.append(row)
        write_table(self.folder / "metrics.csv", self.rows)
        titles = TITLES | {"spearman": f"Spearman x 100 ({stsb_label()})"}
        draw_curves(self.folder, self.rows, {column: titles[column] for column in row if column in titles})
        if step and rank(row) > best:
            self.encoder.save_pretrained(self.folder)
        state = {"encoder": self.encoder.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}
        save_state(self.folder / "state.pt", state | {"random": random_source(self.device).get_rng_state()})
        self.update(seconds=self.seconds_before + time.time() - self.started, last=row)
        if self.replaced:
            replaced, self.replaced = self.replaced, None
            shutil.rmtree(replaced)

    def finish(self):
        """Mark the run as finished and say how it went; raises ValueError where no score was defined."""
        best = max(self.rows[1:], key=rank)
        if math.isnan(best["spearman"]):
            problem = "no score was defined, as the embeddings are all the same or not finite"
            raise ValueError(f"{problem}: no encoder was kept")
        speed = self.sentences_per_second()
        self.update(finished=True, start=self.rows[0], best=best, sentences_per_second=speed)
        os.remove(self.folder / "state.pt")
        before, last = self.rows[0]["spearman"], self.rows[-1]["spearman"]
        scores = f"{before:.2f} before, {best['spearman']:.2f} at best (step {best['step']}), {last:.2f} at the end"
        print(f"{stsb_label()}, validation: {scores}")
        print(f"encoder, metrics.csv and curves.png in {shown(self.folder)}")
