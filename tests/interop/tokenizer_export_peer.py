#!/usr/bin/env python3
"""Whether an exported model folder loads in transformers with AutoTokenizer, with the ids of `muster data tokenize`.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install transformers tokenizers tiktoken sentencepiece protobuf
    /tmp/venv/bin/python tests/interop/tokenizer_export_peer.py --bin build/bin

Takes the model of tests/interop/data/gpt2 with each tokenizer of tests/parallel/tokenizers from Hugging Face's form to a checkpoint and
back. The file must be unchanged, and AutoTokenizer must give the ids of the data set for texts of many kinds.
"""

import argparse
import glob
import json
import os
import shutil
import subprocess
import tempfile

from transformers import AutoTokenizer

from indexed_dataset import documents_of

HERE = os.path.dirname(os.path.abspath(__file__))
TOKENIZERS = os.path.join(HERE, "..", "parallel", "tokenizers")
# The first of each pair is the fixture, the second its name in a model folder.
FORMS = [(name + ".json", "tokenizer.json") for name in ("gpt2", "llama3", "qwen2", "o200k", "llama2", "metaspace", "unigram", "added")]
FORMS += [("llama2.model", "tokenizer.model")]
TEXTS = ["The quick brown fox doesn't jump over 12345 lazy dogs.", "for (int i = 0; i < n; ++i) {\n    x += y[i];\n}\n",
         "Der Käfer läuft  über die Straße.", "今天天气很好，我们去公园散步。", "Привет, мир!", "नमस्ते दुनिया", "\U0001f600 ☃ e\u0301",
         "tabs\tand   spaces  "]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/bin")
    arguments = parser.parse_args()
    muster = os.path.join(arguments.bin, "muster")
    with tempfile.TemporaryDirectory() as folder:
        lines = os.path.join(folder, "texts.jsonl")
        with open(lines, "w", encoding="ascii") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)
        for fixture, name in FORMS:
            source, exported, saved = (os.path.join(folder, fixture + each) for each in (".in", ".out", ".saved"))
            shutil.copytree(os.path.join(HERE, "data", "gpt2"), source)
            shutil.copy(os.path.join(TOKENIZERS, fixture), os.path.join(source, name))
            subprocess.run([muster, "convert", source, saved], check=True, stdout=subprocess.DEVNULL)
            (checkpoint,) = [os.path.dirname(path) for path in glob.glob(saved + "/**/manifest.json", recursive=True)]
            subprocess.run([muster, "convert", checkpoint, exported], check=True, stdout=subprocess.DEVNULL)
            with open(os.path.join(source, name), "rb") as a, open(os.path.join(exported, name), "rb") as b:
                assert a.read() == b.read(), f"{fixture} was changed"
            output = os.path.join(folder, "set")
            subprocess.run([muster, "data", "tokenize", "--input", lines, "--output", output, "--tokenizer",
                            os.path.join(source, name), "--bos", "none", "--eos", "none"], check=True, stdout=subprocess.DEVNULL)
            tokenizer = AutoTokenizer.from_pretrained(exported)
            for text, ours in zip(TEXTS, documents_of(output), strict=True):
                theirs = tokenizer.encode(text, add_special_tokens=False)
                assert theirs == ours, f"{fixture}: {text!r} has {theirs} in transformers, {ours} here"
            print(f"{fixture}: loads as {type(tokenizer).__name__}, its ids are the same", flush=True)


if __name__ == "__main__":
    main()
