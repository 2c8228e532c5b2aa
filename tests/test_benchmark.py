"""The benchmark measures what it says, with the peer or without."""

import importlib.util
import multiprocessing
import sys

import numpy as np
import pytest

import benchmark
import config
import train
from conftest import sample_sentences


def test_without_the_peer_ours_is_measured(workshop, monkeypatch, capsys):
    lines = [f"{sentence[:-1]} number {i}." for i in range(9) for sentence in sample_sentences()[:120]]
    (workshop / "data" / "sentences.txt").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "accelerate" else find(name, *more))
    monkeypatch.setattr(benchmark, "computes_in_bf16", lambda device: False)
    config.DEVICE = "cpu"
    benchmark.main()
    out = capsys.readouterr().out.splitlines()
    assert "left out, as there is no accelerate" in out[0] and [line.split()[:2] for line in out[-2:]] == [["train", "ours"], ["encode", "ours"]]
    for line in out[-2:]:
        speed, spread, ratio, _, memory = line.split()[3:]
        assert float(speed) > 1 and ratio == "1.00" and 50 < float(memory) < 5000
        assert spread == f"{speed}-{speed}"                                         # one round


def test_ours_trains_on_every_batch(workshop, monkeypatch):
    train.starting_encoder(sample_sentences()).save_pretrained(workshop / "ck")
    steps, step = [], train.train_step
    monkeypatch.setattr(train, "train_step", lambda *arguments: steps.append(arguments[2].shape) or step(*arguments))
    monkeypatch.setattr(train, "computes_in_bf16", train.computes_in_bf16)      # put back what the contender sets
    benchmark.train_ours(str(workshop / "ck"), False)(sample_sentences()[:83])
    assert len(steps) == 10 and all(shape[0] == 8 for shape in steps)


def child_memory(pipe):
    before = benchmark.peak_memory()
    held = np.ones(25_000_000)                          # 200 MB
    pipe.send((before, benchmark.peak_memory(), held.nbytes / 1e6))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell")
def test_peak_memory_is_the_process_own():
    held = np.ones(250_000_000)                         # 2 GB that the child must not be charged with
    pipe, end = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=child_memory, args=(end,)).start()
    before, after, new = pipe.recv()
    assert before < 1500 < held.nbytes / 1e6 <= benchmark.peak_memory()
    assert after - before == pytest.approx(new, rel=0.1)


def test_too_few_sentences_are_refused(workshop):
    with pytest.raises(ValueError, match="80 sentences are too few"):
        benchmark.main()
