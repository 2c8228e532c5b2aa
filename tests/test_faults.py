"""Stops, damage and mistakes: each either works or ends in one clear line, with nothing half-written."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import checkpoint
import config
import evaluate
import runs
import train
from conftest import HERE, TINY, contents, sample_sentences, script
from fake_hub import serve
from model import SimCSEEncoder


# ---------------------------------------------------------------------------- runs that stop

class Killed(Exception):
    pass


def test_a_stopped_run_resumes_to_the_same_bytes(workshop, monkeypatch):
    config.RUN_NAME = "whole"
    train.main()
    original = train.simcse_loss
    for step in (2, 5, 10):                     # before the first score, after it, at the last step
        calls = []

        def loss(*arguments):
            calls.append(1)
            if len(calls) == step:
                raise Killed
            return original(*arguments)
        config.RUN_NAME, config.RESUME = f"stopped at {step}", False
        monkeypatch.setattr(train, "simcse_loss", loss)
        with pytest.raises(Killed):
            train.main()
        monkeypatch.setattr(train, "simcse_loss", original)
        folder = runs.run_folder(config.RUN_NAME)
        assert [row["step"] for row in runs.read_metrics(folder)] == list(range(0, step, 4))     # valid all the same
        with pytest.raises(ValueError, match=f"stopped at {step} is there already, unfinished: go on with RESUME=True"):
            train.main()
        config.RESUME = True
        train.main()
        assert contents(folder) == contents(workshop / "checkpoints" / "whole")
        with pytest.raises(ValueError, match="finished"):
            train.main()


def test_what_becomes_of_a_run_that_is_there(workshop):
    config.RUN_NAME = "mine"
    train.main()
    before = contents(runs.run_folder(config.RUN_NAME))
    with pytest.raises(ValueError, match="mine is there already, finished: name another .*OVERWRITE=True"):
        train.main()
    assert contents(runs.run_folder(config.RUN_NAME)) == before
    config.OVERWRITE, config.SEED = True, 7
    train.main()
    assert contents(runs.run_folder(config.RUN_NAME)) != before
    config.OVERWRITE, config.RESUME, config.RUN_NAME = False, True, "other"
    with pytest.raises(ValueError, match="no run other to resume"):
        train.main()
    (workshop / "checkpoints" / "precious").mkdir()
    (workshop / "checkpoints" / "precious" / "thesis.txt").write_text("mine")
    config.OVERWRITE, config.RESUME, config.RUN_NAME = True, False, "precious"
    with pytest.raises(ValueError, match="no run of train.py"):
        train.main()
    assert (workshop / "checkpoints" / "precious" / "thesis.txt").exists()


def test_replacing_a_run_touches_no_other(workshop):
    config.RUN_NAME = "base"
    train.main()
    shutil.copytree(runs.run_folder("base"), runs.run_folder("base.old"))
    before = contents(runs.run_folder("base.old"))
    config.OVERWRITE = True
    train.main()
    assert contents(runs.run_folder("base.old")) == before
    assert sorted(os.listdir(config.checkpoints)) == ["base", "base.old"]


def test_a_run_stopped_before_its_first_state_begins_again(workshop, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt
    config.RUN_NAME = "r"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(train, "save_state", stop)                  # metrics.csv has its first row by now
        train.main()
    config.RESUME = True
    train.main()
    done = contents(runs.run_folder("r"))
    config.RESUME, config.OVERWRITE = False, True
    train.main()
    again = contents(runs.run_folder("r"))
    assert done["model.safetensors"] == again["model.safetensors"] and done["metrics.csv"] == again["metrics.csv"]


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
    assert runs.fingerprints([*sentences[:40], "another", *sentences[41:]], config.INIT)["corpus"] != now["corpus"]


def test_a_run_is_not_lost_to_a_mistake(workshop):
    """Neither OVERWRITE with something missing, nor INIT in the run's own folder, nor a lost state costs what is there."""
    config.RUN_NAME = "mine"
    train.main()
    folder = runs.run_folder("mine")
    before = contents(folder)
    config.OVERWRITE, config.INIT = True, folder
    with pytest.raises(ValueError, match="lies in the folder of the run itself"):
        train.main()
    config.INIT = "random"
    os.rename(workshop / "data" / "stsb", workshop / "data" / "elsewhere")
    with pytest.raises(FileNotFoundError, match="download_data.py"):
        train.main()
    assert contents(folder) == before
    os.rename(workshop / "data" / "elsewhere", workshop / "data" / "stsb")
    runs.update_run(folder, finished=False)             # as if it had been stopped, and its state deleted by hand
    config.OVERWRITE, config.RESUME = False, True
    with pytest.raises(ValueError, match="lost its state"):
        train.main()
    assert contents(folder) == before


