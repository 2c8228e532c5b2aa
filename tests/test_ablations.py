"""The lab: variants over seeds, a stop in the middle, and what is not run twice."""

import csv
import math
import statistics

import pytest
import torch

import ablations
import config
import train
from evaluate import evaluate_stsb, measure
from model import SimCSEEncoder


@pytest.fixture
def lab(workshop, monkeypatch):
    variants = {"dropout": {"p = 0": {"DROPOUT": 0.0}, "p = 0.1": {"DROPOUT": 0.1}, "one mask, p = 0.1": {"FIXED_MASK": True}},
                "head": {"head in training only": {}, ablations.HEAD_IN_BOTH: {}}}
    monkeypatch.setattr(ablations, "VARIANTS", variants)
    monkeypatch.setattr(ablations, "SMALL", {})
    config.ONLY, config.SEEDS, config.LEARNING_RATE = "dropout", "0,1", 1e-3
    return workshop


def table(folder, name="ablations.csv", *leave_out):
    with open(folder / "results" / name, encoding="utf-8", newline="") as file:
        return [{key: value for key, value in row.items() if key not in leave_out} for row in csv.DictReader(file)]


def test_two_variants_resume_after_a_stop_and_end_as_if_there_had_been_none(lab, monkeypatch):
    before = {name: getattr(config, name) for name in config.DEFAULTS}
    step, steps, save = train.train_step, [], SimCSEEncoder.save_pretrained

    def stopping(*arguments):
        steps.append(1)
        if len(steps) == 17:                        # the second run of ten steps, after its first score
            raise KeyboardInterrupt
        return step(*arguments)
    monkeypatch.setattr(train, "train_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        ablations.main()
    assert {name: getattr(config, name) for name in config.DEFAULTS} == before
    assert SimCSEEncoder.save_pretrained is save and train.measure is measure
    assert [(row["variant"], row["seed"]) for row in table(lab)] == [("p = 0", "0")]
    ablations.main()
    assert len(steps) == 17 + 6 + 40                # from step 4 of the second run, where its last score was; four more runs
    rows, ways = table(lab, "ablations.csv", "seconds"), table(lab, "ablations_steps.csv")
    assert [(row["variant"], row["seed"]) for row in rows] == [(variant, seed) for variant in ablations.VARIANTS["dropout"]
                                                               for seed in ("0", "1")]
    ablations.main()
    assert len(steps) == 17 + 6 + 40                # what has its row is not run again
    for path in (lab / "results").iterdir():
        path.unlink()
    ablations.main()
    assert table(lab, "ablations.csv", "seconds") == rows and table(lab, "ablations_steps.csv") == ways
    assert {path.name for path in (lab / "results").iterdir()} == {"ablations.csv", "ablations_steps.csv", "ablations_dropout.png",
                                                                   "figure2.png"}


def test_a_row_is_what_train_py_gives(lab, capsys):
    config.SEEDS = "5"
    ablations.main()
    row = table(lab)[1]
    config.SEED, config.RUN_NAME = 5, "alone"
    train.main()
    encoder = SimCSEEncoder.from_pretrained(str(lab / "checkpoints" / "alone"))
    assert float(row["test_best"]) == pytest.approx(evaluate_stsb(encoder, "test"), abs=1e-9)
    now = measure(encoder)
    for name in ("alignment", "uniformity", "length"):
        assert float(row[f"{name}_best"]) == pytest.approx(now[name], abs=1e-9)
    assert float(row["dev_best"]) == pytest.approx(now["spearman"], abs=1e-9) and row["dev_start"] != row["dev_best"]


def test_shared_settings_run_once_changed_ones_again(lab, monkeypatch, capsys):
    step, steps = train.train_step, []
    monkeypatch.setattr(train, "train_step", lambda *arguments: steps.append(1) or step(*arguments))
    config.SEEDS, config.ONLY = "0", "dropout,head"
    ablations.main()
    assert len(steps) == 4 * 10                     # "head in training only" is p = 0.1
    rows = {row["variant"]: row for row in table(lab)}
    assert rows["head in training only"]["dev_last"] == rows["p = 0.1"]["dev_last"] != rows["head in both"]["dev_last"]
    config.ONLY, config.LEARNING_RATE = "head", 2e-3
    capsys.readouterr()
    ablations.main()
    assert len(steps) == 6 * 10 and len(table(lab)) == 5 + 2            # rows of other settings stay, and are not averaged with them
    assert [line.split()[-13] for line in capsys.readouterr().out.splitlines()[-2:]] == ["1", "1"]
    (lab / "data" / "stsb" / "test.csv").write_text("sentence1,sentence2,score\na b,a,1\nb,c d e,2\n")
    ablations.main()
    assert len(steps) == 8 * 10 and len(table(lab)) == 7 + 2
    ways = table(lab, "ablations_steps.csv")
    assert len(ways) == 8 * 4 and len({(row["setup"], row["step"]) for row in ways}) == len(ways)


def test_another_encoder_in_the_same_folder_is_another_run(lab):
    train.starting_encoder(train.load_sentences()).save_pretrained(str(lab / "ck"))
    config.INIT, config.ONLY, config.SEEDS = str(lab / "ck"), "head", "0"
    ablations.main()
    config.INIT, config.SEED = "random", 9
    train.starting_encoder(train.load_sentences()).save_pretrained(str(lab / "ck"))
    config.INIT, config.SEED = str(lab / "ck"), 42
    ablations.main()
    rows = table(lab)
    assert [row["variant"] for row in rows] == 2 * list(ablations.VARIANTS["head"])
    assert rows[0]["settings"] == rows[2]["settings"] and rows[0]["dev_start"] != rows[2]["dev_start"]


def test_a_finished_run_without_its_row_counts_only_for_its_own_data(lab, monkeypatch):
    config.SEEDS, config.ONLY = "0", "head"

    def stop(*arguments):
        raise KeyboardInterrupt
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ablations, "write_table", stop)         # between the run's end and its row
        ablations.main()
    sentences = (lab / "data" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    (lab / "data" / "sentences.txt").write_text("\n".join(sentences[::-1]), encoding="utf-8")
    step, steps = train.train_step, []
    monkeypatch.setattr(train, "train_step", lambda *arguments: steps.append(1) or step(*arguments))
    with ablations.as_variant("head", "head in training only", 0) as folder:
        ablations.run(folder)
    assert len(steps) == 10
    with ablations.as_variant("head", "head in training only", 0) as folder:
        ablations.run(folder)
    assert len(steps) == 10


@pytest.mark.parametrize("content", [b"", b"group;variant\na;b\n", "group,variant\na,b\n".encode("utf-16"), b"a\n" + 200_000 * b"x"])
@pytest.mark.parametrize("name", ["ablations.csv", "ablations_steps.csv"])
def test_a_table_of_another_kind_is_refused_before_anything_runs(lab, name, content, monkeypatch):
    monkeypatch.setattr(train, "main", lambda: pytest.fail("it trained"))
    (lab / "results").mkdir(exist_ok=True)
    (lab / "results" / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is not as ablations.py writes it"):
        ablations.main()
    assert (lab / "results" / name).read_bytes() == content


def test_a_row_cut_off_is_refused(lab):
    config.SEEDS = "0"
    ablations.main()
    path = lab / "results" / "ablations.csv"
    path.write_text(path.read_text()[:-300])
    with pytest.raises(ValueError, match="a column too many or too few"):
        ablations.main()


def test_views_are_the_two_that_training_compares(lab):
    config.SEEDS = "0"
    ablations.main()
    none, some, fixed = table(lab)
    assert float(none["views_alignment_start"]) == float(none["views_alignment_last"]) == 0
    assert float(fixed["views_alignment_last"]) < 1e-9 < 1e-4 < float(some["views_alignment_last"])
    # without dropout, by hand: the positive's cosine is 1, the negatives are what they are
    config.SEED, config.DROPOUT = 0, 0.0
    encoder = train.starting_encoder(train.load_sentences()).eval()
    losses = []
    idx, attention_mask = encoder.tokenize(train.load_sentences()[:32], config.MAX_SEQ_LEN)
    for rows in torch.arange(32).split(8):
        z = torch.nn.functional.normalize(encoder.encode(idx[rows], attention_mask[rows], project=True).detach(), dim=1)
        losses += [-math.log(math.exp(row[i] / 0.05) / sum(math.exp(x / 0.05) for x in row))
                   for i, row in enumerate((z @ z.T).tolist())]
    assert float(none["views_loss_start"]) == pytest.approx(statistics.mean(losses), abs=1e-4)


def test_summary_is_mean_and_deviation(lab):
    rows = [{"group": "dropout", "variant": "p = 0", "dev_best": str(x)} for x in (1, 2, 6)]
    assert ablations.summary(rows, "dropout", "dev_best") == {"p = 0": (3, pytest.approx(statistics.stdev([1, 2, 6])), 3)}


@pytest.mark.parametrize("knobs, words", [({"ONLY": "dropuot"}, "dropuot.*dropout"), ({"ONLY": ""}, "must name"),
                                          ({"SEEDS": "1;2"}, "whole numbers"), ({"SEEDS": "0,-1"}, "whole numbers")])
def test_refused(lab, knobs, words):
    for name, value in knobs.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=words):
        ablations.main()


def test_a_start_that_is_not_shipped_is_left_out_by_name(lab, monkeypatch, capsys):
    train.starting_encoder(train.load_sentences()).save_pretrained(str(lab / "half"))
    monkeypatch.setattr(ablations, "RECIPES", {str(lab / "plain"): "CLS_WEIGHT=0", str(lab / "half"): "MAX_TOKENS=5"})
    monkeypatch.setattr(ablations, "VARIANTS", {"start": {"random weights": {}, "plain": {"INIT": str(lab / "plain")},
                                                          "half": {"INIT": str(lab / "half")}}})
    config.ONLY, config.SEEDS = "start", "0"
    ablations.main()
    assert [row["variant"] for row in table(lab)] == ["random weights", "half"]
    left_out = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert len(left_out) == 1 and left_out[0].endswith(f"python pretrain.py MLM_FOLDER={lab / 'plain'} CLS_WEIGHT=0")


@pytest.mark.parametrize("name, content", [("run.json", b'{"settin'), ("run.json", None), ("state.safetensors", b""), ("metrics.csv", None)])
def test_a_damaged_run_begins_again(lab, monkeypatch, name, content):
    config.SEEDS, config.ONLY = "0", "head"
    step, steps = train.train_step, []

    def stopping(*arguments):
        steps.append(1)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return step(*arguments)
    monkeypatch.setattr(train, "train_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        ablations.main()
    path = lab / "checkpoints" / "ablations" / "head_head_in_training_only_0" / name
    path.write_bytes(content) if content is not None else path.unlink()
    ablations.main()
    assert len(table(lab)) == 2 and len(steps) == 6 + 20


def test_knobs_that_the_lab_sets_itself_are_refused(lab, monkeypatch):
    monkeypatch.setattr(config, "overridden", {"SEED", "MAX_SENTENCES"})
    with pytest.raises(ValueError, match="sets SEED by itself"):
        ablations.main()
