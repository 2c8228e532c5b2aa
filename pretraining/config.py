"""The knobs of pretrain.py, beside those that it takes from the config.py of the root."""

# Text, and where the encoder goes
PRETRAIN_CORPUS = ""     # .txt or .txt.gz, a paragraph a line, a blank line between articles; "" is data/sentences.txt
MLM_INIT = ""            # encoder of pretrain.py's to go on from, with its own vocabulary and shape; "" is a new one
MLM_FOLDER = "checkpoints/mlm_encoder"  # where the encoder goes; what a stopped run needs lies beside it, in .run
HELD_OUT = 50            # one article in so many is kept for validation

# From text to masked batches
BLOCK_SIZE = 64          # tokens that a span of sentences may fill, [CLS] and [SEP] included; BERT 128, then 512
SENTENCE_RATE = 0.5      # share of the spans that are one sentence, as SimCSE will see them; BERT shortens 0.1
LONG_RATE = 0.05         # share of the spans that may fill all N_POSITIONS; BERT 0.1
MASK_RATE = 0.25         # share of the tokens to be predicted; BERT 0.15

# Objective
CLS_WEIGHT = 1.0         # weight of the task of [CLS], to tell the words of its span; 0: none, [CLS] is not trained
CLS_SIF = 1e-4           # a in a / (a + frequency), what a word counts in it (Arora et al., 2017); inf: all count alike
MLM_DROPOUT = 0.1        # rate of every dropout at the end of pre-training, and the checkpoint's own; BERT 0.1
DROPOUT_SHARE = 0.33     # last share of the tokens for which dropout is on; BERT 1

# Optimisation
MAX_TOKENS = 120_000_000  # tokens to train on; may be changed when a stopped run is resumed
TOKENS_PER_STEP = 2048   # tokens in a batch; BERT 128,000
MLM_LEARNING_RATE = 1e-3  # AdamW's peak rate; BERT 1e-4, which is for a wider encoder and larger batches
WARMUP_TOKENS = 400_000  # tokens over which the rate climbs
DECAY_SHARE = 0.2        # last share of the tokens, over which the rate falls linearly to 0
VALIDATION_TOKENS = 100_000  # tokens of held-out articles in a validation
VALIDATION_INTERVAL = 2_000_000  # tokens between two validations
SAVE_MINUTES = 5.0       # minutes between two saves of what a stopped run needs
