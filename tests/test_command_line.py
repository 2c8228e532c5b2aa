"""python SCRIPT.py NAME=value: what a reader types or edits, right or wrong, and how a script ends."""

import ast
import math
import os
import re
import runpy
import shutil
import sys

import pytest
import torch

import config
import experiments.config
import pretraining.config
import train
from support import command_line
from tests.conftest import ROOT, own_copy, sample_sentences, script

CONFIGS = [config, pretraining.config, experiments.config]
SHIPPED = command_line.constants(CONFIGS)
NUMBERS = [name for name, value in SHIPPED.items() if type(value) in (int, float)]
SCRIPTS = {  # as they are called, with knobs that each reads
    "download_data.py": ("CORPUS", "STSB", "MAX_SENTENCES", "SEED"),
    "train.py": ("DROPOUT", "PRECISION", "RESUME", "DEVICE"),
    "evaluate.py": ("CHECKPOINT", "EVAL_POOLER", "SPLIT", "DEVICE"),
    "-m pretraining.pretrain": ("CLS_WEIGHT", "N_LAYER", "PRECISION"),
    "-m experiments.ablations": ("ONLY", "SEEDS"),
    "-m experiments.benchmark": ("ROUNDS", "DEVICE"),
}


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    """Values as shipped, whatever a test sets."""
    for module in CONFIGS:
        for name, value in command_line.constants([module]).items():
            monkeypatch.setattr(module, name, value)


def override(*arguments, knobs=tuple(SHIPPED)):
    command_line.override(arguments, CONFIGS, knobs, "train.py")


def current(name):
    return command_line.constants(CONFIGS)[name]


def edit(name, value):
    """As if a reader had edited the line in config.py."""
    for module in CONFIGS:
        if hasattr(module, name):
            setattr(module, name, value)


# ---- values


@pytest.mark.parametrize("name", SHIPPED)
def test_every_constant(name):
    """Set from the shell, misspelt, of a wrong type from the shell, of a wrong type in the file."""
    shipped = SHIPPED[name]
    assert any(name in names.split() for _, _, _, names in command_line.LIMITS)
    assert command_line.type_of(name, None) is type(shipped)
    override(f"{name}={shipped}")
    assert current(name) == shipped and type(current(name)) is type(shipped)
    with pytest.raises(ValueError, match=f"did you mean {name}"):
        override(f"{name}X={shipped}")
    if type(shipped) is not str:
        with pytest.raises(ValueError, match=f"{name} must be .*'maybe'"):
            override(f"{name}=maybe")
    for wrong in (None, [shipped], 5 if type(shipped) is str else "5", 1 if type(shipped) is bool else True):
        edit(name, wrong)
        with pytest.raises(ValueError, match=f"^{name} must be"):
            override()


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_range(name):
    kind = type(SHIPPED[name])
    for wrong in (-1, -0.5, math.nan, math.inf, -math.inf):
        if (name, wrong) == ("CLS_SIF", math.inf):  # all words count alike
            continue
        for way in ("typed", "edited"):
            edit(name, wrong if way == "edited" else SHIPPED[name])
            with pytest.raises(ValueError, match=f"^{name} must be"):
                override(*[f"{name}={wrong}"] * (way == "typed"))
    edit(name, SHIPPED[name])
    override()
    assert type(current(name)) is kind


@pytest.mark.parametrize("name", [name for name in NUMBERS if type(SHIPPED[name]) is float])
def test_an_edit_does_not_change_the_type(name):
    """DROPOUT = 1 is a whole number; the rate is one all the same, and 0.1 can be typed after it."""
    edit(name, 1)
    try:
        override()
    except ValueError:  # 1 is out of range here
        assert name in ("DROPOUT", "MLM_DROPOUT")
    else:
        assert current(name) == 1.0 and type(current(name)) is float
    override(f"{name}=0.5")
    assert current(name) == 0.5


