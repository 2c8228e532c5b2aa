"""Run folders: where a training run keeps its settings, metrics, curves, and what it needs to go on after a stop."""

import contextlib
import csv
import hashlib
import io
import os
import platform
import re
import shutil
import signal

import numpy
import tokenizers
import torch
from matplotlib.figure import Figure
from safetensors.torch import load, save as to_safetensors

import config
from checkpoint import FILES, find, local_folder, read_json, write_atomically, write_json
from config import first_line
from evaluate import load_sts_b


def training_settings():
    """The knobs on which the outcome of a run of train.py depends, as a dict."""
    names = config.knobs_of("train.py")
    return {name: getattr(config, name) for name in names if name not in ("DEVICE", "RUN_NAME", "OVERWRITE", "RESUME")}


def fingerprints(sentences, init, splits=("validation",)):
    """SHA-256, by name, of what a run reads: the sentences, splits of STS-B, and the files of its starting encoder.

    init: that encoder's folder, name on the Hub, or "random".
    """
    stsb = [(sentences1, sentences2, scores.tolist()) for sentences1, sentences2, scores in map(load_sts_b, splits)]
    digests = {"corpus": hashlib.sha256("\n".join(sentences).encode()), "stsb": hashlib.sha256(repr(stsb).encode()),
               "init": hashlib.sha256()}
    folder = find(init) if init != "random" else ""
    for path in (os.path.join(folder, name) for name in FILES if folder):
        if os.path.exists(path):
            with open(path, "rb") as file:
                digests["init"].update(file.read())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def conditions(sentences, init, device):
    """What the outcome of a run depends on beside its settings: what it reads, and what it computes on. A dict."""
    # threads: a floating-point sum depends on how it is split among them
    return fingerprints(sentences, init) | {"threads": torch.get_num_threads(), "device": device.type}


def run_folder(name):
    """The folder of a run under checkpoints/; "" names it after the settings that differ from the defaults."""
    changed = [f"{name}={value}" for name, value in training_settings().items() if value != config.DEFAULTS[name]]
    return os.path.join(config.checkpoints, name or re.sub(r"[^\w=.+-]+", "_", "-".join(["simcse"] + changed))[:200])


def read_run(folder):
    """What run.json of a run folder says, as a dict; raises ValueError where it is damaged."""
    run = read_json(folder, "run.json")
    if not {"settings", "data", "finished", "seconds", "init"} <= set(run):
        raise ValueError(f"{os.path.join(folder, 'run.json')} is not as train.py writes it: begin again under another RUN_NAME")
    return run


def open_run(folder, init, data):
    """Make the folder of a new run, or see whether a stopped one can go on. Returns whether it has a state to go on from.

    init: its starting encoder; data: what its outcome depends on beside the settings; both go to run.json with the versions.
    Raises ValueError where the folder is taken and neither RESUME nor OVERWRITE says what to do with it.
    """
    name, settings = os.path.basename(folder), training_settings()
    local = local_folder(init) if init != "random" else None
    init = os.path.abspath(local) if local else init
    if (os.path.realpath(init) + os.sep).startswith(os.path.realpath(folder) + os.sep):
        raise ValueError(f"INIT={init} lies in the folder of the run itself: choose another RUN_NAME")
    if os.path.exists(os.path.join(folder, "run.json")):
        run = read_run(folder)
        if config.RESUME:
            if run["finished"]:
                raise ValueError(f"{name} is finished: there is nothing to resume")
            was, now = run["settings"] | run["data"], settings | data
            for knob in now:
                if was.get(knob) != now[knob]:
                    raise ValueError(f"{name} was begun with {knob}={was.get(knob)!r}, now it is {now[knob]!r}")
            if os.path.exists(os.path.join(folder, "state.safetensors")):
                return True
            if os.path.exists(os.path.join(folder, "model.safetensors")):
                raise ValueError(f"{name} has lost its state.safetensors: begin again with OVERWRITE=True")
        elif not config.OVERWRITE:
            raise ValueError(f"{name} is there already, " + ("finished: " if run["finished"] else
                             "unfinished: go on with RESUME=True, ") + "name another with RUN_NAME=, or replace it with OVERWRITE=True")
        old = os.path.join(os.path.dirname(folder), f".{name}.old")         # a name that no run can have
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)                  # in one step, then at leisure
        shutil.rmtree(old)
    elif os.path.isdir(folder) and any(not entry.endswith(".tmp") for entry in os.listdir(folder)):
        raise ValueError(f"{folder} is there and is no run of train.py: choose another RUN_NAME")
    elif config.RESUME:
        raise ValueError(f"there is no run {name} to resume")
    os.makedirs(folder, exist_ok=True)
    versions = {module.__name__: module.__version__ for module in (torch, tokenizers, numpy)}
    write_json(os.path.join(folder, "run.json"), {
        "settings": settings, "init": config.portable(init), "data": data, "finished": False, "seconds": 0.0,
        "versions": {"python": platform.python_version()} | versions,
        "platform": platform.platform()})
    return False


