"""The knobs of the experiments, beside those that they take from the config.py of the root."""

# Ablations
ONLY = "setting,pooling,head"  # groups of variants, with commas between; variants.py has them all
SEEDS = "0,1,2"          # seeds to run each variant with
MAX_SENTENCES = 4_000    # in place of the root's, as the best score comes early: sentences of a run
EVAL_INTERVAL = 10       # in place of the root's: steps between two scores
HEAD_AT_EVALUATION = False  # True: the scores are taken through the MLP head as well; paper, table 6

# Benchmark
ROUNDS = 5               # turns of each contender that count; one more before them warms up

# What people do next (sts.py, search.py, map.py)
STS = "hub"              # the seven tasks of the paper's table 5: hub, or a folder of CSV files
QUERY = ""               # the sentence to look for; it need not be named: search.py "a sentence"
TEXT = ""                # file to look in, a sentence a line; "" is data/sentences.txt
NEAREST = 10             # sentences to find