def test_resume_refuses_another_sts_b_or_other_threads(workshop, monkeypatch):
    monkeypatch.setattr(train, "simcse_loss", lambda *_: (_ for _ in ()).throw(Killed()))
    config.RUN_NAME = "r"
    with pytest.raises(Killed):
        train.main()
    config.RESUME = True
    threads = torch.get_num_threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(ValueError, match="begun with threads="):
        train.main()
    monkeypatch.setattr(torch, "get_num_threads", threads)
    path = workshop / "data" / "stsb" / "validation.csv"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    with pytest.raises(ValueError, match="begun with stsb="):
        train.main()


def test_resume_refuses_other_settings_or_another_corpus(workshop, monkeypatch):
    config.RUN_NAME = "r"
    monkeypatch.setattr(train, "simcse_loss", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        train.main()
    config.RESUME, config.TEMPERATURE = True, 0.1
    with pytest.raises(ValueError, match="begun with TEMPERATURE=0.05, now it is 0.1"):
        train.main()
    config.TEMPERATURE = 0.05
    with open(workshop / "data" / "sentences.txt", "a", encoding="utf-8") as file:
        file.write("\nOne more sentence that was not there before.\n")
    with pytest.raises(ValueError, match="begun with .*corpus"):
        train.main()


@pytest.mark.parametrize("name", ["run.json", "metrics.csv", "state.safetensors"])
def test_a_damaged_run_is_not_resumed(workshop, monkeypatch, name):
    original = train.simcse_loss
    monkeypatch.setattr(train, "simcse_loss", lambda *_: (_ for _ in ()).throw(Killed()))
    config.RUN_NAME = "r"
    with pytest.raises(Killed):
        train.main()
    monkeypatch.setattr(train, "simcse_loss", original)
    path = workshop / "checkpoints" / "r" / name
    path.write_bytes(path.read_bytes()[:25])
    config.RESUME = True
    with pytest.raises(ValueError, match=f"{name} (can't be read|is not valid JSON)") as caught:
        train.main()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["a,b,c\n1,2,3\n", "sentence1,sentence2,score\nx,y,high\n", "sentence1,sentence2,score\nx\n", "\xff",
                                     "sentence1,sentence2,score\na,b,50\nc,d,1\n", "sentence1,sentence2,score\na,b,nan\nc,d,1\n"])
