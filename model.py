"""The encoder and the objective of unsupervised SimCSE: BERT -> pooling -> MLP head, equation 4, and the two metrics.

Papers: SimCSE (Gao et al., 2021), BERT (Devlin et al., 2018), alignment and uniformity (Wang & Isola, 2020).
"""

import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers


# ---------------------------------------------------------------------------- the objective

def simcse_loss(z1, z2, temperature):
    """Contrastive loss over a batch of positive pairs with in-batch negatives, averaged over both directions.

    z1, z2: (N, C) floats, the two views of N >= 2 sentences. Returns a scalar tensor in nats, log N at chance.
    Raises ValueError for fewer than two sentences, unequal shapes, or a temperature that is not positive.
    Source: SimCSE, equation 4.
    """
    if z1.shape != z2.shape or z1.dim() != 2:
        raise ValueError(f"the two views must both be (N, C), not {tuple(z1.shape)} and {tuple(z2.shape)}")
    if len(z1) < 2:
        raise ValueError("a batch of one sentence has no negatives: the loss needs at least two")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature!r}")
    h1, h2 = F.normalize(z1, dim=-1), F.normalize(z2, dim=-1)
    similarity = h1 @ h2.T / temperature                            # (N, N), row i: view 1 of i against view 2 of all j
    positive = torch.arange(len(z1), device=z1.device)              # the positives lie on the diagonal
    return (F.cross_entropy(similarity, positive) + F.cross_entropy(similarity.T, positive)) / 2


def alignment_and_uniformity(z1, z2, t=2.0):
    """How close positive pairs are, and how evenly all embeddings cover the sphere. Both: lower is better.

    z1, z2: (N, C) floats, N positive pairs, N >= 1. Returns two floats: alignment E|x - y|^2 in [0, 4] over the pairs,
    uniformity log E exp(-t |x - y|^2) in [-4t, 0] over all pairs of the 2N embeddings (0: all are the same point).
    Source: Wang & Isola (2020), section 4.1, with alpha = 2; SimCSE, equations 2 and 3.
    """
    h1, h2 = F.normalize(z1, dim=-1), F.normalize(z2, dim=-1)
    alignment = (h1 - h2).square().sum(-1).mean()
    uniformity = torch.pdist(torch.cat([h1, h2])).square().mul(-t).exp().mean().log()
    return alignment.item(), uniformity.item()


# ---------------------------------------------------------------------------- the encoder

