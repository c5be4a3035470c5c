#!/usr/bin/env python3
"""Compares the ids of `muster data tokenize` with those of the libraries whose files it reads.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install tokenizers tiktoken sentencepiece protobuf
    /tmp/venv/bin/python tests/interop/tokenizer_peer.py --bin build/bin --strings 100000 --text FILE...

For every form of tokenizer in tests/parallel/tokenizers it trains a tokenizer on the text, encodes random strings as
JSON lines and the whole text as one document, and compares all ids. The data sets are read as Megatron-LM reads
them. One run is killed with SIGKILL again and again and must give the same bytes. Models of SentencePiece are compared
on the strings and on all lines of the text, with the library of PyPI, and where `spm_encode` of Debian is installed
with that on the whole text.
"""

import argparse
import json
import os
import random
import signal
import shutil
import subprocess
import sys
import tempfile

import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "parallel", "tokenizers"))
import make_fixtures  # noqa: E402
from indexed_dataset import documents_of  # noqa: E402

# Forms that see the whole document as one word, or almost, so that Muster refuses one of more than 64 MiB.
BY_LINES = ("llama2", "metaspace", "unigram", "added")


def random_strings(seed, count):
    """Code points of all planes, white space, parts of words, and the texts of the fixtures."""
    draw = random.Random(seed)
    alphabets = ["etaoin shrdlu", "ETAOIN'SHRDLU's't're ", "0123456789.,", " \t\n\r\u00a0\u3000\u2028\x85", "\u0301\u0327\u093e\u200d",
                 "今天天气很好我们去公园", "يقرأ الطالب", "Приветмир", "<|endoftext|>", "▁ <>/s", "\U0001f600\U0001f469\u200d\U0001f1e9",
                 "½²Ⅷ٣", "{}[]();=+-*/\\\"'\n    "]
    for number in range(count):
        text = ""
        for _ in range(draw.randrange(1, 12)):
            kind = draw.randrange(10)
            if kind == 0:
                code = draw.randrange(0x110000)
                text += chr(code) if not 0xd800 <= code < 0xe000 else "\ufffd"
            elif kind == 1:
                text += chr(draw.randrange(0x3000))
            elif kind == 2 and number % 5 == 0:
                text += draw.choice(make_fixtures.TEXTS)
            else:
                letters = draw.choice(alphabets)
                text += "".join(draw.choice(letters) for _ in range(draw.randrange(1, 12)))
        yield text