def test_sts_b_changed_by_hand(workshop, content):
    (workshop / "data" / "stsb" / "validation.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match="validation.csv (is not as download_data.py writes it|holds 0 pairs|has an empty sentence or a score not)"):
        evaluate.load_sts_b()


def test_non_finite_loss_stops_with_step_and_rate(workshop, monkeypatch):
    original = train.simcse_loss
    calls = []

    def loss(z1, z2, temperature):
        calls.append(1)
        return original(z1, z2, temperature) * (math.nan if len(calls) == 6 else 1)
    monkeypatch.setattr(train, "simcse_loss", loss)
    with pytest.raises(ValueError, match=r"nan at step 6, learning rate \d.*step 4 is in"):
        train.main()
    SimCSEEncoder.from_pretrained(runs.run_folder(config.RUN_NAME))


def test_disk_full_leaves_the_checkpoint_that_was_there(workshop, monkeypatch):
    train.starting_encoder(sample_sentences()).save_pretrained(workshop / "ck")
    before = contents(workshop / "ck")
    config.VOCAB_SIZE, config.N_EMBD, config.POOLER = 150, 16, "mean"
    encoder, written = train.starting_encoder(sample_sentences()), []       # every file of it is another one
    sync = os.fsync

    def full(descriptor):
        written.append(descriptor)
        if len(written) == room:
            raise OSError(28, "No space left on device")
        sync(descriptor)
    monkeypatch.setattr(os, "fsync", full)
    for room in range(1, len(before) + 1):
        written.clear()
        with pytest.raises(OSError, match="No space left"):
            encoder.save_pretrained(workshop / "ck")
        assert contents(workshop / "ck") == before                      # no half of a file, no temporary one
    room = 0
    encoder.save_pretrained(workshop / "ck")
    assert contents(workshop / "ck").keys() == before.keys() and contents(workshop / "ck") != before


# ---------------------------------------------------------------------------- what can be wrong

def test_training_refuses_what_cannot_work(workshop):
    config.BATCH_SIZE = 81
    with pytest.raises(ValueError, match="BATCH_SIZE=81 is more than the corpus"):
        train.main()
    config.BATCH_SIZE, config.MAX_SEQ_LEN = 8, 65
    with pytest.raises(ValueError, match="MAX_SEQ_LEN=65 .* 64 positions"):
        train.main()
    config.MAX_SEQ_LEN, config.DEVICE = 32, "cuda:9"
    with pytest.raises(ValueError, match="DEVICE=cuda:9"):
        train.main()
    config.DEVICE = "cpu"
    os.remove(workshop / "data" / "sentences.txt")
    with pytest.raises(FileNotFoundError, match="download_data.py"):
        train.main()
    assert not os.path.exists(config.checkpoints)                       # nothing was begun


@pytest.fixture
def folder(tmp_path):
    """A sound checkpoint folder, to be spoilt."""
    torch.manual_seed(0)
    SimCSEEncoder(checkpoint.train_tokenizer(sample_sentences(), 200), n_layer=1, n_embd=32, n_head=2).save_pretrained(tmp_path)
    return tmp_path


class Bomb:
    def __reduce__(self):
        return os.system, ("touch " + Bomb.target,)


def spoil(folder, case):
    """Make a checkpoint wrong in one way."""
    from safetensors.torch import load_file, save_file
    weights, settings = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(weights)
    if case == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif case == "weights of another shape":
        save_file(tensors | {"embeddings.word_embeddings.weight": torch.zeros(tensors["embeddings.word_embeddings.weight"].shape[0], 64)}, weights)
    elif case == "a weight is missing":
        del tensors["encoder.layer.0.output.dense.bias"]
        save_file(tensors, weights)
    elif case == "a weight too many":
        save_file(tensors | {"encoder.layer.1.output.dense.bias": torch.zeros(32)}, weights)
    elif case == "weights swapped for text":
        weights.write_text("these are no weights")
    elif case == "no weights":
        weights.unlink()
    elif case in ("malicious pickle", "truncated pickle"):
        weights.unlink()
        Bomb.target = str(folder / "exploded")
        torch.save({"embeddings.word_embeddings.weight": Bomb()} if case == "malicious pickle" else tensors, folder / "pytorch_model.bin")
        if case == "truncated pickle":
            (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:500])
    elif case == "no config":
        (folder / "config.json").unlink()
    elif case == "config is no JSON":
        (folder / "config.json").write_text("{")
    elif case == "config lacks a size":
        del settings["hidden_size"]
        (folder / "config.json").write_text(json.dumps(settings))
    elif case == "vocabulary of another size":
        (folder / "tokenizer.json").unlink()
        with open(folder / "vocab.txt", "a") as file:
            file.write("".join(f"extra{i}\n" for i in range(9)))
    elif case == "a token beyond the weights":
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"]["##zzz"] = 5000
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    elif case == "vocabulary in another encoding":
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_bytes((folder / "vocab.txt").read_bytes() + b"\xff\n")
    elif case == "vocabulary without [CLS]":
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text().replace("[CLS]", "[CLASS]"))
    elif case == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").unlink()
    elif case == "tokenizer is no JSON":
        (folder / "tokenizer.json").write_text("[]")
    elif case == "a dense layer behind the pooling":
        modules = json.loads((folder / "modules.json").read_text())
        modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
        (folder / "modules.json").write_text(json.dumps(modules))
    elif case == "tokenizer without [CLS] and [SEP]":
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    elif case == "config is a list":
        (folder / "config.json").write_text("[]")
    elif case == "no heads":
        (folder / "config.json").write_text(json.dumps(settings | {"num_attention_heads": 0}))
    elif case == "a decoder":
        (folder / "config.json").write_text(json.dumps(settings | {"is_decoder": True}))
    elif case == "max pooling":
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    else:
        key, value = case.split("=")
        (folder / "config.json").write_text(json.dumps(settings | {key: value}))