@pytest.mark.parametrize(
    "argument, said",
    [
        ("DROPOUT=1", "DROPOUT must be a number of at least 0 and below 1, not 1.0"),
        ("BATCH_SIZE=1", "BATCH_SIZE must be a whole number of at least 2, not 1"),
        ("TEMPERATURE=0", "TEMPERATURE must be a number above 0, not 0.0"),
        ("POOLER=max", "POOLER must be cls or mean, not 'max'"),
        ("POOLER=maen", "did you mean mean?"),
        ("EVAL_POOLER=max", 'EVAL_POOLER must be "" or cls or mean, not'),
        ("SPLIT=train", "SPLIT must be validation or test, not 'train'"),
        ("PRECISION=float16", "must be auto or float32 or bfloat16, not 'float16': did you mean"),
        ("EPOCHS=2.5", "EPOCHS must be a whole number, not '2.5'"),
        ("FIXED_MASK=yes", "FIXED_MASK must be True or False, not 'yes'"),
        ("RUN_NAME=../elsewhere", "RUN_NAME must be a folder name"),
        ("RUN_NAME=.hidden", "RUN_NAME must be a folder name"),
        ("dropout=0.2", "unknown knob 'dropout': did you mean DROPOUT?"),
        ("DROPUOT=0.2", "unknown knob 'DROPUOT': did you mean DROPOUT?"),
        ("MAX_SEQ_LEN=2", "MAX_SEQ_LEN must be a whole number of at least 3"),
        ("WARMUP_RATIO=1.5", "from 0 to 1"),
        ("INIT=", "INIT must be set"),
        ("SEED=-1", "SEED must be"),
        ("LEARNING_RATE=inf", "LEARNING_RATE must be"),
        ("DROPOUT", "'DROPOUT' is not of the form NAME=value"),
        ("zzzzzz=1", "unknown knob 'zzzzzz'; --help lists what it reads"),
    ],
)
def test_mistakes(argument, said):
    before = command_line.constants(CONFIGS)
    with pytest.raises(ValueError) as caught:
        override("EPOCHS=3", argument)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert command_line.constants(CONFIGS) == before  # nothing was set


def test_a_constant_that_another_script_reads():
    with pytest.raises(ValueError, match="^train.py does not read SPLIT"):
        override("SPLIT=test", knobs=train.KNOBS)


def test_true_and_false_as_they_are_typed():
    for text, value in (
        ("True", True),
        ("true", True),
        ("1", True),
        ("False", False),
        ("FALSE", False),
        ("0", False),
    ):
        override(f"RESUME={text}")
        assert config.RESUME is value


def test_the_last_of_two_values_counts_and_text_may_hold_an_equals_sign():
    override("SEED=1", "SEED=2", "INIT=a=b", "RUN_NAME=DROPOUT=0", "MAX_SENTENCES=1_000")
    assert (config.SEED, config.INIT, config.RUN_NAME, config.MAX_SENTENCES) == (2, "a=b", "DROPOUT=0", 1000)


# ---- how a script ends