class SelfAttention(nn.Module):
    """Bidirectional multi-head attention over the real tokens. Source: BERT, section 3."""

    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.query = nn.Linear(n_embd, n_embd)
        self.key = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.output = nn.Linear(n_embd, n_embd)

    def forward(self, x, mask):
        B, T, C = x.shape
        # (B, T, C) -> (B, n_head, T, C / n_head)
        q, k, v = (layer(x).view(B, T, self.n_head, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
        # softmax(q k^T / sqrt(C / n_head)) v, with dropout on the softmax and no weight on [PAD]
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout if self.training else 0.0)
        return self.output(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """One Transformer block with LayerNorm after each residual sum. Source: BERT, section 3."""

    def __init__(self, n_embd, n_head, n_inner, dropout, eps):
        super().__init__()
        self.attention = SelfAttention(n_embd, n_head, dropout)
        self.attention_norm = nn.LayerNorm(n_embd, eps)
        self.ffn_in = nn.Linear(n_embd, n_inner)
        self.ffn_out = nn.Linear(n_inner, n_embd)
        self.ffn_norm = nn.LayerNorm(n_embd, eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        return self.ffn_norm(x + self.dropout(self.ffn_out(F.gelu(self.ffn_in(x)))))


class MLPHead(nn.Module):
    """The projection that the loss sees in training and evaluation never does. Source: SimCSE, section 3."""

    def __init__(self, n_embd):
        super().__init__()
        self.dense = nn.Linear(n_embd, n_embd)

    def forward(self, embedding):
        return torch.tanh(self.dense(embedding))


class SimCSEEncoder(nn.Module):
    """A BERT of any shape that turns sentences into vectors; its tokenizer belongs to it.

    pooler: "cls", the hidden state of [CLS], or "mean", the average over the real tokens; anything else is a ValueError.
    """

    def __init__(self, tokenizer, n_layer=6, n_embd=256, n_head=8, n_inner=None, n_positions=128, vocab_size=None,
                 n_segments=2, dropout=0.1, pooler="cls", eps=1e-12):
        super().__init__()
        if pooler not in ("cls", "mean"):
            raise ValueError(f'unknown pooler {pooler!r}: the poolers are "cls" and "mean"')
        if n_embd % n_head:
            raise ValueError(f"the width {n_embd} is not divisible by the number of heads {n_head}")
        self.tokenizer, self.pooler = tokenizer, pooler
        self.n_head, self.n_positions, self.dropout_rate, self.eps = n_head, n_positions, dropout, eps
        self.token_embedding = nn.Embedding(vocab_size or tokenizer.get_vocab_size(), n_embd)
        self.position_embedding = nn.Embedding(n_positions, n_embd)
        self.segment_embedding = nn.Embedding(n_segments, n_embd)
        self.embedding_norm = nn.LayerNorm(n_embd, eps)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, n_inner or 4 * n_embd, dropout, eps) for _ in range(n_layer))
        self.mlp_head = MLPHead(n_embd)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module):
        # BERT's 0.02 for every weight is 0.55 / sqrt(768): what keeps a signal's size through a layer depends on the width
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.8 * module.in_features ** -0.5)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Block):             # visited after its layers: what writes into the residual starts small
            for layer in (module.attention.output, module.ffn_out):
                nn.init.normal_(layer.weight, std=0.4 * layer.in_features ** -0.5)

    def forward(self, idx, attention_mask):
        """Hidden states of the last block. idx: (B, T) token ids; attention_mask: (B, T), 0 at [PAD]. Returns (B, T, C)."""
        T = idx.shape[1]
        if T > self.n_positions:
            raise ValueError(f"an input of {T} tokens is longer than the encoder's {self.n_positions} positions")
        mask = attention_mask.bool()[:, None, None, :]              # (B, 1, 1, T), the same for every head and query
        x = self.token_embedding(idx) + self.position_embedding.weight[:T] + self.segment_embedding.weight[0]
        x = self.dropout(self.embedding_norm(x))
        for block in self.blocks:
            x = block(x, mask)
        return x

    def encode(self, idx, attention_mask, project=False):
        """Sentence embeddings. idx, attention_mask: (B, T); project: through the MLP head (training only). Returns (B, C)."""
        hidden = self(idx, attention_mask)                          # (B, T, C)
        if self.pooler == "cls":
            embedding = hidden[:, 0]
        else:
            mask = attention_mask.unsqueeze(-1).to(hidden.dtype)    # (B, T, 1)
            embedding = (hidden * mask).sum(1) / mask.sum(1)
        return self.mlp_head(embedding) if project else embedding

    def tokenize(self, sentences, max_seq_len=None):
        """Token ids with [CLS] and [SEP], cut to max_seq_len tokens (default: all positions) and padded to the longest.

        Returns idx (N, T) int64 and attention_mask (N, T) bool. Raises ValueError where max_seq_len exceeds the positions.
        """
        limit = max_seq_len or self.n_positions
        if limit > self.n_positions:
            raise ValueError(f"MAX_SEQ_LEN={limit} is more than the encoder's {self.n_positions} positions")
        rows = []
        for start in range(0, len(sentences), 10_000):              # in pieces: the tokenizer's own objects are large
            for encoding in self.tokenizer.encode_batch(list(sentences[start:start + 10_000])):
                ids = encoding.ids
                rows.append(torch.tensor(ids if len(ids) <= limit else ids[:limit - 1] + ids[-1:]))     # [SEP] stays
        idx = torch.full((len(rows), max(map(len, rows), default=0)), self.tokenizer.token_to_id("[PAD]") or 0)
        attention_mask = torch.zeros_like(idx, dtype=torch.bool)
        for i, row in enumerate(rows):
            idx[i, :len(row)], attention_mask[i, :len(row)] = row, True
        return idx, attention_mask

    # ------------------------------------------------------------------------ save and load

    def save_pretrained(self, folder, dtype=torch.float32):
        """Write a checkpoint folder in the Hugging Face BERT layout, the MLP head left out; weights in `dtype`.

        Every file is replaced in one step: a save that fails leaves the checkpoint that was there.
        """
        vocab = self.tokenizer.get_vocab()
        n_embd = self.token_embedding.embedding_dim
        shape = {
            "model_type": "bert", "architectures": ["BertModel"], "vocab_size": self.token_embedding.num_embeddings,
            "num_hidden_layers": len(self.blocks), "hidden_size": n_embd, "num_attention_heads": self.n_head,
            "intermediate_size": self.blocks[0].ffn_in.out_features, "max_position_embeddings": self.n_positions,
            "type_vocab_size": self.segment_embedding.num_embeddings, "layer_norm_eps": self.eps, "hidden_act": "gelu",
            "hidden_dropout_prob": self.dropout_rate, "attention_probs_dropout_prob": self.dropout_rate,
            "pad_token_id": self.tokenizer.token_to_id("[PAD]")}
        normalizer = json.loads(self.tokenizer.to_str())["normalizer"] or {}
        module = "sentence_transformers.models."
        files = {
            "config.json": shape,
            "tokenizer_config.json": {
                "tokenizer_class": "BertTokenizer", "do_lower_case": normalizer.get("lowercase", False),
                "model_max_length": self.n_positions, "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]",
                "sep_token": "[SEP]", "mask_token": "[MASK]"},
            "modules.json": [{"idx": 0, "name": "0", "path": "", "type": module + "Transformer"},
                             {"idx": 1, "name": "1", "path": "1_Pooling", "type": module + "Pooling"}],
            "sentence_bert_config.json": {"max_seq_length": self.n_positions, "do_lower_case": False},
            "1_Pooling/config.json": {"word_embedding_dimension": n_embd,
                                      "pooling_mode_cls_token": self.pooler == "cls",
                                      "pooling_mode_mean_tokens": self.pooler == "mean"}}
        weights = {hugging_face_name(name): tensor.detach().to("cpu", dtype).contiguous()
                   for name, tensor in self.state_dict().items() if not name.startswith("mlp_head.")}
        os.makedirs(os.path.join(folder, "1_Pooling"), exist_ok=True)
        for name, content in files.items():
            write_atomically(os.path.join(folder, name), json.dumps(content, indent=2).encode())
        write_atomically(os.path.join(folder, "tokenizer.json"), self.tokenizer.to_str().encode())
        write_atomically(os.path.join(folder, "vocab.txt"), "".join(f"{t}\n" for t in sorted(vocab, key=vocab.get)).encode())
        write_atomically(os.path.join(folder, "model.safetensors"), save(weights, metadata={"format": "pt"}))

    @classmethod
    def from_pretrained(cls, folder_or_hub_name, pooler=None, dropout=None):
        """Load a BERT checkpoint from a folder in the Hugging Face layout, or from the Hub by its name.

        pooler, dropout: None takes the checkpoint's own (cls and 0.1 where it names none). The weights become float32,
        the MLP head is new. Raises FileNotFoundError or ValueError, in one line, for anything that doesn't fit.
        """
        folder = folder_or_hub_name if os.path.isdir(folder_or_hub_name) else download_checkpoint(folder_or_hub_name)
        shape = read_json(folder, "config.json")
        kind = shape.get("model_type", "bert")                      # the oldest BERT checkpoints don't say
        if kind != "bert":
            raise ValueError(f"{folder_or_hub_name} is a {kind} model: only BERT's architecture is implemented here")
        for key, known in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if shape.get(key, known) != known:
                raise ValueError(f"{folder_or_hub_name}: {key} is {shape[key]!r}, only {known!r} is implemented here")
        try:
            arguments = {ours: shape[theirs] for ours, theirs in (
                ("n_layer", "num_hidden_layers"), ("n_embd", "hidden_size"), ("n_head", "num_attention_heads"),
                ("n_inner", "intermediate_size"), ("n_positions", "max_position_embeddings"), ("vocab_size", "vocab_size"))}
        except KeyError as error:
            raise ValueError(f"{os.path.join(folder, 'config.json')} does not say {error}") from None
        tokenizer = load_tokenizer(folder)
        spare = shape["vocab_size"] - tokenizer.get_vocab_size()    # some pad the matrix to a round number of rows
        if not 0 <= spare < 128:
            raise ValueError(f"{folder_or_hub_name}: the tokenizer has {tokenizer.get_vocab_size()} tokens, "
                             f"the weights {shape['vocab_size']}: they do not belong together")
        encoder = cls(tokenizer, n_segments=shape.get("type_vocab_size", 2), eps=shape.get("layer_norm_eps", 1e-12),
                      dropout=shape.get("hidden_dropout_prob", 0.1) if dropout is None else dropout,
                      pooler=pooler or saved_pooler(folder), **arguments)
        encoder._load_weights(*read_weights(folder))
        return encoder

    def _load_weights(self, weights, path):
        state = self.state_dict()
        for name in [name for name in state if not name.startswith("mlp_head.")]:
            theirs = hugging_face_name(name)
            if theirs not in weights:
                raise ValueError(f"{path} lacks the weight {theirs}")
            tensor = weights.pop(theirs)
            if tensor.shape != state[name].shape:
                raise ValueError(f"{path}: {theirs} has the shape {tuple(tensor.shape)}, "
                                 f"config.json asks for {tuple(state[name].shape)}")
            state[name] = tensor.float()
        if weights:
            raise ValueError(f"{path} holds a weight that BERT does not have: {min(weights)}")
        self.load_state_dict(state)