WRONG = {"truncated weights": "can't be read as weights", "weights swapped for text": "can't be read as weights",
         "weights of another shape": r"embeddings.word_embeddings.weight has the shape \(\d+, 64\)",
         "a weight is missing": "lacks the weight encoder.layer.0.output.dense.bias",
         "a weight too many": "holds a weight that BERT does not have: encoder.layer.1.output.dense.bias",
         "no weights": "neither model.safetensors nor pytorch_model.bin", "malicious pickle": "can't be read as weights",
         "truncated pickle": "can't be read as weights", "no config": "no checkpoint: it has no config.json",
         "config is no JSON": "config.json is not valid JSON", "config lacks a size": "no number that can be for hidden_size",
         "vocabulary of another size": "do not belong together", "vocabulary without [CLS]": r"lacks \[CLS\]",
         "a token beyond the weights": "has 5001 tokens, the weights have", "vocabulary in another encoding": "vocab.txt is not UTF-8",
         "no tokenizer": "neither tokenizer.json nor vocab.txt", "tokenizer is no JSON": "can't be read as a tokenizer",
         "max pooling": "pooling_mode_max_tokens", "config is a list": "holds a list", "a decoder": "is_decoder is True",
         "no heads": "that can be for num_attention_heads: 0",
         "tokenizer without [CLS] and [SEP]": r"between \[CLS\] and \[SEP\]",
         "a dense layer behind the pooling": "sentence_transformers.models.Dense behind its pooling", "model_type=roberta": "a roberta model: only BERT",
         "model_type=distilbert": "a distilbert model", "model_type=modernbert": "a modernbert model",
         "hidden_act=relu": "hidden_act is 'relu'", "position_embedding_type=relative_key": "position_embedding_type"}


@pytest.mark.parametrize("case", WRONG)
def test_checkpoints_that_do_not_fit(folder, case):
    spoil(folder, case)
    with pytest.raises((ValueError, OSError), match=WRONG[case]) as caught:
        SimCSEEncoder.from_pretrained(str(folder))
    assert "\n" not in str(caught.value)
    assert not os.path.exists(folder / "exploded")


# ---------------------------------------------------------------------------- any text at all

ENCODER = SimCSEEncoder(checkpoint.train_tokenizer(sample_sentences(), 300), n_layer=1, n_embd=8, n_head=2, n_positions=32).eval()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text(), min_size=1, max_size=4), st.integers(3, 32))
def test_no_text_breaks_tokenisation(sentences, limit):
    """Whatever the characters: [CLS] first, [SEP] last, no more than the limit, ids of the vocabulary, [PAD] where masked."""
    idx, attention_mask = ENCODER.tokenize(sentences, limit)
    cls, sep, pad = (ENCODER.tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]", "[PAD]"))
    lengths = attention_mask.sum(1)
    assert idx.shape == (len(sentences), lengths.max()) and 2 <= lengths.min() and lengths.max() <= limit
    assert 0 <= idx.min() and idx.max() < ENCODER.shape["vocab_size"]
    for row, mask, n in zip(idx, attention_mask, lengths):
        assert row[0] == cls and row[n - 1] == sep and mask[:n].all() and (row[n:] == pad).all() and not mask[n:].any()
    assert torch.isfinite(ENCODER.encode(idx, attention_mask)).all()


# ---------------------------------------------------------------------------- the Hub

FIND = "import checkpoint; from model import SimCSEEncoder as E; e = E.from_pretrained('tiny/bert'); print(e.shape['n_embd'])"


