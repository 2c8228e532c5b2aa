"""python SCRIPT.py NAME=value ...: the constants of config modules from the shell, and errors in one line."""

import difflib
import inspect
import math
import re
import sys

from support.files import first_line

# what each constant may be, beyond the type of its default
LIMITS = [
    (
        "a whole number of at least 1",
        lambda v: v >= 1,
        "MAX_SENTENCES N_LAYER N_EMBD N_HEAD EPOCHS EVAL_INTERVAL MAX_TOKENS TOKENS_PER_STEP "
        "VALIDATION_TOKENS VALIDATION_INTERVAL",
    ),
    (
        "a whole number of at least 2",
        lambda v: v >= 2,
        "BATCH_SIZE HELD_OUT",
    ),  # one sentence has no negatives
    (
        "a whole number of at least 3 ([CLS], a token, [SEP])",
        lambda v: v >= 3,
        "MAX_SEQ_LEN N_POSITIONS BLOCK_SIZE",
    ),
    ("a whole number of at least 100", lambda v: v >= 100, "VOCAB_SIZE"),
    ("a whole number from 0 to 2**32 - 1", lambda v: 0 <= v < 2**32, "SEED"),
    (
        "a number above 0",
        lambda v: 0 < v < math.inf,
        "TEMPERATURE LEARNING_RATE GRAD_CLIP MLM_LEARNING_RATE MASK_RATE",
    ),
    ("a number above 0, or inf", lambda v: v > 0, "CLS_SIF"),
    (
        "a number of at least 0",
        lambda v: 0 <= v < math.inf,
        "WEIGHT_DECAY WARMUP_TOKENS CLS_WEIGHT SAVE_MINUTES",
    ),
    (
        "a number from 0 to 1",
        lambda v: 0 <= v <= 1,
        "WARMUP_RATIO SENTENCE_RATE LONG_RATE MASK_RATE DECAY_SHARE DROPOUT_SHARE",
    ),
    ("a number of at least 0 and below 1", lambda v: 0 <= v < 1, "DROPOUT MLM_DROPOUT"),
    ("set", lambda v: v != "", "CORPUS STSB INIT DEVICE MLM_FOLDER"),
    (
        "a folder name without / or \\",
        lambda v: v == v.strip() and not re.search(r"[/\\\0\n]|^\.", v),
        "RUN_NAME",
    ),
]
CHOICES = {
    "POOLER": ["cls", "mean"],
    "EVAL_POOLER": ["", "cls", "mean"],
    "SPLIT": ["validation", "test"],
    "PRECISION": ["auto", "float32", "bfloat16"],
}


def constants(configs):
    """The constants of config modules, a dict from name to value."""
    return {name: value for config in configs for name, value in vars(config).items() if name.isupper()}


def parse(name, text, default):
    """The value that `text` stands for, of the type of the default; raises ValueError where it is of another type."""
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return type(default)(text)
    except (KeyError, ValueError):
        expected = {bool: "True or False", int: "a whole number", float: "a number"}[type(default)]
        raise ValueError(f"{name} must be {expected}, not {text!r}") from None


def check(values, defaults):
    """Raise ValueError, naming the constant, where one is of another type than its default, or out of range."""
    for name, value in values.items():
        kind = type(defaults[name])
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{name} must be of type {kind.__name__}, not {value!r}")
        if value not in CHOICES.get(name, [value]):
            near = difflib.get_close_matches(str(value).lower(), CHOICES[name], n=1, cutoff=0.3)
            choices = " or ".join(choice or '""' for choice in CHOICES[name])
            raise ValueError(
                f"{name} must be {choices}, not {value!r}" + (f": did you mean {near[0]}?" if near else "")
            )
    for rule, holds, names in LIMITS:
        for name in names.split():
            if name in values and not holds(values[name]):
                raise ValueError(f"{name} must be {rule}, not {values[name]!r}")


def override(arguments, configs, knobs, script="this script"):
    """Set constants of the config modules from NAME=value strings, as if their lines had been edited.

    knobs: the names that the script reads. Raises ValueError for an unknown name or a value that can't be.
    """
    defaults = constants(configs)
    values = dict(defaults)
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise ValueError(f"{argument!r} is not of the form NAME=value")
        if name not in knobs:
            near = difflib.get_close_matches(name.upper(), knobs, n=1, cutoff=0.5)
            problem = f"{script} does not read {name}" if name in defaults else f"unknown knob {name!r}"
            raise ValueError(
                problem + (f": did you mean {near[0]}?" if near else "; --help lists what it reads")
            )
        values[name] = parse(name, text, defaults[name])
    check(values, defaults)
    for config in configs:
        for name in constants([config]):
            setattr(config, name, values[name])


def help_text(script, configs, knobs):
    """The constants that a script reads, each with its value and its comment."""
    source = "\n".join(inspect.getsource(config) for config in configs)
    comments = dict(re.findall(r"^([A-Z_]+) = .*?# (.*)$", source, re.M))
    values = constants(configs)
    lines = [f"  {f'{name}={values[name]}':32} {comments.get(name, '')}" for name in knobs]
    return "\n".join([f"usage: python {script} [NAME=value ...]", "", *lines])


def run(main, script, configs, knobs):
    """Run a script's `main` under its command line; what a user can cause ends in one line, not a traceback.

    script: what stands behind "python" in the command; configs: the modules whose constants may be set; knobs: the
    names of those that the script reads. Exit status: 0 done, 1 failed, 2 a bad argument, 130 interrupted.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(script, configs, knobs))
        return
    try:
        override(sys.argv[1:], configs, knobs, script)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        memory = "out of memory|not enough memory|can't allocate"
        if not isinstance(error, MemoryError) and not re.search(memory, str(error)):
            raise
        problem = f"not enough memory ({first_line(error)})"
        print(f"error: {problem}: a smaller batch or encoder needs less", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as error:
        print(f"stopped{f'; {error}' if str(error) else ''}", file=sys.stderr)
        sys.exit(130)