def hugging_face_name(name):
    """The name that Hugging Face's BertModel gives to one of our weights."""
    for ours, theirs in (("token_embedding", "embeddings.word_embeddings"),
                         ("position_embedding", "embeddings.position_embeddings"),
                         ("segment_embedding", "embeddings.token_type_embeddings"),
                         ("embedding_norm", "embeddings.LayerNorm"), ("blocks.", "encoder.layer."),
                         ("attention.query", "attention.self.query"), ("attention.key", "attention.self.key"),
                         ("attention.value", "attention.self.value"), ("attention.output", "attention.output.dense"),
                         ("attention_norm", "attention.output.LayerNorm"), ("ffn_in", "intermediate.dense"),
                         ("ffn_out", "output.dense"), ("ffn_norm", "output.LayerNorm")):
        name = name.replace(ours, theirs)
    return name


def read_weights(folder):
    """A checkpoint's encoder weights by BertModel's names, and the path they came from; heads and buffers are left out."""
    path = os.path.join(folder, "model.safetensors")
    try:
        if os.path.exists(path):
            weights = load_file(path)
        else:
            path = os.path.join(folder, "pytorch_model.bin")
            if not os.path.exists(path):
                raise FileNotFoundError(f"{folder} has neither model.safetensors nor pytorch_model.bin")
            weights = torch.load(path, map_location="cpu", weights_only=True)       # never runs a pickle's code
    except OSError:
        raise
    except Exception as error:      # safetensors, zipfile and pickle each have their own for a broken file
        raise ValueError(f"{path} can't be read as weights, it may be damaged: {str(error).splitlines()[0]}") from None
    renamed = {}
    for name, tensor in weights.items():
        name = name.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if not name.startswith(("pooler.", "cls.")) and not name.endswith("position_ids"):
            renamed[name] = tensor
    return renamed, path


