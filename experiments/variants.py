"""The variants of ablations.py: group -> variant -> the knobs in which it differs from the defaults, or the shell's."""

# Starting encoders beside the shipped mlm_encoder, and the knobs of pretraining.pretrain that make each; mlm_twice is
# shipped as well, and the variants of those that are not there are left out
VALLEY, PLAIN, MOMENT, HALF, TWICE = (
    f"checkpoints/mlm_{name}" for name in ("valley", "plain", "moment", "half", "twice")
)
RECIPES = {
    VALLEY: "CLS_WEIGHT=0 MAX_TOKENS=300_000 DECAY_SHARE=0 DROPOUT_SHARE=0",
    PLAIN: "CLS_WEIGHT=0 MAX_TOKENS=2_000_000",
    MOMENT: "MAX_TOKENS=800_000",
    HALF: "MAX_TOKENS=10_250_000",
    TWICE: "MLM_INIT=checkpoints/mlm_encoder SEED=43 MAX_TOKENS=21_000_000 DECAY_SHARE=0.1 DROPOUT_SHARE=0.1",
}

LONGER = {"MAX_SENTENCES": 10_000, "EPOCHS": 3, "EVAL_INTERVAL": 50}

VARIANTS = {
    "setting": {
        "the chapter's": {},
        "tuned": {"MAX_SEQ_LEN": 10, "LEARNING_RATE": 2e-4, "USE_MLP_HEAD": False},
    },
    "dropout": {
        "p = 0": {"DROPOUT": 0.0},
        "p = 0.01": {"DROPOUT": 0.01},
        "p = 0.05": {"DROPOUT": 0.05},
        "p = 0.1": {"DROPOUT": 0.1},
        "p = 0.15": {"DROPOUT": 0.15},
        "p = 0.2": {"DROPOUT": 0.2},
        "p = 0.5": {"DROPOUT": 0.5},
        "one mask, p = 0.1": {"DROPOUT": 0.1, "FIXED_MASK": True},
    },
    "longer": {
        "p = 0": {"DROPOUT": 0.0, **LONGER},
        "p = 0.1": {"DROPOUT": 0.1, **LONGER},
        "one mask, p = 0.1": {"DROPOUT": 0.1, "FIXED_MASK": True, **LONGER},
    },
    "pooling": {
        "cls": {"POOLER": "cls"},
        "mean": {"POOLER": "mean"},
    },
    "head": {
        "no head": {"USE_MLP_HEAD": False},
        "head in training only": {"USE_MLP_HEAD": True},
        "head in both": {"USE_MLP_HEAD": True, "HEAD_AT_EVALUATION": True},
    },
    "data": {  # 10k x 3 makes the steps of 30k x 1
        "10k x 1": {"MAX_SENTENCES": 10_000, "EPOCHS": 1, "EVAL_INTERVAL": 50},
        "10k x 3": {"MAX_SENTENCES": 10_000, "EPOCHS": 3, "EVAL_INTERVAL": 50},
        "10k x 5": {"MAX_SENTENCES": 10_000, "EPOCHS": 5, "EVAL_INTERVAL": 50},
        "30k x 1": {"MAX_SENTENCES": 30_000, "EPOCHS": 1, "EVAL_INTERVAL": 50},
        "100k x 1": {"MAX_SENTENCES": 100_000, "EPOCHS": 1, "EVAL_INTERVAL": 50},
    },
    "tokens": {
        "8 tokens": {"MAX_SEQ_LEN": 8},
        "10 tokens": {"MAX_SEQ_LEN": 10},
        "16 tokens": {"MAX_SEQ_LEN": 16},
        "32 tokens": {"MAX_SEQ_LEN": 32},
    },
    "temperature": {
        "tau = 0.01": {"TEMPERATURE": 0.01},
        "tau = 0.05": {"TEMPERATURE": 0.05},
        "tau = 0.1": {"TEMPERATURE": 0.1},
        "tau = 0.5": {"TEMPERATURE": 0.5},
    },
    "batch": {
        "N = 32": {"BATCH_SIZE": 32},
        "N = 64": {"BATCH_SIZE": 64},
        "N = 128": {"BATCH_SIZE": 128},
        "N = 256": {"BATCH_SIZE": 256},
    },
    "start": {
        "random weights": {"INIT": "random"},
        "[CLS] in its valley": {"INIT": VALLEY},
        "pre-trained, [CLS] without a task": {"INIT": PLAIN},
        "pre-trained for a moment": {"INIT": MOMENT},
        "pre-trained on half the tokens": {"INIT": HALF},
        "pre-trained": {},
        "pre-trained on twice the tokens": {"INIT": TWICE},
    },
}
