"""From paragraphs to training sentences: split, clean, filter, drop duplicates, draw. No files, no network."""

import hashlib
import random
import re
import unicodedata

OPENERS, CLOSERS = "\"'“‘«([{¿¡„", "\"'”’»)]}"
ENDS = tuple(".!?…؟۔।")
# A space behind closing punctuation may end a sentence; the full stops of Chinese and Japanese need no space.
BOUNDARY = re.compile(r"(?<=[.!?…؟۔।\"'”’»)\]}]) |[。！？](?![。！？])[」』”’）]* ?")
TITLES = set(
    "mr mrs ms dr prof st mt gen col lt sgt capt adm maj rev hon sen rep gov pres messrs vs cf e.g i.e".split()
)
NUMBERED = set(
    "no nos fig figs p pp vol vols ch sec op eq c ca jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
ABBREVIATIONS = set("inc ltd co corp bros jr sr dept univ al est lit esp ed eds approx".split())
STARTERS = set(
    """the a an in on at as by for from with to of it its he his she her they their we our you i this that these
    those there here when while where after before during although though however but and or if since because until both
    each all many most some several one two three no not other another such according among despite under over between
    what who why how today later then thus""".split()
)
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


def full_stop_ends(word, following):
    """Whether the full stop behind `word` ends a sentence, given the word that follows it."""
    word = word.lower()
    if word in TITLES:
        return False
    if word in NUMBERED:
        return not following[:1].isdigit()
    if word in ABBREVIATIONS or re.search(r"[a-z]\.[a-z]", word) or (len(word) == 1 and word.isalpha()):
        return following.lower().rstrip(",") in STARTERS  # behind Inc., U.S. or an initial it may be either
    return True


def split_sentences(text):
    """Split cleaned text into a list of sentences.

    A full stop is no end behind a title or an abbreviation, nor in front of a lower-case word.
    """
    sentences, start = [], 0
    for match in BOUNDARY.finditer(text):
        if match[0] == " ":
            word = text[max(start, text.rfind(" ", start, match.start()) + 1) : match.start()].strip(CLOSERS)
            following = text[match.end() : match.end() + 30].lstrip(OPENERS).split(" ")[0]
            if not word.endswith(ENDS) or following[:1].islower():
                continue
            if word.endswith(".") and not full_stop_ends(word.rstrip(".").lstrip(OPENERS), following):
                continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    return sentences + [text[start:]] * (start < len(text))


def problem(sentence):
    """Why a sentence is of no use for training; "" where it is.

    A word is a piece between spaces that holds a letter. Where a script sets no spaces (Chinese, Japanese, Thai ...), each
    character counts as one, as it does in BERT's tokenizer.
    """
    if len(sentence) < 20:
        return "shorter than 20 characters"
    if len(sentence) > 200:
        return "longer than 200 characters"
    if "<unk>" in sentence:
        return "with <unk>"
    if "\ufffd" in sentence:
        return "with an unreadable character"
    if len(WORD.findall(sentence)) < 3 and len(UNSPACED.findall(sentence)) < 3:
        return "fewer than 3 words"
    return ""


def extract(paragraphs, seed, limit, counts):
    """Up to `limit` unique, usable sentences of an iterable of texts: a fair draw from all of it, in a shuffled order.

    Adds to the Counter `counts` what was read, and why something was left out. In memory are the sentences kept so far, and
    some 80 bytes for each different one seen.
    """
    draw, seen, kept = random.Random(seed), set(), []
    for paragraph in paragraphs:
        counts["paragraphs read"] += 1
        for line in paragraph.splitlines():
            for sentence in split_sentences(clean(line)):
                counts["sentences found"] += 1
                key = hashlib.blake2b("".join(sentence.casefold().split()).encode(), digest_size=8).digest()
                reason = problem(sentence) or ("seen before (case and spacing aside)" if key in seen else "")
                if reason:
                    counts[reason] += 1
                    continue
                seen.add(key)
                if len(kept) < limit:
                    kept.append(sentence)
                elif (
                    place := draw.randrange(len(seen))
                ) < limit:  # reservoir sampling: each is equally likely to stay
                    kept[place] = sentence
    if len(seen) > limit:
        counts[f"not drawn (MAX_SENTENCES={limit:,})"] = len(seen) - limit
    draw.shuffle(kept)
    return kept