def ask_hub(code, url, home, **environment):
    """Start Python code that talks to a Hub of ours, in a process of its own, as the client reads its settings on import."""
    return subprocess.Popen([sys.executable, "-c", code], cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | environment)


def test_bert_from_the_hub(folder, tmp_path_factory):
    """A tiny BERT through the real client: fetched, cut off and fetched, cached, and all that can go wrong with the Hub."""
    home = tmp_path_factory.mktemp("home")
    repos = {"models/tiny/bert": {name: data for name, data in contents(folder).items()} | {"pytorch_model.bin": b"unwanted"}}
    log = []
    with serve(repos, log=log) as url, serve(repos, "cut") as cut, serve(repos, 429) as busy, serve(repos, 500) as broken, \
            serve(repos, 401) as private, serve({}) as empty, serve(repos, "slow") as slow, \
            serve(repos, "down again") as down:
        tries = {"fetched": ask_hub(FIND, url, home / "a"), "cut": ask_hub(FIND, cut, home / "b"),
                 "429": ask_hub(FIND, busy, home / "c"), "500": ask_hub(FIND, broken, home / "d"),
                 "private": ask_hub(FIND, private, home / "e"), "none": ask_hub(FIND, empty, home / "f")}
        tries |= {"down again": ask_hub(FIND, down, home / "i"), "slow": ask_hub(FIND, slow, home / "g"),
                  "offline, empty cache": ask_hub(FIND, url, home / "h", HF_HUB_OFFLINE="1")}
        results = {name: (*process.communicate(timeout=100), process.returncode) for name, process in tries.items()}
    # the same again, now that nobody listens there any more
    tries = {"cache, no Hub": ask_hub(FIND, url, home / "a"), "cache, offline": ask_hub(FIND, url, home / "a", HF_HUB_OFFLINE="1")}
    results |= {name: (*process.communicate(timeout=100), process.returncode) for name, process in tries.items()}
    for name in ("fetched", "cut", "cache, no Hub", "cache, offline"):
        assert results[name][0] == "32\n" and results[name][2] == 0, (name, results[name])
    assert not [path for _, path, _ in log if path.endswith(".bin")]    # safetensors is there: no need for the pickle
    for name, words in {"429": "429", "500": "500", "down again": "try again later", "private": "private",
                        "none": "no such model on the Hub", "slow": "timed out", "offline, empty cache": "HF_HUB_OFFLINE"}.items():
        last = results[name][1].strip().splitlines()[-1]
        assert results[name][2] == 1 and last.startswith(("OSError: tiny/bert", "FileNotFoundError: tiny/bert")), (name, results[name])
        assert words in last, (name, last)


@pytest.mark.parametrize("name", ["no/such/folder", "../checkpoints/nothing", "/nowhere", "a b", ""])
def test_names_that_neither_a_folder_nor_the_hub_could_have(name):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        checkpoint.find(name)


# ---------------------------------------------------------------------------- the knobs

NUMBERS = [name for name, value in config.DEFAULTS.items() if type(value) in (int, float)]


@pytest.fixture
def knobs(monkeypatch):
    for name, value in config.DEFAULTS.items():
        monkeypatch.setattr(config, name, value)
    monkeypatch.setattr(config, "overridden", set())


@pytest.mark.parametrize("name", config.DEFAULTS)
def test_every_knob(knobs, name):
    """Set from the shell, misspelt, of a wrong type in the file, of a wrong type from the shell."""
    default = config.DEFAULTS[name]
    config.override([f"{name}={default}"])
    assert getattr(config, name) == default and type(getattr(config, name)) is type(default)
    with pytest.raises(ValueError, match=f"did you mean {name}"):
        config.override([f"{name}X={default}"])
    if type(default) is not str:
        with pytest.raises(ValueError, match=f"{name} must be .*'maybe'"):
            config.override([f"{name}=maybe"])
    for wrong in (None, [default], 5 if type(default) is str else "5", 1 if type(default) is bool else True):
        setattr(config, name, wrong)
        with pytest.raises(ValueError, match=f"^{name} must be"):
            config.check()


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_range(knobs, name):
    for wrong in (-1, -0.5, math.nan, math.inf, -math.inf):
        setattr(config, name, type(config.DEFAULTS[name])(wrong) if math.isfinite(wrong) else wrong)
        if getattr(config, name) == 0 or (name, wrong) == ("CLS_SIF", math.inf):        # -0.5 as a whole number; "all alike"
            continue
        with pytest.raises(ValueError, match=f"^{name} must be"):
            config.check()


