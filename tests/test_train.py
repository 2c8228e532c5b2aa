"""train.py: the method against one written by hand, what a run leaves, and runs that stop, in both number formats."""

import ast
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import config
import evaluate
import train
from model import SimCSEEncoder
from support import files, runs
from tests.conftest import ROOT, TINY, contents, own_copy, sample_sentences, script

DRAW_CURVES = runs.draw_curves  # which the workshop leaves out


@pytest.fixture(params=["float32", "bfloat16"])
def precision(request, workshop):
    """Both number formats, whatever the hardware has: bfloat16 is emulated where it has none."""
    config.PRECISION = request.param
    return request.param


@pytest.fixture
def views(workshop, monkeypatch):
    """What the loss is given at each step of a run: a list that fills with pairs (z1, z2)."""
    seen, original = [], train.simcse_loss

    def loss(z1, z2, temperature):
        assert z1.requires_grad and z2.requires_grad  # both views learn
        seen.append((z1.detach().clone(), z2.detach().clone()))
        return original(z1, z2, temperature)

    monkeypatch.setattr(train, "simcse_loss", loss)
    return seen


def settings(**values):
    for name, value in values.items():
        assert hasattr(config, name)
        setattr(config, name, value)


def folder_of_run():
    return runs.run_folder(
        config.RUN_NAME, {name: getattr(config, name) for name in train.SETTINGS}, train.SETTINGS
    )


class Killed(Exception):
    pass


def stop_at(step, monkeypatch):
    """Train, but break off in the middle of a step."""
    original, left = train.simcse_loss, [step]

    def loss(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return original(*arguments)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(train, "simcse_loss", loss)
        train.main()


# ---- the method


@pytest.mark.parametrize("head, pooler", [(True, "cls"), (False, "cls"), (True, "mean")])
def test_five_steps_by_hand(precision, head, pooler):
    """Without dropout, and with all sentences in every batch, five steps give what equation 4 and AdamW give here."""
    settings(DROPOUT=0.0, USE_MLP_HEAD=head, POOLER=pooler, EPOCHS=5, EVAL_INTERVAL=1, LEARNING_RATE=2e-3)
    settings(WARMUP_RATIO=0.4, WEIGHT_DECAY=20.0, GRAD_CLIP=1.0, TEMPERATURE=0.1, MAX_SEQ_LEN=12)
    sentences = train.load_sentences()
    encoder = train.starting_encoder(sentences)
    idx, attention_mask = encoder.tokenize(sentences, 12)
    idx, first = np.unique(idx.numpy(), axis=0, return_index=True)
    idx, attention_mask = torch.from_numpy(idx), attention_mask[first]
    config.BATCH_SIZE = len(idx)

    trained = {n: p for n, p in encoder.named_parameters() if head or not n.startswith("mlp_head.")}
    matrices = [p for p in trained.values() if p.dim() == 2]
    others = [p for p in trained.values() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 20.0}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    before = evaluate.encode_sentences(encoder, sentences)
    losses, norms = [], []
    for share in (1 / 2, 1, 3 / 4, 2 / 4, 1 / 4):  # of the peak rate: up over two steps, down over the rest
        z = F.normalize(encoder.encode(idx, attention_mask, project=head), dim=-1)
        similarity = (z @ z.T / 0.1).exp()
        loss = (
            -(similarity.diagonal() / similarity.sum(dim=1)).log().mean()
        )  # both directions are the same here
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in trained.values()))
        for p in trained.values():
            p.grad *= min(1.0, 1.0 / norm)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * share
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm)
    assert max(norms) > 1  # some gradients were clipped
    expected = evaluate.encode_sentences(encoder, sentences)

    scores = itertools.count()  # each better than the one before: the last encoder is kept
    train.main(score=lambda encoder: {"spearman": float(next(scores))})
    found = evaluate.encode_sentences(SimCSEEncoder.from_pretrained(folder_of_run()), sentences)
    tolerance = {"float32": 1e-3, "bfloat16": 0.05}[precision]
    rows = runs.read_metrics(folder_of_run())
    assert [row["loss"] for row in rows[1:]] == pytest.approx(losses, rel=tolerance)
    assert np.abs(expected - before).mean() > 10 * np.abs(found - expected).mean()
    assert np.abs(found - expected).mean() < tolerance


