"""The ablations: variants over seeds, a stop in the middle, what is not run twice, and what the tables tell."""

import contextlib
import csv
import math
import re
import shutil
import statistics

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import config as root_config
import evaluate
import train
from experiments import ablations, config, run_variant
from experiments.figures import summary
from experiments.variants import RECIPES, VARIANTS
from model import SimCSEEncoder
from pretraining import config as pretraining_config
from pretraining import pretrain
from support import command_line, files, runs
from tests.conftest import ROOT, own_copy, script

CONFIGS = [root_config, config]
LAB = {
    "dropout": {
        "p = 0": {"DROPOUT": 0.0},
        "p = 0.1": {"DROPOUT": 0.1},
        "one mask, p = 0.1": {"FIXED_MASK": True},
    },
    "head": {
        "head in training only": {"USE_MLP_HEAD": True},
        "head in both": {"USE_MLP_HEAD": True, "HEAD_AT_EVALUATION": True},
    },
}


@pytest.fixture
def lab(workshop, monkeypatch):
    """A workshop in which the ablations have few variants, a score every 4 of 10 steps, and results of their own."""
    for name in list(VARIANTS):
        monkeypatch.delitem(VARIANTS, name)
    for name, variants in LAB.items():
        monkeypatch.setitem(VARIANTS, name, variants)
    for name, value in command_line.constants([config]).items():
        monkeypatch.setattr(config, name, value)
    config.ONLY, config.SEEDS, config.EVAL_INTERVAL = "dropout", "0", root_config.EVAL_INTERVAL
    root_config.LEARNING_RATE, root_config.PRECISION = 1e-3, "float32"
    monkeypatch.setattr(ablations, "RESULTS", workshop / "results")
    return workshop


def run_here(arguments):
    """python -m experiments.run_variant with some arguments, without the seconds that a process takes to start."""
    before = [(module, command_line.constants([module])) for module in CONFIGS]
    evaluate.load_sts_b.cache_clear()
    try:
        command_line.override(arguments, CONFIGS, run_variant.KNOBS)
        run_variant.main()
    finally:
        for module, values in before:
            vars(module).update(values)


def ablate():
    ablations.main(run=run_here)


@contextlib.contextmanager
def counted_steps(stop_at=None):
    """A list with an entry for every step of an optimizer; at the one with the number stop_at, Ctrl-C."""
    made = []

    def step(*_):
        made.append(1)
        if len(made) == stop_at:
            raise KeyboardInterrupt

    hook = register_optimizer_step_post_hook(step)
    try:
        yield made
    finally:
        hook.remove()


def table(folder, name="ablations.csv", without=()):
    with open(folder / "results" / name, encoding="utf-8", newline="") as file:
        return [{k: v for k, v in row.items() if k not in without} for row in csv.DictReader(file)]


# ---- what is run, and what is not


def test_after_a_stop_it_goes_on_and_ends_as_if_it_had_not_been_stopped(lab):
    config.SEEDS = "0,1"
    with counted_steps(stop_at=17), pytest.raises(KeyboardInterrupt):  # in the second run of ten steps
        ablate()
    assert [(row["variant"], row["seed"]) for row in table(lab)] == [("p = 0", "0")]
    with counted_steps() as steps:
        ablate()
    assert len(steps) == 6 + 4 * 10  # from step 4 of the second run on, where its last score was
    rows, ways = table(lab, without=["seconds"]), table(lab, "ablations_steps.csv")
    assert [(row["variant"], row["seed"]) for row in rows] == [(v, s) for v in LAB["dropout"] for s in "01"]
    assert list(files.CHECKPOINTS.iterdir()) == []
    with counted_steps() as steps:
        ablate()
    assert not steps  # all have their rows
    shutil.rmtree(lab / "results")
    ablate()
    assert table(lab, without=["seconds"]) == rows and table(lab, "ablations_steps.csv") == ways
    made = {path.name for path in (lab / "results").iterdir() if not path.name.startswith(".")}
    assert made == {"ablations.csv", "ablations_steps.csv", "ablations_dropout.png", "figure2.png"}


