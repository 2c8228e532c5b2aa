"""Every knob of the project. Edit a line here, or override it from the shell: python train.py DROPOUT=0."""

import difflib
import math
import os
import re
import sys

# Data (download_data.py)
CORPUS = "auto"          # sentences: auto, wikitext (the chapter's), wiki1m (the paper's), vital, or a .txt / .txt.gz file
STSB = "auto"            # STS-B: auto, hub, sample (shipped, no benchmark), or a folder of CSV files
MAX_SENTENCES = 100_000  # sentences kept for training; chapter 100,000, paper 1,000,000

# Encoder (chapter 3's shape; for pretrain.py and for INIT=random: a checkpoint brings its own)
N_LAYER = 6              # Transformer blocks; BERT-base has 12
N_EMBD = 256             # width of the hidden states and of the embedding; BERT-base has 768
N_HEAD = 8               # attention heads; must divide N_EMBD
N_POSITIONS = 128        # longest input the encoder can take, in tokens
VOCAB_SIZE = 8192        # WordPiece vocabulary learned from the corpus

# Method (train.py)
INIT = "checkpoints/mlm_encoder"  # starting encoder: a checkpoint folder, a Hub name, or random
POOLER = "cls"           # sentence embedding: cls (the paper's) or mean, to train with; evaluate.py asks the checkpoint unless it is given there
USE_MLP_HEAD = False     # True: train through a one-layer tanh MLP that evaluation leaves out (paper, table 6; chapter)
DROPOUT = 0.1            # rate of every dropout in the encoder: the only augmentation; paper (table 3) and chapter
FIXED_MASK = False       # True: both views share one dropout mask, the paper's "Fixed 0.1" (table 3)
TEMPERATURE = 0.05       # tau of equation 4; paper and chapter

# Optimisation (train.py)
BATCH_SIZE = 64          # sentences a step; each has BATCH_SIZE - 1 negatives; paper and chapter
EPOCHS = 1               # passes over the corpus; chapter 3, paper 1
LEARNING_RATE = 2e-4     # AdamW's peak rate; chapter 5e-5, paper 3e-5 for BERT-base
WEIGHT_DECAY = 0.01      # AdamW, on weight matrices only
WARMUP_RATIO = 0.1       # share of the steps over which the rate climbs, before it falls linearly to 0
GRAD_CLIP = 1.0          # largest gradient norm; the paper's code
MAX_SEQ_LEN = 10         # tokens a training sentence keeps, [CLS] and [SEP] included; the paper's code and the chapter 32
EVAL_INTERVAL = 50       # steps between two STS-B scores; the best one is kept

# Pre-training (pretrain.py)
PRETRAIN_CORPUS = ""     # .txt or .txt.gz, a paragraph a line, a blank line between articles; "" = data/sentences.txt
MLM_INIT = ""            # encoder of pretrain.py's to go on from, with its own vocabulary and shape; "" = a new one
MLM_FOLDER = "checkpoints/mlm_encoder"  # where the encoder goes; what a stopped run needs lies beside it, in .run
BLOCK_SIZE = 64          # tokens that a span of sentences may fill, [CLS] and [SEP] included
SENTENCE_RATE = 0.5      # share of the spans that are one sentence, as SimCSE will see them; BERT shortens 0.1
LONG_RATE = 0.05         # share of the spans that may fill all N_POSITIONS; BERT 0.1
MASK_RATE = 0.25         # share of the tokens to be predicted; BERT 0.15
MAX_TOKENS = 120_000_000  # tokens to train on; may be changed when a stopped run is resumed
CLS_WEIGHT = 1.0         # weight of the task of [CLS], to tell the words of its span; 0: none, [CLS] learns nothing of its own
CLS_SIF = 1e-4           # a in a / (a + frequency), what a word counts in that task (Arora et al., 2017); inf: all count alike
TOKENS_PER_STEP = 2048   # tokens in a batch; BERT 128,000
MLM_LEARNING_RATE = 1e-3  # AdamW's peak rate; BERT 1e-4, which is for a wider encoder and larger batches
WARMUP_TOKENS = 400_000  # tokens over which the rate climbs
DECAY_SHARE = 0.2        # last share of the tokens, over which the rate falls linearly to 0
MLM_DROPOUT = 0.1        # rate of every dropout at the end of pre-training, and the checkpoint's own; BERT 0.1
DROPOUT_SHARE = 0.33     # last share of the tokens for which dropout is on; BERT 1
HELD_OUT = 50            # one article in so many is kept for validation
VALIDATION_TOKENS = 100_000  # tokens of held-out articles in a validation
VALIDATION_INTERVAL = 2_000_000  # tokens between two validations
SAVE_MINUTES = 5.0       # minutes between two saves of what a stopped run needs