@pytest.mark.parametrize("argument, said", [
    ("DROPOUT=1", "DROPOUT must be a number of at least 0 and below 1, not 1.0"), ("BATCH_SIZE=1", "no negatives"),
    ("TEMPERATURE=0", "TEMPERATURE must be a number above 0"), ("POOLER=max", "POOLER must be cls or mean, not 'max'"),
    ("SPLIT=train", "SPLIT must be validation or test"), ("EPOCHS=2.5", "EPOCHS must be a whole number, not '2.5'"),
    ("FIXED_MASK=yes", "FIXED_MASK must be True or False"), ("N_HEAD=7", "N_EMBD=256 must be divisible by N_HEAD=7"),
    ("RUN_NAME=../elsewhere", "RUN_NAME must be a folder name"), ("dropout=0.2", "did you mean DROPOUT?"),
    ("MAX_SEQ_LEN=2", "MAX_SEQ_LEN must be"), ("WARMUP_RATIO=1.5", "from 0 to 1"), ("INIT=", "INIT must be set"),
    ("SEED=-1", "SEED must be"), ("LEARNING_RATE=inf", "LEARNING_RATE must be"), ("DROPOUT", "NAME=value"),
    ("zzzzzz=1", "--help lists them")])
def test_command_line_mistakes(knobs, argument, said):
    with pytest.raises(ValueError) as caught:
        config.override([argument])
    assert said in str(caught.value) and "\n" not in str(caught.value)


# ---------------------------------------------------------------------------- the same bytes, whatever happens

def own_copy(workshop):
    """The scripts, copied next to the workshop's data, to be run, and killed, as processes."""
    for name in os.listdir(HERE):
        if name.endswith(".py"):
            (workshop / name).write_bytes(open(os.path.join(HERE, name), "rb").read())
    return [f"{name}={value}" for name, value in TINY.items()]


def test_command_line(workshop):
    """The scripts end with one line on stderr and the right exit status, whatever a reader types."""
    own_copy(workshop)
    for name, argument, status, said in (
            ("train.py", "DROPUOT=0.1", 2, "unknown knob 'DROPUOT': did you mean DROPOUT?"),
            ("evaluate.py", "CHECKPOINT=data", 1, "data is no checkpoint: it has no config.json")):
        done = script(name, argument, cwd=workshop)
        assert (done.returncode, done.stderr, done.stdout) == (status, f"error: {said}\n", "")
    done = script("train.py", "--help", cwd=workshop)
    assert done.returncode == 0 and all(f"{knob}=" in done.stdout for knob in ("DROPOUT", "RESUME", "DEVICE"))
    assert "CHECKPOINT" not in done.stdout


def test_a_run_is_evaluated_where_the_repository_was_moved_to(workshop):
    here, there = workshop / "here", workshop / "there"
    here.mkdir()
    os.rename(workshop / "data", here / "data")
    knobs = own_copy(here)
    train.starting_encoder(sample_sentences()).save_pretrained(here / "checkpoints" / "first")
    done = script("train.py", *knobs, "INIT=checkpoints/first", "RUN_NAME=one", cwd=here)
    one = os.path.join("checkpoints", "one")
    assert done.returncode == 0 and done.stdout.splitlines()[0].endswith(f"into {one}")
    os.rename(here, there)
    done = script("evaluate.py", cwd=there)
    first = os.path.join("checkpoints", "first")
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[1:3]] == [f"start: {first}", one]
    (workshop / "checkpoints" / "first").mkdir(parents=True)                    # another of that name, where one happens to stand
    assert script(os.path.join(there, "evaluate.py"), cwd=workshop).stdout == done.stdout
    shutil.rmtree(there / "checkpoints" / "first")
    gone = script("evaluate.py", cwd=there).stderr
    assert gone.startswith(f"error: {there / first}") and "no such folder" in gone and gone.count("\n") == 1