def test_what_groups_share_runs_once_and_what_has_changed_again(lab, capsys):
    config.ONLY = "dropout,head"
    with counted_steps() as steps:
        ablate()
    assert len(steps) == 4 * 10  # "head in training only" is p = 0.1
    rows = {row["variant"]: row for row in table(lab)}
    shared = rows["p = 0.1"]
    assert rows["head in training only"] == shared | {"group": "head", "variant": "head in training only"}
    assert rows["head in both"]["dev_start"] != shared["dev_start"]

    config.ONLY, root_config.LEARNING_RATE = "head", 2e-3
    capsys.readouterr()
    with counted_steps() as steps:
        ablate()
    assert len(steps) == 2 * 10 and len(table(lab)) == 5 + 2  # the rows of before stay
    printed = capsys.readouterr().out.splitlines()[-2:]
    new = table(lab)[-2:]
    for line, row in zip(printed, new, strict=True):  # and are not averaged with the new ones
        assert line.startswith(row["variant"]) and f"{float(row['dev_best']):.1f} ± 0.0" in line

    (lab / "data" / "stsb" / "test.csv").write_text("sentence1,sentence2,score\na b,a,1\nb,c d e,2\n")
    with counted_steps() as steps:
        ablate()
    assert len(steps) == 2 * 10 and len(table(lab)) == 7 + 2
    ways = table(lab, "ablations_steps.csv")
    assert len(ways) == 8 * 4 and len({(row["setup"], row["step"]) for row in ways}) == len(ways)

    root_config.PRECISION = "bfloat16"
    with counted_steps() as steps:
        ablate()
    assert len(steps) == 2 * 10
    assert [row["precision"] for row in table(lab)] == 9 * ["float32"] + 2 * ["bfloat16"]


def test_another_encoder_in_the_same_folder_is_another_run(lab):
    train.starting_encoder(train.load_sentences()).save_pretrained(lab / "start")
    config.ONLY, root_config.INIT = "head", str(lab / "start")
    ablate()
    root_config.INIT, root_config.SEED = "random", 9
    train.starting_encoder(train.load_sentences()).save_pretrained(lab / "start")
    root_config.INIT, root_config.SEED = str(lab / "start"), 42
    ablate()
    rows = table(lab)
    assert [row["variant"] for row in rows] == 2 * list(LAB["head"])
    assert rows[0]["settings"] == rows[2]["settings"] and rows[0]["dev_start"] != rows[2]["dev_start"]


def test_a_finished_run_without_its_row_counts_for_its_own_data_alone(lab):
    def stopped_at_its_end(arguments):
        run_here(arguments)
        raise KeyboardInterrupt

    config.ONLY = "head"
    with pytest.raises(KeyboardInterrupt):
        ablations.main(run=stopped_at_its_end)
    path = lab / "data" / "sentences.txt"
    sentences = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(sentences[::-1]), encoding="utf-8")
    with counted_steps() as steps:
        ablate()
    assert len(steps) == 2 * 10
    path.write_text("\n".join(sentences), encoding="utf-8")
    with counted_steps() as steps:
        ablate()
    assert len(steps) == 10  # the second variant
    assert [row["variant"] for row in table(lab)] == 2 * list(LAB["head"])


@pytest.mark.parametrize(
    "name, content",
    [("run.json", b'{"settin'), ("run.json", None), ("state.pt", b""), ("metrics.csv", None)],
)
def test_a_damaged_run_begins_again(lab, name, content):
    config.ONLY = "head"
    with counted_steps(stop_at=6), pytest.raises(KeyboardInterrupt):
        ablate()
    (path,) = files.CHECKPOINTS.glob(f"ablation-*/{name}")
    path.unlink() if content is None else path.write_bytes(content)
    with counted_steps() as steps:
        ablate()
    assert len(table(lab)) == 2 and len(steps) == 2 * 10


def test_a_run_begun_with_other_threads_begins_again(lab):
    config.ONLY = "head"
    with counted_steps(stop_at=6), pytest.raises(KeyboardInterrupt):
        ablate()
    (path,) = files.CHECKPOINTS.glob("ablation-*/run.json")
    begun = runs.read_run(path.parent)
    begun["conditions"]["threads"] += 1
    files.write_json(path, begun)
    with counted_steps() as steps:
        ablate()
    assert len(table(lab)) == 2 and len(steps) == 2 * 10


