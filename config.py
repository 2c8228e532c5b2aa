"""Every knob of the four scripts. Edit a line here, or give it on the command line: python train.py DROPOUT=0."""

# Data (download_data.py)
CORPUS = "auto"          # sentences: auto, wikitext (the chapter's), wiki1m (the paper's), vital, or a file of your own
STSB = "auto"            # STS-B: auto, hub, sample (shipped, no benchmark), or a folder of CSV files
MAX_SENTENCES = 100_000  # sentences kept for training; chapter 100,000, paper 1,000,000

# Method (train.py)
INIT = "checkpoints/mlm_encoder"  # starting encoder: a checkpoint folder, a Hub name, or random; paper BERT-base
POOLER = "cls"           # sentence embedding: cls (chapter and paper) or mean (the chapter's exercise 2)
USE_MLP_HEAD = True      # train through a one-layer tanh MLP that evaluation leaves out; chapter and paper True
DROPOUT = 0.1            # rate of every dropout in the encoder, the only augmentation; chapter and paper 0.1
FIXED_MASK = False       # True: both passes share their dropout masks, the paper's "Fixed 0.1" (table 3)
TEMPERATURE = 0.05       # tau of equation 4; chapter and paper 0.05

# Optimisation (train.py)
BATCH_SIZE = 64          # sentences a step, each with BATCH_SIZE - 1 negatives; chapter and paper 64
EPOCHS = 1               # passes over the sentences; chapter 1, 3 and 5, paper 1
LEARNING_RATE = 5e-5     # AdamW's peak rate; chapter 5e-5, paper 3e-5 for BERT-base
WEIGHT_DECAY = 0.01      # AdamW's, on weight matrices only; the paper's code 0
WARMUP_RATIO = 0.1       # share of the steps over which the rate climbs, before it falls to 0; the paper's code 0
GRAD_CLIP = 1.0          # largest gradient norm; the paper's code 1.0
MAX_SEQ_LEN = 32         # tokens a training sentence keeps, [CLS] and [SEP] included; chapter and paper 32
EVAL_INTERVAL = 50       # steps between two STS-B scores, of which the best one's encoder is kept; paper 250

# An encoder with random weights (train.py INIT=random, pretraining): the shape of the chapter's
N_LAYER = 6              # Transformer blocks; BERT-base 12
N_EMBD = 256             # width of the hidden states and of the embedding; BERT-base 768
N_HEAD = 8               # attention heads, which must divide N_EMBD; BERT-base 12
N_POSITIONS = 128        # longest input the encoder can take, in tokens; BERT-base 512
VOCAB_SIZE = 8192        # WordPiece vocabulary learned from the corpus, in tokens; BERT-base 30,522

# Runs (train.py)
SEED = 42                # every random choice follows from it
DEVICE = "auto"          # auto (cuda, else mps, else cpu) or a torch device such as cpu or cuda:1
PRECISION = "auto"       # of the matrix products in training: float32, bfloat16, or auto (bfloat16 if in hardware)
RUN_NAME = ""            # folder under checkpoints/; "" names it after the settings that differ from the chapter's
OVERWRITE = False        # True: replace a run of the same name
RESUME = False           # True: go on with a run that was stopped

# Evaluation (evaluate.py)
CHECKPOINT = ""          # folder or Hub name to score; "" is the newest run, beside the encoder it started from
EVAL_POOLER = ""         # cls or mean; "" is the checkpoint's own
SPLIT = "validation"     # STS-B's validation (dev) or test
