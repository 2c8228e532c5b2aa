"""python SCRIPT.py NAME=value ...: the constants of config modules from the shell, and errors in one line."""

import difflib
import inspect
import math
import re
import sys

from support.files import first_line

# what each constant may be: its type, the rest of it in words and as a function, and the constants that this holds for
LIMITS = [
    (bool, "True or False", lambda v: True, "USE_MLP_HEAD HEAD_AT_EVALUATION FIXED_MASK OVERWRITE RESUME"),
    (int, "a whole number of at least 0", lambda v: v >= 0, "WARMUP_TOKENS"),
    (int, "a whole number of at least 1", lambda v: v >= 1, "MAX_SENTENCES N_LAYER N_EMBD N_HEAD EPOCHS EVAL_INTERVAL"),
    (int, "a whole number of at least 1", lambda v: v >= 1, "MAX_TOKENS TOKENS_PER_STEP"),
    (int, "a whole number of at least 1", lambda v: v >= 1, "VALIDATION_TOKENS VALIDATION_INTERVAL ROUNDS NEAREST"),
    (int, "a whole number of at least 2", lambda v: v >= 2, "BATCH_SIZE HELD_OUT"),  # one sentence has no negatives
    (int, "a whole number of at least 3", lambda v: v >= 3, "MAX_SEQ_LEN N_POSITIONS BLOCK_SIZE"),  # [CLS] and [SEP]
    (int, "a whole number of at least 100", lambda v: v >= 100, "VOCAB_SIZE"),
    (int, "a whole number from 0 to 2**32 - 1", lambda v: 0 <= v < 2**32, "SEED"),
    (float, "a number above 0", lambda v: 0 < v < math.inf, "TEMPERATURE LEARNING_RATE GRAD_CLIP MLM_LEARNING_RATE"),
    (float, "a number above 0, or inf", lambda v: v > 0, "CLS_SIF"),
    (float, "a number of at least 0", lambda v: 0 <= v < math.inf, "WEIGHT_DECAY CLS_WEIGHT SAVE_MINUTES"),
    (float, "a number above 0 and at most 1", lambda v: 0 < v <= 1, "MASK_RATE"),
    (float, "a number from 0 to 1", lambda v: 0 <= v <= 1, "WARMUP_RATIO DECAY_SHARE DROPOUT_SHARE"),
    (float, "a number from 0 to 1", lambda v: 0 <= v <= 1, "SENTENCE_RATE LONG_RATE"),
    (float, "a number of at least 0 and below 1", lambda v: 0 <= v < 1, "DROPOUT MLM_DROPOUT"),
    (str, "text", lambda v: True, "CHECKPOINT PRETRAIN_CORPUS MLM_INIT POOLER EVAL_POOLER SPLIT PRECISION"),
    (str, "text", lambda v: True, "ONLY SEEDS QUERY TEXT"),
    (str, "set", lambda v: v != "", "CORPUS STSB INIT DEVICE MLM_FOLDER STS"),
    (str, "a folder name without / or \\", lambda v: v == v.strip() and not re.search(r"[/\\\0\n]|^\.", v), "RUN_NAME"),
]  # fmt: skip
CHOICES = {
    "POOLER": ["cls", "mean"],
    "EVAL_POOLER": ["", "cls", "mean"],
    "SPLIT": ["validation", "test"],
    "PRECISION": ["auto", "float32", "bfloat16"],
}
TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}


def constants(configs):
    """The constants of config modules, a dict from name to value."""
    return {name: value for config in configs for name, value in vars(config).items() if name.isupper()}


def type_of(name, default):
    """The type of a constant; a reader's edit of its line does not change it: DROPOUT = 0 is still a rate."""
    return next((kind for kind, _, _, names in LIMITS if name in names.split()), type(default))


def parse(name, text, kind):
    """The value of a type that `text` stands for; raises ValueError where it stands for none."""
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{name} must be {TYPES[kind]}, not {text!r}") from None


def check(name, value, kind):
    """The value of a constant, as a float where its type is that; raises ValueError where it can't be."""
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} must be {TYPES[kind]}, not {value!r}")
    if value not in CHOICES.get(name, [value]):
        near = difflib.get_close_matches(value.lower(), CHOICES[name], n=1, cutoff=0.3)
        choices = " or ".join(choice or '""' for choice in CHOICES[name])
        hint = f": did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name} must be {choices}, not {value!r}{hint}")
    for _, rule, holds, names in LIMITS:
        if name in names.split() and not holds(value):
            raise ValueError(f"{name} must be {rule}, not {value!r}")
    return value


def override(arguments, configs, knobs, script="this script"):
    """Set constants of the config modules from NAME=value strings, as if their lines had been edited.

    knobs: the names that the script reads. Raises ValueError for an unknown name or a value that can't be.
    """
    values = constants(configs)
    types = {name: type_of(name, value) for name, value in values.items()}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise ValueError(f"{argument!r} is not of the form NAME=value")
        if name not in knobs:
            near = difflib.get_close_matches(name.upper(), knobs, n=1, cutoff=0.5)
            hint = f": did you mean {near[0]}?" if near else "; --help lists what it reads"
            problem = f"{script} does not read {name}" if name in values else f"unknown knob {name!r}"
            raise ValueError(problem + hint)
        values[name] = parse(name, text, types[name])
    values = {name: check(name, value, types[name]) for name, value in values.items()}
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
    missing = [name for name in knobs if name not in constants(configs)]
    if missing:
        print(
            f"error: {configs[0].__name__}.py lacks {', '.join(missing)}, which {script} reads",
            file=sys.stderr,
        )
        sys.exit(2)
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
