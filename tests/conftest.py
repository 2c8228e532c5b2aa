"""What the tests share: a place to work in, and scripts run as a reader runs them."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core, so a thread a process
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

import config
import evaluate
from support import files, runs
from support.command_line import constants

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data" / "stsb_sample"
SHARED = ROOT.parent / "shared" / "data"  # more data, where it is at hand
TINY = {
    "INIT": "random",
    "N_LAYER": 1,
    "N_EMBD": 32,
    "N_HEAD": 2,
    "N_POSITIONS": 64,
    "VOCAB_SIZE": 300,
    "BATCH_SIZE": 8,
    "EVAL_INTERVAL": 4,
}


def sample_sentences():
    with open(SAMPLE / "validation.csv", encoding="utf-8", newline="") as file:
        return [row["sentence1"] for row in csv.DictReader(file)]


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """An empty place to work in: tiny settings, 80 sentences, 40 pairs of the sample, folders of its own."""
    monkeypatch.setattr(files, "DATA", tmp_path / "data")
    monkeypatch.setattr(files, "CHECKPOINTS", tmp_path / "checkpoints")
    for name, value in (constants([config]) | TINY).items():
        monkeypatch.setattr(config, name, value)
    monkeypatch.setattr(runs, "draw_curves", lambda *_: None)  # drawing takes longer than these runs
    evaluate.load_sts_b.cache_clear()
    (tmp_path / "data" / "stsb").mkdir(parents=True)
    text = "\n".join(sample_sentences()[:80])
    (tmp_path / "data" / "sentences.txt").write_text(text, encoding="utf-8")
    for split in ("validation", "test"):
        lines = (SAMPLE / f"{split}.csv").read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / "data" / "stsb" / f"{split}.csv").write_text("".join(lines[:41]), encoding="utf-8")
    (tmp_path / "data" / "sources.json").write_text('{"stsb": {"sample": true}}')
    yield tmp_path
    evaluate.load_sts_b.cache_clear()


def script(*command, cwd=ROOT, **environment):
    """Run a script in a process of its own: script("train.py", "SEED=1") or script("-m", "pretraining.pretrain")."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=120,
        env=os.environ | environment,
    )


def contents(folder):
    """Every file below a folder with its bytes, less run.json, which holds seconds."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != "run.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def own_copy(folder):
    """Copy the scripts and their packages, to be run, edited and killed elsewhere. Returns TINY as arguments."""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("support/*.py"), *ROOT.glob("pretraining/*.py")):
        copy = Path(folder) / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    return [f"{name}={value}" for name, value in TINY.items()]