# Runs
SEED = 42                # every random choice follows from it
DEVICE = "auto"          # auto (cuda, else mps, else cpu) or a torch device such as cpu or cuda:1
RUN_NAME = ""            # folder under checkpoints/; "" names it after the settings that differ from the defaults
OVERWRITE = False        # True: replace a finished run of the same name
RESUME = False           # True: go on with a run that was stopped

# Evaluation (evaluate.py)
CHECKPOINT = ""          # folder or Hub name to score; "" = the newest run, beside the encoder it started from
SPLIT = "validation"     # validation or test

# Ablations (ablations.py)
ONLY = "setting,pooling,head"  # groups of variants: setting, dropout, longer, pooling, head, data, tokens, temperature, batch, start
SEEDS = "0,1,2"          # seeds to run each variant with

RULES = [
    ("a whole number of at least 1", lambda v: v >= 1,
     ["MAX_SENTENCES", "N_LAYER", "N_EMBD", "N_HEAD", "EPOCHS", "EVAL_INTERVAL", "MAX_TOKENS",
      "TOKENS_PER_STEP", "VALIDATION_TOKENS", "VALIDATION_INTERVAL"]),
    ("a whole number of at least 2 (one sentence has no negatives)", lambda v: v >= 2, ["BATCH_SIZE"]),
    ("a whole number of at least 3 ([CLS], a token, [SEP])", lambda v: v >= 3, ["MAX_SEQ_LEN", "N_POSITIONS", "BLOCK_SIZE"]),
    ("a whole number of at least 2", lambda v: v >= 2, ["HELD_OUT"]),
    ("a whole number of at least 100", lambda v: v >= 100, ["VOCAB_SIZE"]),
    ("a whole number from 0 to 2**32 - 1", lambda v: 0 <= v < 2**32, ["SEED"]),
    ("a number above 0", lambda v: 0 < v < math.inf,
     ["TEMPERATURE", "LEARNING_RATE", "GRAD_CLIP", "MLM_LEARNING_RATE", "MASK_RATE"]),
    ("a number above 0, or inf", lambda v: v > 0, ["CLS_SIF"]),
    ("a number of at least 0", lambda v: 0 <= v < math.inf, ["WEIGHT_DECAY", "WARMUP_TOKENS", "CLS_WEIGHT", "SAVE_MINUTES"]),
    ("a number from 0 to 1", lambda v: 0 <= v <= 1,
     ["WARMUP_RATIO", "SENTENCE_RATE", "LONG_RATE", "MASK_RATE", "DECAY_SHARE", "DROPOUT_SHARE"]),
    ("a number of at least 0 and below 1", lambda v: 0 <= v < 1, ["DROPOUT", "MLM_DROPOUT"]),
    ("cls or mean", lambda v: v in ("cls", "mean"), ["POOLER"]),
    ("validation or test", lambda v: v in ("validation", "test"), ["SPLIT"]),
    ("a folder name without / or \\", lambda v: v == v.strip() and not re.search(r"[/\\\0\n]|^\.", v), ["RUN_NAME"]),
    ("set", lambda v: v != "", ["CORPUS", "STSB", "INIT", "DEVICE", "MLM_FOLDER"]),
]

# where the scripts keep what they make
here = os.path.dirname(os.path.abspath(__file__))
data, checkpoints, results = (os.path.join(here, name) for name in ("data", "checkpoints", "results"))
overridden = set()      # the knobs that the shell has set

DEFAULTS = {name: value for name, value in globals().items() if name.isupper() and name != "RULES"}