def read_json(folder, name):
    """The content of a JSON file of a checkpoint folder; raises FileNotFoundError or ValueError in one line."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no {name}")
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def saved_pooler(folder):
    """The pooling a checkpoint was trained with ("cls" or "mean"), from sentence-transformers' file; "cls" without one."""
    if not os.path.exists(os.path.join(folder, "1_Pooling", "config.json")):
        return "cls"
    pooling = read_json(folder, "1_Pooling/config.json")
    modes = [key for key, on in pooling.items() if key.startswith("pooling_mode_") and on] or [pooling.get("pooling_mode")]
    known = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "cls": "cls", "mean": "mean"}
    if len(modes) != 1 or modes[0] not in known:
        raise ValueError(f"{folder} pools by {modes}: only cls and mean are implemented here, name one with POOLER=")
    return known[modes[0]]


def download_checkpoint(name):
    """Fetch a checkpoint from the Hugging Face Hub (or its cache) by its name; returns the local folder."""
    import huggingface_hub as hub           # slow to import, and most runs need no Hub
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
    folder = weights = None
    try:
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "1_Pooling/config.json",
                     "model.safetensors", "pytorch_model.bin"):
            if file == "pytorch_model.bin" and weights:
                continue
            try:
                path = hub.hf_hub_download(name, file, etag_timeout=10)
            except LocalEntryNotFoundError:                 # no answer, and no copy in the cache
                if folder is None:
                    raise
            except EntryNotFoundError:                      # the repository has no such file
                continue
            else:
                folder = folder or os.path.dirname(path)
                weights = file == "model.safetensors"
    except HFValidationError:
        raise FileNotFoundError(f"{name}: no such folder, and no name that a Hub repository can have") from None
    except OSError as error:                                # every other error of the Hub's client
        raise OSError(f"{name} is no local folder and could not be fetched from the Hub: "
                      f"{str(error).strip().splitlines()[0]}") from None
    if folder is None:
        raise FileNotFoundError(f"{name} on the Hub is no checkpoint: it has no config.json")
    return folder


