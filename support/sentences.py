"""Text made clean, and cut into sentences."""

import re
import unicodedata

from sentencex import segment

LONGEST_PIECE = 10_000  # characters
# control characters, soft hyphens, zero-width spaces, byte-order marks, surrogates
UNWANTED = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u200b\ufeff\ud800-\udfff]")
WORD = re.compile(r"[^\W\d_]\S*")  # of a piece between spaces, what follows its first letter
UNSPACED = re.compile(  # Thai, Lao, Burmese, Khmer, kana, Han
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


def clean(text):
    """The text in Unicode's composed form, without control characters, every run of white space one space."""
    return " ".join(unicodedata.normalize("NFC", UNWANTED.sub("", text)).split())


def detokenize(text):
    """Undo WikiText's tokenisation: `role @-@ playing`, `1 @,@ 000`, and the spaces around punctuation."""
    text = re.sub(r" @(\S)@ ", r"\1", " ".join(text.split()))
    text = re.sub(r" ?n 't\b| n't\b", "n't", text)
    text = re.sub(r" ('(?:s|re|ve|ll|d|m)\b)", r"\1", text)
    text = re.sub(r"(\d) ([:–]) (?=\d)", r"\1\2", text)
    text = re.sub(r'" ([^"]*?) ?"', r'"\1"', text)
    text = re.sub(r"(?<!s) ' ([^']*?) '(?= |$)", r" '\1'", text)
    text = re.sub(r"s ' ", "s' ", text)
    text = re.sub(r"([(\[{$£€]) ", r"\1", text)
    return re.sub(r" ([,.;:!?%)\]}])", r"\1", text)


def split_sentences(text):
    """Cut cleaned text into a list of sentences.

    The rules are English ones (abbreviations, initials), those for the full stops of other scripts hold as well.
    """
    sentences, rest = [], ""
    # in pieces, because sentencex takes a time that grows with the square of the length where not all is ASCII
    for start in range(0, len(text), LONGEST_PIECE):
        *complete, rest = segment("en", rest + text[start : start + LONGEST_PIECE])
        sentences += complete
        if len(rest) > LONGEST_PIECE:  # no end in sight
            sentences.append(rest)
            rest = ""
    stripped = (sentence.strip() for sentence in [*sentences, rest])
    return [sentence for sentence in stripped if sentence]


def count_words(sentence):
    """The number of words: pieces between spaces that hold a letter.

    Where a script sets no spaces (Chinese, Japanese, Thai ...), each character counts as one, as in BERT's tokenizer.
    """
    return max(len(WORD.findall(sentence)), len(UNSPACED.findall(sentence)))