def muster_tokenize(arguments, tokenizer, source, output, *more):
    command = [os.path.join(arguments.bin, "muster"), "data", "tokenize", "--input", source, "--output", output,
               "--tokenizer", tokenizer, "--bos", "none", "--eos", "none", *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def compare(name, expected, found, show):
    """Ends the program at the first document whose ids differ. Documents without ids are in no data set."""
    kept = [number for number, ids in enumerate(expected) if ids]
    expected = [ids for ids in expected if ids]
    for number, (want, have) in enumerate(zip(expected, found)):
        if want == have:
            continue
        at = next((i for i, (a, b) in enumerate(zip(want, have)) if a != b), min(len(want), len(have)))
        sys.exit(f"{name}, document {number}: ids differ from {at} on: expected {want[at:at + 8]}, "
                 f"found {have[at:at + 8]}: {show(kept[number])}")
    if len(expected) != len(found):
        sys.exit(f"{name}: expected {len(expected)} documents, found {len(found)}")


def forms(text, vocabulary):
    """(name, tokenizer) of every form, those of byte-level BPE trained on `text`."""
    lines = text.splitlines(keepends=True)
    for name, small in make_fixtures.all_tokenizers():
        if name in ("llama2", "metaspace", "unigram", "added"):
            yield name, small
            continue
        large = Tokenizer(models.BPE())
        large.pre_tokenizer = small.pre_tokenizer
        large.normalizer = small.normalizer
        large.train_from_iterator(lines, trainers.BpeTrainer(
            vocab_size=vocabulary, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
        large = make_fixtures.changed(large, ignore_merges=name == "llama3")
        large.decoder = small.decoder
        large.add_special_tokens([token.content for token in small.get_added_tokens_decoder().values()])
        yield name, large


def check_kills(arguments, tokenizer, source, folder):
    """Kills runs at random moments until one ends by itself."""
    whole, output = os.path.join(folder, "whole"), os.path.join(folder, "killed")
    muster_tokenize(arguments, tokenizer, source, whole, "--threads", "1")
    command = [os.path.join(arguments.bin, "muster"), "data", "tokenize", "--input", source, "--output", output,
               "--tokenizer", tokenizer, "--bos", "none", "--eos", "none"]
    draw, kills = random.Random(3), 0
    while True:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=draw.uniform(0.05, 0.5) * (1 + kills))
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    for suffix in (".bin", ".idx"):
        with open(whole + suffix, "rb") as a, open(output + suffix, "rb") as b:
            assert a.read() == b.read(), suffix
    print(f"killed {kills} times: the same bytes")


def compare_sentence_piece(arguments, name, model, texts, text, folder):
    """Strings, and the text by lines: a line is what the library is made for. `spm_encode` of Debian is the library that
    Muster's sums of scores follow; that of PyPI breaks ties of unigram models in another way."""
    path, source, output = (os.path.join(folder, each) for each in (name + ".model", "lines", "out"))
    with open(path, "wb") as file:
        file.write(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    debian = shutil.which("spm_encode")

    def check(documents, what):
        with open(source, "w", encoding="ascii") as file:
            file.writelines(json.dumps({"text": each}) + "\n" for each in documents)
        muster_tokenize(arguments, path, source, output, "--field", "text")
        found = list(documents_of(output))
        if debian:
            encoded = subprocess.run([debian, "--model=" + path, "--output_format=id"], check=True, capture_output=True,
                                     input="".join(each + "\n" for each in documents).encode()).stdout
            expected = [list(map(int, line.split())) for line in encoded.split(b"\n")[:-1]]
        else:
            expected = processor.encode(documents)
        compare(f"{name}.model, {what}", expected, found, lambda number: repr(documents[number][:200]))
        kept = [ids for ids in processor.encode(documents) if ids]
        return sum(a != b for a, b in zip(kept, found))

    strings = [each.replace("\n", " ") for each in texts]
    lines = [line for line in text.split("\n") if line]
    others = [check([each for each in strings if each], "strings"), check(lines, "lines"),
              check([" ".join(lines).replace("\0", "")[:20_000_000]], "text")]
    print(f"{name}.model: {len(strings)} strings, {len(lines)} lines and the text as one document have the ids of "
          f"{'Debian' if debian else 'PyPI'}; {others} of them other ids in PyPI's version", flush=True)


def compare_lines(arguments, name, tokenizer, path, text, folder):
    """The text with each line a document, newline included, a million at a time: `tokenizers` keeps 150 bytes per byte."""
    source, output = os.path.join(folder, "lines"), os.path.join(folder, "out")
    lines = text.splitlines(keepends=True)
    for first in range(0, len(lines), 1_000_000):
        part = lines[first:first + 1_000_000]
        with open(source, "w", encoding="ascii") as file:
            file.writelines(json.dumps({"text": each}) + "\n" for each in part)
        muster_tokenize(arguments, path, source, output, "--field", "text")
        found, at = documents_of(output), first
        expected = []
        for start in range(0, len(part), 20_000):
            expected += [each.ids for each in tokenizer.encode_batch(part[start:start + 20_000], add_special_tokens=False)]
        compare(name, expected, list(found), lambda number: f"line {at + number + 1}: {part[number][:200]!r}")
    return len(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/bin")
    parser.add_argument("--strings", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", nargs="+", required=True, help="files, read as UTF-8 with replacement")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--forms", nargs="+", help="of these tokenizers only, as gpt2 and t5.model; default all")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        raw, strings = os.path.join(folder, "raw"), os.path.join(folder, "strings")
        with open(raw, "wb") as file:
            for path in arguments.text:
                with open(path, "rb") as part:
                    file.write(part.read())
        with open(raw, encoding="utf-8", errors="replace", newline="") as file:
            text = file.read()
        texts = list(random_strings(arguments.seed, arguments.strings))
        with open(strings, "w", encoding="ascii") as file:
            file.writelines(json.dumps({"text": each}) + "\n" for each in texts)
        output = os.path.join(folder, "out")
        for name, model in make_fixtures.sentence_pieces():
            if not arguments.forms or name + ".model" in arguments.forms:
                compare_sentence_piece(arguments, name, model, texts, text, folder)
        for name, tokenizer in forms(text[:30_000_000], arguments.vocabulary):
            if arguments.forms and name not in arguments.forms:
                continue
            path = os.path.join(folder, name + ".json")
            tokenizer.save(path)
            muster_tokenize(arguments, path, strings, output, "--field", "text")
            expected = [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
            compare(name, [ids for ids, each in zip(expected, texts) if each], list(documents_of(output)),
                    lambda number: repr([each for each in texts if each][number]))
            if name in BY_LINES:
                count = compare_lines(arguments, name, tokenizer, path, text, folder)
            else:
                muster_tokenize(arguments, path, raw, output)
                whole = tokenizer.encode(text, add_special_tokens=False).ids
                compare(name, [whole], list(documents_of(output)), lambda number: "the text")
                count = 1
            print(f"{name}: {len(texts)} strings and {len(text.encode()) / 1e6:.1f} MB in {count} documents have the same ids",
                  flush=True)
            if name == "gpt2":
                check_kills(arguments, path, raw, folder)


if __name__ == "__main__":
    main()