def test_gradients_are_clipped(workshop):
    """Gradients of next to nothing move nothing, AdamW's epsilon being larger."""
    settings(GRAD_CLIP=1e-13, WEIGHT_DECAY=0.0, LEARNING_RATE=0.01)
    start = train.starting_encoder(train.load_sentences()).state_dict()
    train.main()
    end = SimCSEEncoder.from_pretrained(folder_of_run()).state_dict()
    moved = [
        name
        for name in end
        if not name.startswith("mlp_head.") and not torch.allclose(start[name], end[name], atol=1e-4)
    ]
    assert not moved


def test_the_two_views_are_under_different_masks(precision, views):
    settings(DROPOUT=0.1, EPOCHS=2)
    train.main()
    assert len(views) == 20
    for z1, z2 in views:
        assert z1.dtype == z2.dtype == torch.float32 and z1.shape == z2.shape == (8, 32)
        assert not torch.allclose(z1, z2, atol=0.05)


def test_fixed_mask_makes_the_views_equal(precision, views):
    settings(DROPOUT=0.1, FIXED_MASK=True, EPOCHS=2, BATCH_SIZE=80, LEARNING_RATE=1e-12)
    train.main()
    assert len(views) == 2 and all(torch.equal(z1, z2) for z1, z2 in views)
    # the next batch, of the same sentences in another order, draws others; without dropout it would find the same sums
    assert not torch.allclose(views[0][0].sum(dim=0), views[1][0].sum(dim=0), atol=0.5)


def test_without_dropout_the_views_are_equal(precision, views):
    settings(DROPOUT=0.0, EPOCHS=2, BATCH_SIZE=80, LEARNING_RATE=1e-12)
    train.main()
    assert len(views) == 2 and all(torch.equal(z1, z2) for z1, z2 in views)
    assert torch.allclose(views[0][0].sum(dim=0), views[1][0].sum(dim=0), atol=0.5)


def test_starting_encoder_follows_seed_dropout_and_pooler(workshop):
    def tokens():
        return train.starting_encoder(sample_sentences()).token_embedding.weight

    first = tokens()
    assert torch.equal(first, tokens())
    config.SEED = 43
    assert not torch.equal(first, tokens())
    train.starting_encoder(sample_sentences()).save_pretrained(workshop / "ck")
    settings(INIT=str(workshop / "ck"), DROPOUT=0.4, POOLER="mean")
    encoder = train.starting_encoder([])
    assert encoder.pooler == "mean" and encoder.embedding_dropout.p == encoder.blocks[0].dropout.p == 0.4


def test_max_sentences_caps_the_corpus(workshop):
    assert len(train.load_sentences()) == 80
    config.MAX_SENTENCES = 7
    assert train.load_sentences() == sample_sentences()[:7]


def test_equal_rows_leave_the_corpus(workshop):
    encoder = train.starting_encoder(sample_sentences())
    config.MAX_SEQ_LEN = 8
    sentences = sample_sentences()[:20]
    twice = [*sentences, sentences[0].upper(), "  " + sentences[1], sentences[2] + " and so on"]
    idx, attention_mask = train.tokenize_corpus(encoder, twice)
    different = dict.fromkeys(tuple(row) for row in encoder.tokenize(twice, 8)[0].tolist())
    assert [tuple(row) for row in idx.tolist()] == list(different) and len(
        idx
    ) <= 22  # in the order that they had
    assert attention_mask.shape == idx.shape and torch.equal(
        attention_mask, idx != encoder.tokenizer.token_to_id("[PAD]")
    )


