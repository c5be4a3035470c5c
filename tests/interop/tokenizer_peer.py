#!/usr/bin/env python3
"""Compares `muster data tokenize` with the libraries whose files it reads, and times both.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install numpy tokenizers tiktoken
    /tmp/venv/bin/python tests/interop/tokenizer_peer.py --bin build/bin --strings 100000 --text FILE...

For every form of tokenizer in tests/parallel/tokenizers it trains a tokenizer on the text, encodes random strings as
JSON lines and the whole text as one document, and compares all ids. The data sets are read as Megatron-LM reads
them. One run is killed with SIGKILL again and again and must give the same bytes. With --time it prints MB/s of
Muster, of tokenizers in batches and of tiktoken in batches, on one core and on all, medians of three runs.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import numpy
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "parallel", "tokenizers"))
import make_fixtures  # noqa: E402

DTYPES = {1: numpy.uint8, 2: numpy.int8, 3: numpy.int16, 4: numpy.int32, 5: numpy.int64, 8: numpy.uint16}


def read_dataset(prefix):
    """The documents of PREFIX, through the index as Megatron-LM's IndexedDataset goes through it."""
    with open(prefix + ".idx", "rb") as file:
        assert file.read(9) == b"MMIDIDX\x00\x00"
        assert int.from_bytes(file.read(8), "little") == 1
        dtype = DTYPES[file.read(1)[0]]
        sequences = int.from_bytes(file.read(8), "little")
        bounds = int.from_bytes(file.read(8), "little")
        offset = file.tell()
    index = numpy.memmap(prefix + ".idx", mode="r")
    lengths = numpy.frombuffer(index, dtype=numpy.int32, count=sequences, offset=offset)
    pointers = numpy.frombuffer(index, dtype=numpy.int64, count=sequences, offset=offset + lengths.nbytes)
    documents = numpy.frombuffer(index, dtype=numpy.int64, count=bounds,
                                 offset=offset + lengths.nbytes + pointers.nbytes)
    tokens = numpy.memmap(prefix + ".bin", mode="r")
    for first, last in zip(documents[:-1], documents[1:]):
        parts = [numpy.frombuffer(tokens, dtype=dtype, count=lengths[i], offset=pointers[i]) for i in range(first, last)]
        yield numpy.concatenate(parts).tolist()


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
    """Ends the program at the first document whose ids differ."""
    for number, (want, have) in enumerate(zip(expected, found)):
        if want == have:
            continue
        at = next((i for i, (a, b) in enumerate(zip(want, have)) if a != b), min(len(want), len(have)))
        sys.exit(f"{name}, document {number}: ids differ from {at} on: expected {want[at:at + 8]}, "
                 f"found {have[at:at + 8]}: {show(number)}")
    if len(expected) != len(found):
        sys.exit(f"{name}: expected {len(expected)} documents, found {len(found)}")


def forms(text, vocabulary):
    """(name, tokenizer) of every form, those of byte-level BPE trained on `text`."""
    lines = text.splitlines(keepends=True)
    for name, small in make_fixtures.all_tokenizers():
        if name in ("llama2", "added"):
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


def median_speed(size, work):
    times = []
    for _ in range(3):
        start = time.monotonic()
        work()
        times.append(time.monotonic() - start)
    return size / 1e6 / statistics.median(times)


def show_times(arguments, path, tokenizer, source, folder):
    """The text in documents of some 4 kB, which suits the batches of the libraries."""
    with open(source, encoding="utf-8") as file:
        text = file.read()
    size = len(text.encode())
    documents, start = [], 0
    while start < len(text):
        end = text.find("\n", start + 4096)
        end = len(text) if end < 0 else end + 1
        documents.append(text[start:end])
        start = end
    ranks = {bytes(make_fixtures.BYTE_OF[c] for c in token): rank
             for token, rank in tokenizer.get_vocab(with_added_tokens=False).items()}
    encoding = tiktoken.Encoding("peer", pat_str=arguments.pattern, mergeable_ranks=ranks, special_tokens={})
    for threads in (1, os.cpu_count()):
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        muster = median_speed(size, lambda: muster_tokenize(arguments, path, source, os.path.join(folder, "timed"),
                                                            "--threads", str(threads)))
        command = [sys.executable, "-c", "import sys,time\nfrom tokenizers import Tokenizer\n"
                   "t=Tokenizer.from_file(sys.argv[1]); d=open(sys.argv[2]).read().split('\\0')\n"
                   "s=time.monotonic(); t.encode_batch_fast(d); print(time.monotonic()-s)"]
        batch = os.path.join(folder, "documents")
        with open(batch, "w", encoding="utf-8") as file:
            file.write("\0".join(documents))
        seconds = [float(subprocess.check_output(command + [path, batch])) for _ in range(3)]
        theirs = size / 1e6 / statistics.median(seconds)
        ticks = median_speed(size, lambda: encoding.encode_ordinary_batch(documents, num_threads=threads))
        print(f"{threads} threads: muster {muster:.1f} MB/s (from disk to disk), tokenizers {theirs:.1f}, tiktoken "
              f"{ticks:.1f}; {muster / max(theirs, ticks):.1f}x the faster one")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/bin")
    parser.add_argument("--strings", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", nargs="+", required=True, help="files, read as UTF-8 with replacement")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--forms", nargs="+", help="of these tokenizers only, as gpt2 and llama3; default all")
    parser.add_argument("--time", action="store_true")
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
        for name, tokenizer in forms(text[:30_000_000], arguments.vocabulary):
            if arguments.forms and name not in arguments.forms:
                continue
            path = os.path.join(folder, name + ".json")
            tokenizer.save(path)
            muster_tokenize(arguments, path, strings, output, "--field", "text")
            expected = [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
            compare(name, [ids for ids, each in zip(expected, texts) if each], list(read_dataset(output)),
                    lambda number: repr([each for each in texts if each][number]))
            muster_tokenize(arguments, path, raw, output)
            whole = tokenizer.encode(text, add_special_tokens=False).ids
            compare(name, [whole], list(read_dataset(output)), lambda number: "the text")
            print(f"{name}: {len(texts)} strings and {len(text.encode()) / 1e6:.1f} MB have the same ids", flush=True)
            if name == "gpt2":
                check_kills(arguments, path, raw, folder)
            if arguments.time and name in ("gpt2", "llama3"):
                arguments.pattern = make_fixtures.CL100K if name == "llama3" else (
                    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
                valid = os.path.join(folder, "valid")
                with open(valid, "w", encoding="utf-8", newline="") as file:
                    file.write(text)
                show_times(arguments, path, tokenizer, valid, folder)


if __name__ == "__main__":
    main()