def update_run(folder, **news):
    """Add to run.json."""
    write_json(os.path.join(folder, "run.json"), read_run(folder) | news)


@contextlib.contextmanager
def stop_signals():
    """A list that fills when the process is told to stop (Ctrl-C, kill), so that the step at hand can be finished."""
    received = []
    before = {number: signal.signal(number, lambda *_: received.append(True)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def random_source(device):
    """The module whose get_rng_state and set_rng_state govern the dropout masks on a device."""
    return torch if device.type == "cpu" else torch.get_device_module(device)


def save_state(folder, encoder, optimizer, step, device):
    """Write all that the rest of a run depends on into state.safetensors, in one step."""
    tensors = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    for i, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{key}": tensor for key, tensor in moments.items()}
    tensors |= {"random": random_source(device).get_rng_state(), "step": torch.tensor(step)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(os.path.join(folder, "state.safetensors"), to_safetensors(tensors))


def load_state(folder, encoder, optimizer, device):
    """Put the state of save_state back; returns the step it was saved after. Raises ValueError where it is damaged."""
    path = os.path.join(folder, "state.safetensors")
    try:
        with open(path, "rb") as file:                  # not load_file, whose tensors stay in the file that a save replaces
            tensors = load(file.read())
    except Exception as error:          # safetensors has its own for each kind of damage
        raise ValueError(f"{path} can't be read ({first_line(error)}): begin again with OVERWRITE=True") from None
    encoder.load_state_dict({name.removeprefix("encoder."): tensor for name, tensor in tensors.items()
                             if name.startswith("encoder.")})
    moments = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, i, key = name.split(".")
            moments.setdefault(int(i), {})[key] = tensor
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    random_source(device).set_rng_state(tensors["random"])
    return int(tensors["step"])


def write_table(path, rows):
    """Write rows, dicts with the same keys, as a CSV file, in one step."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def save_figure(figure, path):
    """Write a figure as PNG, in one step."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=100)
    write_atomically(path, image.getvalue())


def draw_curves(folder, rows, titles):
    """Draw columns of the rows over their "step" into curves.png, one picture a title (a dict from column to title)."""
    figure = Figure(figsize=(4 * len(titles), 3.5), layout="constrained")
    for axis, (column, title) in zip(figure.subplots(1, len(titles)), titles.items()):
        points = [(row["step"], row[column]) for row in rows if row[column] is not None]
        axis.plot([step for step, _ in points], [value for _, value in points], marker=".")
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    save_figure(figure, os.path.join(folder, "curves.png"))


def read_metrics(folder, last_step=None):
    """The rows of metrics.csv, numbers as numbers, empty cells as None; up to last_step, which must be there.

    Raises ValueError where the file is damaged.
    """
    path = os.path.join(folder, "metrics.csv")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [{key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)]
        rows = [row | {"step": int(row["step"])} for row in rows if last_step is None or row["step"] <= last_step]
        if last_step is not None and (not rows or rows[0]["step"] != 0 or rows[-1]["step"] != last_step
                                      or None in [value for row in rows for key, value in row.items() if key != "loss"]):
            raise ValueError(f"it is not whole up to step {last_step}")
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} can't be read ({first_line(error)}): begin again with OVERWRITE=True") from None
    return rows