def test_batches_are_a_random_permutation_in_each_epoch(workshop):
    config.EPOCHS = 2
    batches = [rows.tolist() for rows in train.random_batches(27)]
    assert [len(rows) for rows in batches] == [8] * 6  # the last three of 27 do not fill one
    first, second = sum(batches[:3], []), sum(batches[3:], [])
    assert len(set(first)) == len(set(second)) == 24 and set(first) | set(second) <= set(range(27))
    assert first != second and first != sorted(first)
    assert batches == [rows.tolist() for rows in train.random_batches(27)]
    config.SEED = 43
    assert batches != [rows.tolist() for rows in train.random_batches(27)]
    settings(
        EPOCHS=400
    )  # over many epochs every row stands everywhere, and none is left out more often than others
    orders = torch.stack(list(train.random_batches(27))).view(400, 24)
    assert abs(orders.double().mean(dim=0) - 13).max() < 5 * 7.8 / 400**0.5
    assert abs(orders.flatten().bincount() - 400 * 24 / 27).max() < 5 * (400 * 24 / 27 * 3 / 27) ** 0.5


def test_a_run_trains_on_what_the_batches_name(workshop, monkeypatch):
    """Every sentence once an epoch, as long as the longest of its batch, in training mode."""
    seen = []
    original = SimCSEEncoder.encode

    def encode(encoder, idx, attention_mask, project=False):
        if project:  # training, not evaluation
            assert encoder.training and attention_mask.any(dim=0).all()
            seen.append((idx, attention_mask))
        return original(encoder, idx, attention_mask, project)

    monkeypatch.setattr(SimCSEEncoder, "encode", encode)
    encoder = train.starting_encoder(train.load_sentences())
    idx, attention_mask = train.tokenize_corpus(encoder, train.load_sentences())
    train.main()
    assert len(seen) == 20 and len({batch.shape[1] for batch, _ in seen}) > 1

    def sentences(batches):
        return sorted(
            tuple(row[kept].tolist()) for batch in batches for row, kept in zip(*batch, strict=True)
        )

    assert (
        sentences(seen[0::2]) == sentences(seen[1::2]) == sentences([(idx, attention_mask)])
    )  # 80 fill ten batches


def test_learning_rate_climbs_then_falls(workshop):
    rates = [train.learning_rate(step, 100) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([config.LEARNING_RATE * n / 10 for n in range(1, 11)])
    assert rates[10:] == pytest.approx([config.LEARNING_RATE * (1 - n / 91) for n in range(1, 91)])
    assert rates[-1] > 0
    config.WARMUP_RATIO = 0.0
    assert train.learning_rate(1, 100) == config.LEARNING_RATE > train.learning_rate(2, 100)
    config.WARMUP_RATIO = 1.0
    assert train.learning_rate(100, 100) == config.LEARNING_RATE


# ---- what a run leaves


def test_training_learns_and_leaves_what_it_promises(precision, monkeypatch, capsys):
    monkeypatch.setattr(runs, "draw_curves", DRAW_CURVES)
    settings(EPOCHS=6, LEARNING_RATE=3e-3, POOLER="mean", EVAL_INTERVAL=15)
    train.main()
    folder, printed = folder_of_run(), capsys.readouterr().out
    rows = runs.read_metrics(folder)
    assert [row["step"] for row in rows] == [0, 15, 30, 45, 60]
    assert rows[0]["loss"] is None and rows[-1]["loss"] < 0.5 * rows[1]["loss"]
    assert list(rows[0]) == ["step", "loss", "spearman", "alignment", "uniformity"]
    run = json.loads((folder / "run.json").read_text())
    assert (
        run["finished"] and run["settings"]["N_EMBD"] == 32 and run["versions"]["torch"] == torch.__version__
    )
    assert run["conditions"]["precision"] == precision and f"on cpu in {precision}, into" in printed
    assert run["sources"] == {"stsb": {"sample": True}} and "sample, no benchmark, validation:" in printed
    assert run["start"] == rows[0] and run["last"] == rows[-1] and run["sentences_per_second"] > 0
    assert run["best"] == max(rows[1:], key=lambda row: row["spearman"])
    assert f"{run['best']['spearman']:.2f} at best (step {run['best']['step']})" in printed
    kept = evaluate.evaluate_stsb(SimCSEEncoder.from_pretrained(folder))
    assert kept == pytest.approx(run["best"]["spearman"], abs=1e-6)
    start = evaluate.evaluate_stsb(SimCSEEncoder.from_pretrained(folder / "start"))
    assert start == pytest.approx(rows[0]["spearman"], abs=1e-6)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "state.pt").exists() and not list(folder.glob("*.tmp"))


