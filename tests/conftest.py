"""What the tests share: a place to work in, and scripts run as a reader runs them."""

import csv
import os
import subprocess
import sys

import pytest

import config
import train

HERE = os.path.dirname(os.path.abspath(__file__))
SAMPLE = os.path.join(HERE, "data", "stsb_sample")
TINY = dict(INIT="random", DROPOUT=0.1, USE_MLP_HEAD=True, LEARNING_RATE=5e-5, N_LAYER=1, N_EMBD=32,
            N_HEAD=2, N_POSITIONS=64, VOCAB_SIZE=300, BATCH_SIZE=8, EPOCHS=1, EVAL_INTERVAL=4)


def sample_sentences():
    with open(os.path.join(SAMPLE, "validation.csv"), encoding="utf-8", newline="") as file:
        return [row["sentence1"] for row in csv.DictReader(file)]


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """An empty place to work in: tiny settings, a few sentences, 40 pairs of the sample, folders of its own."""
    monkeypatch.setattr(config, "data", str(tmp_path / "data"))
    monkeypatch.setattr(config, "checkpoints", str(tmp_path / "checkpoints"))
    monkeypatch.setattr(config, "results", str(tmp_path / "results"))
    monkeypatch.setattr(config, "overridden", set())
    for name, value in (config.DEFAULTS | TINY).items():
        monkeypatch.setattr(config, name, value)
    monkeypatch.setattr(train, "draw_curves", lambda *_: None)      # drawing takes longer than these runs
    (tmp_path / "data" / "stsb").mkdir(parents=True)
    (tmp_path / "data" / "sentences.txt").write_text("\n".join(sample_sentences()[:80]), encoding="utf-8")
    for split in ("validation", "test"):
        with open(os.path.join(SAMPLE, f"{split}.csv"), encoding="utf-8") as file:
            (tmp_path / "data" / "stsb" / f"{split}.csv").write_text("".join(file.readlines()[:41]), encoding="utf-8")
    (tmp_path / "data" / "sources.json").write_text('{"stsb": {"sample": true}}')
    return tmp_path


def script(name, *arguments, cwd=HERE, **environment):
    """Run a script in a process of its own."""
    return subprocess.run([sys.executable, os.path.join(cwd, name), *arguments], cwd=cwd, text=True, capture_output=True,
                          timeout=120, env=os.environ | environment)


def contents(folder):
    """Every file below a folder with its bytes, less run.json, which holds seconds."""
    return {os.path.relpath(os.path.join(place, name), folder): open(os.path.join(place, name), "rb").read()
            for place, _, names in os.walk(folder) for name in names if name != "run.json"}
