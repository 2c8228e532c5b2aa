"""The benchmark measures what it says, with the peer or without."""

import multiprocessing
import shutil
import sys

import numpy as np
import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

import config as root_config
import train
from experiments import benchmark, config
from support import files
from support.command_line import constants
from tests.conftest import ROOT, own_copy, sample_sentences, script

# python -m experiments.benchmark on a machine that has no accelerate
WITHOUT_ACCELERATE = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "accelerate" else find(name, *more)
from experiments import benchmark
from support import command_line
configs = [benchmark.root_config, benchmark.config]
command_line.run(benchmark.main, "-m experiments.benchmark", configs, benchmark.KNOBS)
"""


def write_many_sentences(folder):
    lines = [f"{sentence[:-1]} number {i}." for i in range(9) for sentence in sample_sentences()[:120]]
    (folder / "data" / "sentences.txt").write_text("\n".join(lines), encoding="utf-8")


def test_without_the_peer_ours_is_measured(workshop):
    tiny = own_copy(workshop)
    shutil.copytree(ROOT / "experiments", workshop / "experiments", ignore=shutil.ignore_patterns("results"))
    write_many_sentences(workshop)
    knobs = [knob for knob in tiny if not knob.startswith("EVAL_INTERVAL")]
    knobs += ["ROUNDS=1", "DEVICE=cpu", "PRECISION=float32"]
    done = script("-c", WITHOUT_ACCELERATE, *knobs, cwd=workshop, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "left out, as there is no accelerate" in lines[0]
    assert [line.split()[:3] for line in lines[-2:]] == [
        ["train", "ours", "float32"],
        ["encode", "ours", "float32"],
    ]
    for line in lines[-2:]:
        speed, spread, ratio, _, memory = line.split()[3:]
        assert float(speed) > 1 and ratio == "1.00" and 50 < float(memory) < 5000
        assert spread == f"{speed}-{speed}"  # one round
    assert list((workshop / "checkpoints").iterdir()) == []


def test_ours_trains_on_every_whole_batch(workshop):
    lines = sample_sentences()[:83]
    (workshop / "data" / "sentences.txt").write_text("\n".join(lines), encoding="utf-8")
    train.starting_encoder(lines).save_pretrained(workshop / "start")
    root_config.INIT, root_config.RUN_NAME, root_config.OVERWRITE = str(workshop / "start"), "bench", True
    root_config.EVAL_INTERVAL = benchmark.NEVER
    steps = []
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    work = benchmark.train_ours()
    speeds = [work(), work()]
    hook.remove()
    assert len(steps) == 2 * (83 // 8) and min(speeds) > 1
    # it counts the time to tokenise, which the run itself does not
    assert speeds[1] < files.read_json(files.CHECKPOINTS / "bench" / "run.json")["sentences_per_second"]


@pytest.mark.slow
@pytest.mark.parametrize("contender", benchmark.CONTENDERS["encode"])
def test_all_encode(workshop, contender):
    write_many_sentences(workshop)
    train.starting_encoder(train.load_sentences()).save_pretrained(workshop / "start")
    root_config.INIT = str(workshop / "start")
    assert benchmark.CONTENDERS["encode"][contender]()() > 1


@pytest.mark.slow
def test_the_peer_trains(workshop):
    pytest.importorskip("accelerate")
    train.starting_encoder(train.load_sentences()).save_pretrained(workshop / "start")
    root_config.INIT, root_config.PRECISION = str(workshop / "start"), "float32"
    steps = []
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    speed = benchmark.train_theirs()()
    hook.remove()
    assert len(steps) == 10 and speed > 1


def child_memory(pipe):
    before = benchmark.peak_memory()
    held = np.ones(25_000_000)  # 200 MB
    pipe.send((before, benchmark.peak_memory(), held.nbytes / 1e6))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell")
def test_peak_memory_is_the_process_own():
    held = np.ones(250_000_000)  # 2 GB that the child must not be charged with
    pipe, end = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=child_memory, args=(end,)).start()
    before, after, new = pipe.recv()
    assert before < 1500 < held.nbytes / 1e6 <= benchmark.peak_memory()
    assert after - before == pytest.approx(new, rel=0.1)


def test_too_few_sentences_are_refused(workshop):
    with pytest.raises(ValueError, match="80 sentences are too few to measure with: 1,000 are needed"):
        benchmark.main()


def test_a_contender_that_fails_is_named(workshop, monkeypatch, capfd):
    monkeypatch.setattr(config, "ROUNDS", 1)
    knobs = {name: constants([root_config])[name] for name in train.KNOBS} | {"INIT": str(workshop / "none")}
    with pytest.raises(ValueError, match="encode, ours has failed: what it said is above"):
        benchmark.take_turns("encode", ["ours"], knobs)
    assert "no such folder" in capfd.readouterr().err