@pytest.mark.parametrize(
    "knobs", [{"DROPOUT": 0.0}, {"FIXED_MASK": True}, {"POOLER": "mean", "USE_MLP_HEAD": False}, {}]
)
def test_a_run_is_named_after_what_differs_from_the_chapter(workshop, knobs):
    settings(**knobs)
    train.main()
    (folder,) = (workshop / "checkpoints").glob("[!.]*")
    run = json.loads((folder / "run.json").read_text())
    assert run["finished"] and all(run["settings"][name] == value for name, value in knobs.items())
    assert set(re.findall(r"-([A-Z_]+)=", folder.name)) == {*TINY, *knobs}


def test_the_settings_are_those_of_config_py_as_shipped():
    lines = ast.parse((ROOT / "config.py").read_text(encoding="utf-8")).body[1:]
    shipped = {line.targets[0].id: ast.literal_eval(line.value) for line in lines}
    assert {name: shipped[name] for name in train.SETTINGS} == train.SETTINGS
    assert all(type(shipped[name]) is type(value) for name, value in train.SETTINGS.items())
    others = {"DEVICE", "PRECISION", "RUN_NAME", "OVERWRITE", "RESUME"}
    assert set(train.KNOBS) == set(train.SETTINGS) | others
    assert set(shipped) - set(train.KNOBS) == {"CORPUS", "STSB", "CHECKPOINT", "EVAL_POOLER", "SPLIT"}


def test_an_edit_of_config_py_and_an_argument_give_the_same_run(workshop):
    """Numbers as one would type them: 0 for a rate, 1_0 for a count."""
    values = {
        "DROPOUT": "0",
        "WEIGHT_DECAY": "0",
        "LEARNING_RATE": "1e-3",
        "EVAL_INTERVAL": "1_0",
        "USE_MLP_HEAD": "False",
    }
    typed, edited = workshop / "typed", workshop / "edited"
    for folder in (typed, edited):
        folder.mkdir()
        shutil.copytree(workshop / "data", folder / "data")
        tiny = own_copy(folder)
    text = (edited / "config.py").read_text(encoding="utf-8")
    for name, value in (line.split("=") for line in tiny):
        value = repr(value) if name == "INIT" else values.get(name, value)
        text = re.sub(rf"^{name} = \S+", f"{name} = {value}", text, flags=re.M)
    for name, value in values.items():
        text = re.sub(rf"^{name} = \S+", f"{name} = {value}", text, flags=re.M)
    (edited / "config.py").write_text(text, encoding="utf-8")
    arguments = tiny + [f"{name}={value}" for name, value in values.items()]
    for done in (script("train.py", *arguments, cwd=typed), script("train.py", cwd=edited)):
        assert done.returncode == 0, done.stderr
    names = [sorted(os.listdir(folder / "checkpoints")) for folder in (typed, edited)]
    assert names[0] == names[1] and sum(
        name.startswith("simcse-INIT=random-USE_MLP_HEAD=False-DROPOUT=0.0") for name in names[0]
    )
    assert contents(typed / "checkpoints") == contents(edited / "checkpoints")


def test_same_seed_same_bytes_and_another_seed_others(precision):
    results = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        settings(RUN_NAME=name, SEED=seed)
        train.main()
        results.append(contents(folder_of_run()))
    assert results[0] == results[1] and "model.safetensors" in results[0]
    assert results[0]["model.safetensors"] != results[2]["model.safetensors"]


def test_the_formats_differ_and_agree_within_rounding(workshop):
    found = []
    for name in ("float32", "bfloat16"):
        settings(RUN_NAME=name, PRECISION=name, EPOCHS=2, LEARNING_RATE=1e-3)
        train.main()
        found.append([(row["loss"], row["spearman"]) for row in runs.read_metrics(folder_of_run())[1:]])
    assert found[0] != found[1]
    assert np.abs(np.subtract(*found)[:, 0]).max() < 0.05 and np.abs(np.subtract(*found)[:, 1]).max() < 5


# ---- runs that stop