def test_a_second_ablation_says_who_holds_the_table(lab):
    with files.lock(lab / "results" / "ablations.csv", "the table of results"):
        with pytest.raises(OSError, match=r"the table of results is in use by process \d+: wait until"):
            ablate()
    assert not (lab / "results" / "ablations.csv").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"group;variant\na;b\n", "group,variant\na,b\n".encode("utf-16"), b"a\n" + 200_000 * b"x"],
)
@pytest.mark.parametrize("name", ["ablations.csv", "ablations_steps.csv"])
def test_a_table_of_another_kind_is_refused_before_anything_runs(lab, name, content):
    (lab / "results").mkdir()
    (lab / "results" / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is not as ablations.py writes it"):
        ablations.main(run=lambda arguments: pytest.fail("it ran"))
    assert (lab / "results" / name).read_bytes() == content


def test_a_row_cut_off_is_refused(lab):
    ablate()
    path = lab / "results" / "ablations.csv"
    path.write_text(path.read_text()[:-400])
    with pytest.raises(ValueError, match="a column too many or too few"):
        ablate()


@pytest.mark.parametrize(
    "knobs, words",
    [
        ({"ONLY": "dropuot"}, "dropuot.*dropout"),
        ({"ONLY": ""}, "must name"),
        ({"SEEDS": "1;2"}, "whole numbers"),
        ({"SEEDS": "0,-1"}, "whole numbers"),
        ({"SEEDS": "4294967296"}, "whole numbers"),
    ],
)
def test_refused(lab, knobs, words):
    vars(config).update(knobs)
    with pytest.raises(ValueError, match=words):
        ablate()


def test_a_start_that_is_not_there_is_left_out_by_name(lab, monkeypatch, capsys):
    half, plain = str(lab / "half"), str(lab / "plain")
    train.starting_encoder(train.load_sentences()).save_pretrained(half)
    monkeypatch.setitem(RECIPES, plain, "CLS_WEIGHT=0")
    monkeypatch.setitem(RECIPES, half, "MAX_TOKENS=5")
    starts = {"random weights": {"INIT": "random"}, "plain": {"INIT": plain}, "half": {"INIT": half}}
    monkeypatch.setitem(VARIANTS, "start", starts)
    config.ONLY = "start"
    ablate()
    assert [row["variant"] for row in table(lab)] == ["random weights", "half"]
    said = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert len(said) == 1
    assert said[0].endswith(f"python -m pretraining.pretrain MLM_FOLDER={plain} CLS_WEIGHT=0")


# ---- the command lines


def test_every_variant_and_every_recipe_is_a_command_line(workshop, monkeypatch):
    for module in [*CONFIGS, pretraining_config]:
        for name, value in command_line.constants([module]).items():
            monkeypatch.setattr(module, name, value)  # put back afterwards
    for group, variants in VARIANTS.items():
        for variant, knobs in variants.items():
            command_line.override(
                [f"{name}={value}" for name, value in knobs.items()], CONFIGS, run_variant.KNOBS
            )
            for name, value in knobs.items():
                assert command_line.constants(CONFIGS)[name] == value, (group, variant, name)
    for recipe in RECIPES.values():
        command_line.override(recipe.split(), [root_config, pretraining_config], pretrain.KNOBS)


def test_typed_and_edited_are_alike(lab):
    def edit():
        root_config.DROPOUT, config.MAX_SENTENCES = 0.3, 70

    def type_in():
        command_line.override(["DROPOUT=0.3", "MAX_SENTENCES=70"], CONFIGS, ablations.KNOBS)

    found = []
    before = [(module, command_line.constants([module])) for module in CONFIGS]
    for change in (edit, type_in):
        change()
        found.append(ablations.knobs_of("head", "head in both", 3))
        for module, values in before:
            vars(module).update(values)
    assert found[0] == found[1]
    assert (found[0]["DROPOUT"], found[0]["MAX_SENTENCES"], found[0]["SEED"]) == (0.3, 70, 3)
    assert found[0]["USE_MLP_HEAD"] and found[0]["HEAD_AT_EVALUATION"]


def test_seeds_are_not_given_as_seed():
    with pytest.raises(ValueError, match="does not read SEED: did you mean SEEDS?"):
        command_line.override(["SEED=1"], CONFIGS, ablations.KNOBS)


def test_a_run_that_fails_ends_the_ablations(capfd):
    with pytest.raises(ValueError, match="exit status 2"):
        ablations.run_as_process(["DROPUOT=0.1"])
    assert "did you mean DROPOUT?" in capfd.readouterr().err


def test_as_it_is_typed(workshop):
    """Processes of their own, the results in the repository's own folder, what is typed handed on to every run."""
    tiny = own_copy(workshop)
    shutil.copytree(ROOT / "experiments", workshop / "experiments", ignore=shutil.ignore_patterns("results"))
    command = [
        "-m",
        "experiments.ablations",
        *tiny,
        "ONLY=pooling",
        "SEEDS=5",
        "MAX_SENTENCES=40",
        "EVAL_INTERVAL=5",
    ]
    done = script(*command, cwd=workshop, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    with open(workshop / "experiments" / "results" / "ablations.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["seed"], row["step_last"]) for row in rows] == [
        ("cls", "5", "5"),
        ("mean", "5", "5"),
    ]
    assert "POOLER=mean" in rows[1]["settings"] and "MAX_SENTENCES=40" in rows[1]["settings"]
    for row, line in zip(rows, done.stdout.splitlines()[-2:], strict=True):
        numbers = [float(row[name]) for name in ("dev_start", "dev_best", "dev_last", "test_best")]
        assert re.split(r" {2,}", line) == [
            row["variant"],
            "1",
            *(f"{number:.1f} ± 0.0" for number in numbers),
        ]


# ---- what the tables tell


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_row_is_what_train_py_gives(lab, precision):
    config.ONLY, config.SEEDS, root_config.PRECISION = "dropout,head", "5", precision
    ablate()
    rows = {row["variant"]: row for row in table(lab)}
    root_config.SEED, root_config.RUN_NAME = 5, "alone"
    train.main()
    encoder = SimCSEEncoder.from_pretrained(files.CHECKPOINTS / "alone")
    now, row = evaluate.measure(encoder), rows["p = 0.1"]
    for name, column in (
        ("spearman", "dev_best"),
        ("alignment", "alignment_best"),
        ("uniformity", "uniformity_best"),
    ):
        assert float(row[column]) == pytest.approx(now[name], abs=1e-9)
    assert float(row["test_best"]) == pytest.approx(evaluate.evaluate_stsb(encoder, "test"), abs=1e-9)
    assert row["dev_start"] != row["dev_best"]
    # measuring more, with a head or without, changes nothing of the training
    alone = [scores["loss"] for scores in runs.read_metrics(files.CHECKPOINTS / "alone")][1:]
    for variant in ("p = 0.1", "head in both"):
        ways = [way for way in table(lab, "ablations_steps.csv") if way["setup"] == rows[variant]["setup"]]
        assert [float(way["loss"]) for way in ways[1:]] == alone


def test_the_head_at_evaluation_is_the_head_of_training(lab):
    encoder = train.starting_encoder(train.load_sentences()).eval()
    sentences = train.load_sentences()[:9]
    with torch.no_grad():
        expected = encoder.encode(*encoder.tokenize(sentences), project=True)
    found = torch.from_numpy(evaluate.encode_sentences(run_variant.with_head(encoder), sentences))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_length_is_how_the_cosine_goes_with_the_difference_of_lengths(lab):
    rows = ["sentence1,sentence2,score", "a b c,a b,1", "a,a b c d,2", "c d,c d,3", "a b c d e f,a,4"]
    (lab / "data" / "stsb" / "validation.csv").write_text("\n".join(rows))
    encoder = train.starting_encoder(train.load_sentences()).eval()
    differences, cosines = [1, 3, 0, 5], []
    for row in rows[1:]:
        one, other, _ = row.split(",")
        with torch.no_grad():
            z1, z2 = (encoder.encode(*encoder.tokenize([sentence])) for sentence in (one, other))
        cosines.append(torch.cosine_similarity(z1.double(), z2.double()).item())

    def ranks(values):
        return [sorted(values).index(value) for value in values]

    expected = 100 * statistics.correlation(ranks(differences), ranks(cosines))
    assert run_variant.measure_sts_b(encoder)["length"] == pytest.approx(expected)


# bfloat16's errors are about 1e-4 in the mean of 32 losses; leaving the head out would change it by 3e-3
@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-4), ("bfloat16", 1e-3)])
def test_views_are_the_two_that_training_compares(lab, precision, tolerance):
    root_config.PRECISION = precision
    ablate()
    none, some, fixed = table(lab)
    assert float(none["views_alignment_start"]) < 1e-9 and float(none["views_alignment_last"]) < 1e-9
    assert float(fixed["views_alignment_last"]) < 1e-9 < 1e-4 < float(some["views_alignment_last"])
    # without dropout, by hand: the positive's cosine is 1, the negatives are what they are
    root_config.SEED, root_config.DROPOUT = 0, 0.0
    encoder = train.starting_encoder(train.load_sentences()).eval()
    idx, attention_mask = encoder.tokenize(train.load_sentences()[:32], root_config.MAX_SEQ_LEN)
    losses = []
    for rows in torch.arange(32).split(8):
        z = encoder.encode(idx[rows], attention_mask[rows], project=True).detach()
        z = torch.nn.functional.normalize(z, dim=1)
        for i, row in enumerate((z @ z.T).tolist()):
            losses.append(-math.log(math.exp(row[i] / 0.05) / sum(math.exp(x / 0.05) for x in row)))
    assert float(none["views_loss_start"]) == pytest.approx(statistics.mean(losses), abs=tolerance)


def test_views_are_measured_under_the_same_masks_at_every_call(lab):
    encoder = train.starting_encoder(train.load_sentences())
    first = run_variant.measure_views(encoder, train.load_sentences())
    drawn = torch.rand(3)
    assert run_variant.measure_views(encoder, train.load_sentences()) == first
    torch.manual_seed(root_config.SEED)
    train.starting_encoder(train.load_sentences())  # draws what the first one did
    assert torch.equal(torch.rand(3), drawn)


def test_summary_is_mean_and_deviation(lab):
    rows = [{"group": "dropout", "variant": "p = 0", "dev_best": str(x)} for x in (1, 2, 6)]
    expected = {"p = 0": (3, pytest.approx(statistics.stdev([1, 2, 6])), 3)}
    assert summary(rows, "dropout", "dev_best") == expected