def run(main, monkeypatch, capsys, *arguments):
    """The exit status of a script, and what it said on standard error."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    try:
        command_line.run(main, "train.py", [config], train.KNOBS)
        status = 0
    except SystemExit as stopped:
        status = stopped.code
    return status, capsys.readouterr().err


def raises(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    "error, status, said",
    [
        (ValueError("a problem\nand its details"), 1, "error: a problem\n"),
        (FileNotFoundError("there is no file"), 1, "error: there is no file\n"),
        (ValueError(), 1, "error: ValueError\n"),
        (MemoryError(), 1, "error: not enough memory (MemoryError): a smaller batch or encoder needs less\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (KeyboardInterrupt("RESUME=True goes on"), 130, "stopped; RESUME=True goes on\n"),
    ],
)
def test_an_error_ends_in_one_line(monkeypatch, capsys, error, status, said):
    assert run(raises(error), monkeypatch, capsys) == (status, said)


def test_a_bad_argument_runs_nothing(monkeypatch, capsys):
    status, said = run(raises(AssertionError()), monkeypatch, capsys, "EPOCHS=many")
    assert (status, said) == (2, "error: EPOCHS must be a whole number, not 'many'\n")


def test_arguments_reach_main(monkeypatch, capsys):
    seen = []
    assert run(lambda: seen.append(config.EPOCHS), monkeypatch, capsys, "EPOCHS=7") == (0, "") and seen == [7]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_too_little_memory_is_one_line(monkeypatch, capsys, device):
    def too_much():
        if device == "cuda":  # its words, as there need not be one here
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has ...")
        torch.empty(10**15)

    status, said = run(too_much, monkeypatch, capsys)
    assert status == 1 and said.startswith("error: not enough memory (") and said.count("\n") == 1


def test_a_mistake_of_ours_is_not_hidden(monkeypatch, capsys):
    with pytest.raises(RuntimeError, match="size"):
        run(lambda: torch.ones(2) @ torch.ones(3), monkeypatch, capsys)


# ---- the scripts themselves


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_lists_what_the_script_reads(name, monkeypatch, capsys):
    module = name.removeprefix("-m ").removesuffix(".py")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_module(module, run_name="__main__")
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python {name} [NAME=value ...]\n")
    listed = re.findall(r"^  ([A-Z_]+)=", text, re.M)
    assert len(set(listed)) == len(listed) and set(SCRIPTS[name]) <= set(listed) <= set(SHIPPED)
    assert all(
        re.search(rf"^  {knob}=.* +[^ ]{{2,}} .+", text, re.M) for knob in listed
    )  # each with its comment
    # and nothing that it reads is left out
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in attributes if ast.unparse(node.value) in ("config", "root_config")}
    assert read <= set(listed) or module == "experiments.benchmark"  # which hands RUN_NAME to train.py


def test_the_scripts_as_processes(workshop):
    """One line on stderr and the right exit status: a wrong argument, a failure, a first call, from any folder."""
    own_copy(workshop)
    shutil.rmtree(workshop / "data")
    elsewhere = workshop / "elsewhere"
    elsewhere.mkdir()
    for name, argument, status, said in (
        (
            "train.py",
            "INIT=random",
            1,
            f"there is no {workshop / 'data' / 'sentences.txt'}: run python download_data.py first",
        ),
        ("evaluate.py", "SPLIT=tset", 2, "SPLIT must be validation or test, not 'tset': did you mean test?"),
    ):
        done = script(workshop / name, argument, cwd=elsewhere)
        assert (done.returncode, done.stderr, done.stdout) == (status, f"error: {said}\n", "")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("module", ["pretraining.pretrain", "experiments.ablations"])
def test_modules_as_processes(module):
    done = script("-m", module, "SEDE=1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: unknown knob 'SEDE': did you mean SEED")


def test_a_run_is_evaluated_where_the_repository_was_moved_to(workshop):
    here, there = workshop / "here", workshop / "there"
    here.mkdir()
    os.rename(workshop / "data", here / "data")
    knobs = own_copy(here)
    train.starting_encoder(sample_sentences()).save_pretrained(here / "checkpoints" / "first")
    done = script("train.py", *knobs, "INIT=checkpoints/first", "RUN_NAME=one", cwd=here)
    one, first = os.path.join("checkpoints", "one"), os.path.join("checkpoints", "first")
    assert done.returncode == 0 and done.stdout.splitlines()[1].endswith(f"into {one}"), done.stderr
    os.rename(here, there)
    done = script("evaluate.py", cwd=there)
    names = [line.split(" cls ")[0].rstrip() for line in done.stdout.splitlines()[1:3]]
    assert [name.removeprefix("start: ") for name in names] == [str(there / first), one] or names == [
        f"start: {first}",
        one,
    ]
    # another encoder of that name, where one happens to stand, is not taken for it
    (workshop / "checkpoints" / "first").mkdir(parents=True)
    assert script(there / "evaluate.py", cwd=workshop).stdout == done.stdout
    shutil.rmtree(there / "checkpoints" / "first")
    gone = script("evaluate.py", cwd=there).stderr
    assert gone.startswith(f"error: {there / first}") and "no such folder" in gone and gone.count("\n") == 1