@pytest.mark.parametrize("step", [2, 5, 10])  # before the first score, after it, at the last step
def test_a_stopped_run_resumes_to_the_same_bytes(precision, monkeypatch, step):
    config.RUN_NAME = "whole"
    train.main()
    whole = contents(folder_of_run())
    config.RUN_NAME = "stopped"
    stop_at(step, monkeypatch)
    folder = folder_of_run()
    assert [row["step"] for row in runs.read_metrics(folder)] == list(range(0, step, 4))  # valid all the same
    with pytest.raises(ValueError, match="stopped is there already, unfinished: go on with RESUME=True"):
        train.main()
    config.RESUME = True
    train.main()
    assert contents(folder) == whole and "model.safetensors" in whole
    with pytest.raises(ValueError, match="stopped is finished: there is nothing to resume"):
        train.main()


def test_a_run_stopped_before_its_first_state_begins_again(precision, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    config.RUN_NAME = "r"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt, match="RESUME=True goes on"):
        patched.setattr(runs, "save_state", stop)  # metrics.csv has its first row by now
        train.main()
    config.RESUME = True
    train.main()
    resumed = contents(folder_of_run())
    settings(RESUME=False, OVERWRITE=True)
    train.main()
    assert contents(folder_of_run()) == resumed


def test_a_run_that_is_there_is_named_replaced_or_left(workshop):
    config.RUN_NAME = "mine"
    train.main()
    before = contents(folder_of_run())
    with pytest.raises(ValueError, match="mine is there already, finished: name another .*OVERWRITE=True"):
        train.main()
    assert contents(folder_of_run()) == before
    shutil.copytree(folder_of_run(), workshop / "checkpoints" / "mine.old")
    settings(OVERWRITE=True, SEED=7)
    train.main()
    assert contents(folder_of_run()) != before == contents(workshop / "checkpoints" / "mine.old")
    assert sorted(path.name for path in (workshop / "checkpoints").glob("[!.]*")) == ["mine", "mine.old"]
    assert not (workshop / "checkpoints" / ".mine.old").exists()
    settings(OVERWRITE=False, RESUME=True, RUN_NAME="other")
    with pytest.raises(ValueError, match="no run other to resume"):
        train.main()
    (workshop / "checkpoints" / "precious").mkdir()
    (workshop / "checkpoints" / "precious" / "thesis.txt").write_text("mine")
    settings(OVERWRITE=True, RESUME=False, RUN_NAME="precious")
    with pytest.raises(ValueError, match="no run of train.py"):
        train.main()
    assert (workshop / "checkpoints" / "precious" / "thesis.txt").read_text() == "mine"


def test_a_run_is_not_lost_to_a_mistake(workshop):
    """Neither OVERWRITE with something missing, nor INIT in the run's own folder, nor a lost state costs a run."""
    config.RUN_NAME = "mine"
    train.main()
    folder = folder_of_run()
    before = contents(folder)
    settings(OVERWRITE=True, INIT=str(folder))
    with pytest.raises(ValueError, match="lies in the folder of the run itself"):
        train.main()
    config.INIT = "random"
    os.rename(workshop / "data" / "stsb", workshop / "data" / "elsewhere")
    evaluate.load_sts_b.cache_clear()
    with pytest.raises(FileNotFoundError, match="download_data.py"):
        train.main()
    assert contents(folder) == before
    os.rename(workshop / "data" / "elsewhere", workshop / "data" / "stsb")
    run = json.loads(
        (folder / "run.json").read_text()
    )  # as if it had been stopped, and its state deleted by hand
    (folder / "run.json").write_text(json.dumps(run | {"finished": False}))
    settings(OVERWRITE=False, RESUME=True)
    with pytest.raises(ValueError, match="lost its state.pt"):
        train.main()
    assert contents(folder) == before


@pytest.mark.parametrize("problem", [ValueError, KeyboardInterrupt])
def test_a_run_is_replaced_only_once_there_is_a_score(workshop, problem):
    def score(encoder):
        raise problem

    config.RUN_NAME = "mine"
    train.main()
    before = contents(folder_of_run())
    settings(OVERWRITE=True, SEED=7)
    with pytest.raises(problem, match="^$"):  # and Ctrl-C names no way on, as there is none
        train.main(score)
    assert contents(folder_of_run()) == before and not list((workshop / "checkpoints").glob(".*.old"))