def check():
    """Raise ValueError, naming the knob, where a constant is of the wrong type, out of range, or at odds with another."""
    for name, default in DEFAULTS.items():
        value = globals()[name]
        allowed = (int, float) if type(default) is float else type(default)
        if not isinstance(value, allowed) or isinstance(value, bool) != isinstance(default, bool):
            raise ValueError(f"{name} must be of type {type(default).__name__}, not {value!r}")
    for rule, holds, names in RULES:
        for name in names:
            if not holds(globals()[name]):
                raise ValueError(f"{name} must be {rule}, not {globals()[name]!r}")
    if N_EMBD % N_HEAD:
        raise ValueError(f"N_EMBD={N_EMBD} must be divisible by N_HEAD={N_HEAD}")


def parse(name, text):
    """The value that `text` stands for, typed by the default of the knob; raises ValueError where it is of another type."""
    kind = type(DEFAULTS[name])
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        expected = {bool: "True or False", int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"{name} must be {expected}, not {text!r}") from None


def override(arguments, script=None):
    """Set constants from NAME=value strings; raises ValueError for an unknown name or a value that can't be.

    script: the path of the script that was called, which must read what is set.
    """
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise ValueError(f"{argument!r} is not of the form NAME=value")
        if name not in DEFAULTS:
            near = difflib.get_close_matches(name.upper(), DEFAULTS, n=1, cutoff=0.5)
            raise ValueError(f"unknown knob {name!r}" + (f": did you mean {near[0]}?" if near else "; --help lists them"))
        if script and name not in knobs_of(script):
            readers = [file for file in sorted(os.listdir(here)) if file.endswith(".py")
                       and not file.startswith("test_") and "__main__" in read(file) and name in knobs_of(file)]
            raise ValueError(f"{os.path.basename(script)} does not read {name}; {' and '.join(readers)} would")
        globals()[name] = parse(name, text)
        overridden.add(name)
    check()


def read(name):
    """The source of one of our scripts."""
    with open(os.path.join(here, os.path.basename(name)), encoding="utf-8") as file:
        return file.read()


def knobs_of(script):
    """The names of the knobs that a script and its helpers read, found in their source."""
    text = read(script)
    for how, module in re.findall(r"^(from|import) (\w+)", text, re.M):
        if os.path.exists(os.path.join(here, module + ".py")):
            helper = read(module + ".py")
            # of another script only a function is taken, and not its knobs, unless the whole of it is imported
            text += helper if how == "import" or "__main__" not in helper else ""
    return [name for name in DEFAULTS if re.search(rf"\bconfig\.{name}\b", text)]


def shown(path):
    """A path as one would type it: relative to the scripts where it lies beside them."""
    return path.removeprefix(here + os.sep)


def portable(path):
    """A path to be kept in a file: from here, "./" first, where it lies beside the scripts, wherever those are moved to."""
    return os.path.join(".", shown(path)) if shown(path) != path else path


def located(kept):
    """The path that `portable` kept; anything else, the name of an encoder on the Hub say, as it is."""
    return os.path.join(here, os.path.normpath(kept)) if kept.startswith(".") else kept


def first_line(error):
    """What an error says, in one line of at most 300 characters; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def help_text(script):
    """A script's knobs, each with its value and its comment above."""
    comments = dict(re.findall(r"^([A-Z_]+) = .*?# (.*)$", read(__file__), re.M))
    return "\n".join([f"usage: python {os.path.basename(script)} [NAME=value ...]", ""]
                     + [f"  {name + '=' + str(globals()[name]):32} {comments[name]}" for name in knobs_of(script)])


def run(main, script):
    """Run a script's `main` under its command line; what a user can cause ends in one line, not a traceback.

    Exit status: 0 done, 1 failed, 2 a bad argument, 130 interrupted.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(script))
        return
    try:
        override(sys.argv[1:], script)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("out of memory|not enough memory|can't allocate", str(error)):
            raise
        print(f"error: not enough memory ({first_line(error)}): a smaller batch or encoder needs less", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        knobs = knobs_of(script)
        how = "the same command" if "ONLY" in knobs else "RESUME=True" if "RESUME" in knobs else ""
        print("stopped" + (f"; {how} goes on from what was saved, if anything was" if how else ""), file=sys.stderr)
        sys.exit(130)