def write_atomically(path, content):
    """Write bytes to a file so that it is either the old one or the new one, whole, whatever happens meanwhile."""
    temporary = path + ".tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


# ---------------------------------------------------------------------------- the tokenizer

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def wordpiece_tokenizer(vocab, lowercase=True):
    """BERT's WordPiece tokenizer over a vocabulary (a dict from token to id, or None where it is still to be trained)."""
    tokenizer = Tokenizer(models.WordPiece(vocab or {}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if vocab:
        missing = [token for token in SPECIAL_TOKENS if token not in vocab]
        if missing:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}")
        tokenizer.add_special_tokens(SPECIAL_TOKENS)
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    return tokenizer


def train_tokenizer(sentences, vocab_size):
    """Learn a lower-cased WordPiece vocabulary of at most vocab_size tokens from an iterable of strings."""
    tokenizer = wordpiece_tokenizer(None)
    tokenizer.train_from_iterator(sentences, trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, show_progress=False))
    return wordpiece_tokenizer(tokenizer.get_vocab())


def load_tokenizer(folder):
    """A checkpoint's tokenizer, from tokenizer.json or else vocab.txt; padding and truncation are left to us."""
    path = os.path.join(folder, "tokenizer.json")
    if os.path.exists(path):
        try:
            tokenizer = Tokenizer.from_file(path)
        except Exception as error:          # the library raises bare Exceptions
            raise ValueError(f"{path} can't be read as a tokenizer: {error}") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer
    path = os.path.join(folder, "vocab.txt")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{folder} has neither tokenizer.json nor vocab.txt")
    lowercase = True
    if os.path.exists(os.path.join(folder, "tokenizer_config.json")):
        lowercase = read_json(folder, "tokenizer_config.json").get("do_lower_case", True)
    with open(path, encoding="utf-8") as file:
        vocab = {token.rstrip("\n"): i for i, token in enumerate(file)}
    return wordpiece_tokenizer(vocab, lowercase)