def test_too_little_memory_is_one_line(monkeypatch, capsys):
    def too_much():
        torch.empty(10**15)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as stopped:
        config.run(too_much, "train.py")
    said = capsys.readouterr().err
    assert stopped.value.code == 1 and said.startswith("error: not enough memory (") and said.count("\n") == 1

    def a_mistake_of_ours():
        torch.ones(2) @ torch.ones(3)
    with pytest.raises(RuntimeError, match="size"):
        config.run(a_mistake_of_ours, "train.py")


def test_ctrl_c(workshop):
    knobs = own_copy(workshop)
    process = subprocess.Popen([sys.executable, "train.py", *knobs, "EPOCHS=1000", "RUN_NAME=r"], cwd=workshop, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,      # what runs in the background ignores Ctrl-C
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    metrics = workshop / "checkpoints" / "r" / "metrics.csv"
    while not metrics.exists() or metrics.read_text().count("\n") < 4:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said
    assert said.splitlines()[-1] == "stopped; RESUME=True goes on from what was saved, if anything was"
    assert len(runs.read_metrics(workshop / "checkpoints" / "r")) >= 3
    SimCSEEncoder.from_pretrained(str(workshop / "checkpoints" / "r"))


@pytest.mark.parametrize("name, said", [("ablations.py", "stopped; the same command goes on from what was saved, if anything was"),
                                        ("evaluate.py", "stopped")])
def test_ctrl_c_names_the_way_on_that_there_is(monkeypatch, capsys, name, said):
    def stop():
        raise KeyboardInterrupt
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit):
        config.run(stop, name)
    assert capsys.readouterr().err == said + "\n"


KILL = """
import os, random, signal, sys
import config, checkpoint, train
plan = random.Random(int(sys.argv.pop()))
places = {"step": (train, "simcse_loss", plan.randint(1, 10)), "write": (checkpoint.os, "fsync", plan.randint(1, 20)),
          "rename": (checkpoint.os, "replace", plan.randint(1, 20))}
module, name, left = places[plan.choice(list(places))]
original = getattr(module, name)
def deadly(*arguments):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
setattr(module, name, deadly)
config.run(train.main, train.__file__)
"""


@pytest.mark.slow
def test_killed_twenty_times_the_run_ends_with_the_same_bytes(workshop):
    """SIGKILL at random steps, in the middle of random writes and before random renames; each time the run goes on."""
    knobs = own_copy(workshop) + ["EPOCHS=16", "EVAL_INTERVAL=8"]       # 160 steps

    def launch(*command):
        return subprocess.run([sys.executable, *command], cwd=workshop, text=True, capture_output=True, timeout=300)
    assert launch("train.py", *knobs, "RUN_NAME=whole").returncode == 0
    whole, kills, seed, finished = contents(workshop / "checkpoints" / "whole"), 0, 0, 0
    while kills < 20 or not finished:
        seed += 1
        folder = workshop / "checkpoints" / f"killed{finished}"     # a run that gets through is compared, and another begun
        arguments = [*knobs, f"RUN_NAME={folder.name}", *["RESUME=True"] * (folder / "run.json").exists()]
        done = launch("-c", KILL, *arguments, str(seed)) if kills < 20 else launch("train.py", *arguments)
        if done.returncode == 0:
            finished += 1
            assert {path: data for path, data in contents(folder).items() if not path.endswith(".tmp")} == whole
            continue
        assert done.returncode == -signal.SIGKILL, done.stderr
        kills += 1
        if (folder / "metrics.csv").exists():
            runs.read_metrics(folder)
        if (folder / "model.safetensors").exists():
            SimCSEEncoder.from_pretrained(str(folder))


def test_one_or_two_threads_give_the_same_score(workshop):
    threads = torch.get_num_threads()
    encoder = train.starting_encoder(sample_sentences())
    results = []
    for n in (1, 2):
        torch.set_num_threads(n)
        results.append(evaluate.measure(encoder))
    torch.set_num_threads(threads)
    assert abs(results[0]["spearman"] - results[1]["spearman"]) < 5e-5