def another_format(workshop, monkeypatch):
    config.PRECISION = "bfloat16"


def another_temperature(workshop, monkeypatch):
    config.TEMPERATURE = 0.1


def more_sentences(workshop, monkeypatch):
    with open(workshop / "data" / "sentences.txt", "a", encoding="utf-8") as file:
        file.write("\nOne more sentence that was not there before.\n")


def fewer_pairs(workshop, monkeypatch):
    path = workshop / "data" / "stsb" / "validation.csv"
    path.write_text(
        "".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8"
    )


def more_threads(workshop, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)


def another_start(workshop, monkeypatch):
    settings(SEED=5, INIT="random")
    train.starting_encoder(sample_sentences()).save_pretrained(workshop / "start")
    settings(SEED=42, INIT=str(workshop / "start"))


@pytest.mark.parametrize(
    "change, said",
    [
        (another_format, "begun with precision='float32', now it is 'bfloat16'"),
        (another_temperature, "begun with TEMPERATURE=0.05, now it is 0.1"),
        (more_sentences, "begun with corpus="),
        (fewer_pairs, "begun with stsb="),
        (more_threads, r"begun with threads=\d+, now it is 77"),
        (another_start, "begun with init="),
    ],
)
def test_resume_refuses_what_would_give_another_run(workshop, monkeypatch, change, said):
    train.starting_encoder(sample_sentences()).save_pretrained(workshop / "start")
    settings(RUN_NAME="r", PRECISION="float32", INIT=str(workshop / "start"))
    stop_at(6, monkeypatch)
    before = contents(folder_of_run())
    config.RESUME = True
    change(workshop, monkeypatch)
    with pytest.raises(ValueError, match=said) as caught:
        train.main()
    assert "\n" not in str(caught.value) and contents(folder_of_run()) == before


def test_a_fingerprint_sees_the_middle_of_the_data(workshop):
    path = workshop / "data" / "stsb" / "validation.csv"
    lines = ["sentence1,sentence2,score", *(f"a {i},b {i},{i % 6}" for i in range(1500))]
    path.write_text("\n".join(lines) + "\n")
    sentences = train.load_sentences()
    before = runs.fingerprints(sentences, config.INIT)
    lines[700] = "a 699,b 699,0.5"
    path.write_text("\n".join(lines) + "\n")
    now = runs.fingerprints(sentences, config.INIT)
    assert {name for name in now if now[name] != before[name]} == {"stsb"}
    assert (
        runs.fingerprints([*sentences[:40], "another", *sentences[41:]], config.INIT)["corpus"]
        != now["corpus"]
    )


@pytest.mark.parametrize("name", ["run.json", "metrics.csv", "state.pt"])
@pytest.mark.parametrize("damage", ["cut off", "a bit flipped", "empty"])
def test_a_damaged_run_is_not_resumed(workshop, monkeypatch, name, damage):
    config.RUN_NAME = "r"
    stop_at(6, monkeypatch)
    path = workshop / "checkpoints" / "r" / name
    content = bytearray(path.read_bytes())
    if damage == "a bit flipped":
        place = {"run.json": 0, "metrics.csv": content.find(b"\n") + 1, "state.pt": len(content) // 2}[name]
        content[place] ^= 0b0100_0000
    path.write_bytes({"cut off": content[:25], "a bit flipped": content, "empty": b""}[damage])
    config.RESUME = True
    with pytest.raises(ValueError, match=f"{name} (can't be read|is not valid JSON)") as caught:
        train.main()
    assert "\n" not in str(caught.value)


def test_a_run_json_of_another_program_is_refused(workshop):
    (workshop / "checkpoints" / "r").mkdir(parents=True)
    (workshop / "checkpoints" / "r" / "run.json").write_text('{"settings": {}}')
    settings(RUN_NAME="r", OVERWRITE=True)
    with pytest.raises(ValueError, match="run.json is not as train.py writes it"):
        train.main()


def test_a_loss_that_is_not_finite_stops_with_step_and_advice(workshop, monkeypatch):
    original, calls = train.simcse_loss, []

    def loss(z1, z2, temperature):
        calls.append(1)
        return original(z1, z2, temperature) * (math.nan if len(calls) == bad else 1)

    monkeypatch.setattr(train, "simcse_loss", loss)
    for bad, kept in ((6, "step 4 is in"), (2, "no encoder was kept")):
        calls.clear()
        config.RUN_NAME = f"bad at {bad}"
        with pytest.raises(ValueError, match=f"the loss is nan at step {bad}: .*LEARNING_RATE.*{kept}"):
            train.main()
    SimCSEEncoder.from_pretrained(workshop / "checkpoints" / "bad at 6")


def test_scores_that_are_all_undefined_end_in_one_line(workshop):
    with pytest.raises(ValueError, match="no score was defined.*no encoder was kept"):
        train.main(score=lambda encoder: {"spearman": math.nan})
    assert not (folder_of_run() / "model.safetensors").exists()


def test_the_best_of_defined_and_undefined_scores_is_kept(workshop):
    scores = iter([3.0, math.nan, 7.0, 5.0])  # before training, and at steps 4, 8, 10
    train.main(score=lambda encoder: {"spearman": next(scores), "width": 32.0})
    rows = runs.read_metrics(folder_of_run())
    assert [row["width"] for row in rows] == [32.0] * 4 and math.isnan(rows[1]["spearman"])
    assert json.loads((folder_of_run() / "run.json").read_text())["best"]["step"] == 8


def test_a_full_disk_costs_no_more_than_the_steps_since_the_last_score(precision, monkeypatch):
    """Whichever write fails, that is one line, no half of a file stays, and the run goes on to the same bytes."""
    config.RUN_NAME = "whole"
    train.main()
    whole, sync, left = contents(folder_of_run()), os.fsync, []

    def full(descriptor):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    config.RUN_NAME = "full"
    for room in (1, 3, 11, 15, 2):  # files, of which the last one does not fit
        left[:] = [room]
        config.RESUME = (files.CHECKPOINTS / "full" / "run.json").exists()
        with monkeypatch.context() as patched, pytest.raises(OSError) as caught:
            patched.setattr(os, "fsync", full)
            train.main()
        said = str(caught.value)
        assert said.endswith("can't be written: No space left on device") and "\n" not in said
        assert not list((files.CHECKPOINTS / "full").glob("**/*.tmp"))
    train.main()
    assert contents(folder_of_run()) == whole


def test_training_refuses_what_cannot_work(workshop):
    for values, said in (
        ({"BATCH_SIZE": 81}, "BATCH_SIZE=81 is more than there is to train on: 80 of 80 sentences differ"),
        ({"MAX_SEQ_LEN": 65}, "MAX_SEQ_LEN=65 .* 64 positions"),
        ({"DEVICE": "cuda:9"}, "DEVICE=cuda:9"),
        ({"DEVICE": "abacus"}, "DEVICE=abacus"),
        ({"N_HEAD": 5}, "width 32 .* 5"),
    ):
        before = {name: getattr(config, name) for name in values}
        settings(**values)
        with pytest.raises(ValueError, match=said):
            train.main()
        settings(**before)
    path = workshop / "data" / "sentences.txt"
    path.write_bytes(b"caf\xe9 au lait\n" * 50)
    with pytest.raises(ValueError, match="is not UTF-8 .*CORPUS="):
        train.main()
    path.write_text("The very same sentence again.\n" * 200)
    with pytest.raises(ValueError, match="1 of 200 sentences differ within their first 32 tokens"):
        train.main()
    os.remove(path)
    with pytest.raises(FileNotFoundError, match="download_data.py"):
        train.main()
    assert not (workshop / "checkpoints").exists()  # nothing was begun


# ---- as processes


def start(*arguments, cwd):
    """Start train.py; what runs in the background ignores Ctrl-C unless it is told not to."""
    return subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_rows(process, folder, n):
    """Wait until metrics.csv has n rows."""
    metrics = folder / "metrics.csv"
    while not metrics.exists() or metrics.read_text().count("\n") < n + 1:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_two_at_once_and_kill_9(workshop, monkeypatch):
    """The second names the first and touches nothing; the lock dies with its process, and the run can go on."""
    monkeypatch.setattr(runs, "draw_curves", DRAW_CURVES)
    settings(EPOCHS=3, EVAL_INTERVAL=10, RUN_NAME="whole")
    train.main()
    config.RUN_NAME = "r"
    folder, arguments = folder_of_run(), [*own_copy(workshop), "EPOCHS=3", "EVAL_INTERVAL=10", "RUN_NAME=r"]
    first = start(*arguments, cwd=workshop)
    try:
        wait_for_rows(first, folder, 2)
        first.send_signal(signal.SIGSTOP)  # alive, and as slow as need be
        before = contents(folder)
        said = f"the run r is in use by process {first.pid}: wait until it ends, or stop it"
        second = script("train.py", *arguments, "OVERWRITE=True", cwd=workshop)
        assert (second.returncode, second.stderr) == (1, f"error: {said}\n")
        for way in ({}, {"RESUME": True}, {"OVERWRITE": True}):
            settings(**{"RESUME": False, "OVERWRITE": False} | way)
            with pytest.raises(OSError, match=f"^{said}$"):
                train.main()
        assert contents(folder) == before
    finally:
        first.kill()
        first.communicate()
    done = script("train.py", *arguments, "RESUME=True", cwd=workshop)
    assert done.returncode == 0, done.stderr
    found = {name: data for name, data in contents(folder).items() if not name.endswith(".tmp")}
    assert found == contents(workshop / "checkpoints" / "whole")


def test_ctrl_c(workshop):
    process = start(*own_copy(workshop), "EPOCHS=1000", "RUN_NAME=r", cwd=workshop)
    try:
        wait_for_rows(process, workshop / "checkpoints" / "r", 3)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in said
    assert said.splitlines()[-1] == "stopped; RESUME=True goes on from the last score"
    assert len(runs.read_metrics(workshop / "checkpoints" / "r")) >= 3
    SimCSEEncoder.from_pretrained(workshop / "checkpoints" / "r")


KILL = """
import os, random, signal, sys
import train
from support import command_line, files
plan = random.Random(int(sys.argv.pop()))
places = {"step": (train, "simcse_loss", plan.randint(1, 10)), "write": (os, "fsync", plan.randint(1, 20)),
          "rename": (os, "replace", plan.randint(1, 20))}
module, name, left = places[plan.choice(list(places))]
original = getattr(module, name)
def deadly(*arguments):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
setattr(module, name, deadly)
command_line.run(train.main, "train.py", [train.config], train.KNOBS)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number_format", ["float32", "bfloat16"])
def test_killed_twenty_times_the_run_ends_with_the_same_bytes(workshop, number_format):
    """SIGKILL at random steps, in the middle of random writes and before random renames; each time the run goes on."""
    knobs = [*own_copy(workshop), "EPOCHS=16", "EVAL_INTERVAL=8", f"PRECISION={number_format}"]  # 160 steps
    assert script("train.py", *knobs, "RUN_NAME=whole", cwd=workshop).returncode == 0
    whole, kills, seed, finished = contents(workshop / "checkpoints" / "whole"), 0, 0, 0
    while kills < 20 or not finished:
        seed += 1
        folder = (
            workshop / "checkpoints" / f"killed{finished}"
        )  # one that gets through is compared, another begun
        arguments = [*knobs, f"RUN_NAME={folder.name}", *["RESUME=True"] * (folder / "run.json").exists()]
        command = ["-c", KILL, *arguments, str(seed)] if kills < 20 else ["train.py", *arguments]
        done = script(*command, cwd=workshop)
        if done.returncode == 0:
            finished += 1
            found = {name: data for name, data in contents(folder).items() if not name.endswith(".tmp")}
            assert found == whole
            continue
        assert done.returncode == -signal.SIGKILL, done.stderr
        kills += 1
        if (folder / "metrics.csv").exists():
            runs.read_metrics(folder)
        if (folder / "model.safetensors").exists():
            SimCSEEncoder.from_pretrained(folder)
