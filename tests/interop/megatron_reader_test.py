"""Data sets that `muster data tokenize` writes, read as Megatron-LM reads them (indexed_dataset.py)."""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import unittest

from indexed_dataset import IndexedDataset, documents_of

TOKENIZERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "parallel", "tokenizers")


class MegatronReaderTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def tokenize(self, *arguments, text=None):
        """Tokenizes to "set", with `text` on standard input."""
        subprocess.run([os.path.join(BIN, "muster"), "data", "tokenize", "--output", self.path("set"), *arguments], check=True,
                       stdout=subprocess.DEVNULL, input=text)
        return self.path("set")

    def cases(self, tokenizer):
        """Texts and ids of the reference library, of the fixtures."""
        with open(os.path.join(TOKENIZERS, "cases.json"), encoding="ascii") as file:
            return [(case["text"], case["ids"]) for case in json.load(file) if case["tokenizer"] == tokenizer and case["ids"]]

    def test_ids_of_two_bytes_and_documents(self):
        cases = self.cases("gpt2.json")
        with open(self.path("text.jsonl"), "w", encoding="ascii") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text, _ in cases)
        prefix = self.tokenize("--input", self.path("text.jsonl"), "--tokenizer", os.path.join(TOKENIZERS, "gpt2.json"), "--eos", "none")
        dataset = IndexedDataset(prefix)
        self.assertEqual(dataset.letter, "H")  # the type that Megatron-LM takes below 65,500 tokens
        self.assertEqual(len(dataset.bounds), len(cases) + 1)
        self.assertEqual(list(dataset.documents()), [ids for _, ids in cases])
        text, ids = cases[0]
        self.assertEqual(dataset.get(0, offset=2, length=3), ids[2:5])
        # What follows a document is the next one, without a gap: a sample may be read over its end.
        self.assertEqual(dataset.pointers[1], 2 * dataset.lengths[0])
        self.assertEqual(os.path.getsize(prefix + ".bin"), 2 * sum(dataset.lengths))

    def test_bytes_from_standard_input_and_gzip(self):
        text = "one line\nanother line\n".encode() * 3
        prefix = self.tokenize("--input", "-", "--documents", "line", text=text)
        self.assertEqual([bytes(each) for each in documents_of(prefix)], text.splitlines(keepends=True))
        with gzip.open(self.path("text.gz"), "wb") as file:
            file.write(text)
        prefix = self.tokenize("--input", self.path("text.gz"))
        self.assertEqual([bytes(each) for each in documents_of(prefix)], [text])

    def test_several_sequences_of_ids_of_four_bytes(self):
        # A vocabulary of more than 65,500 tokens.
        with open(os.path.join(TOKENIZERS, "gpt2.json"), encoding="utf-8") as file:
            tokenizer = json.load(file)
        tokenizer["added_tokens"] += [{"id": 1000 + i, "content": f"<|{i}|>"} for i in range(66000)]
        with open(self.path("large.json"), "w", encoding="utf-8") as file:
            json.dump(tokenizer, file)
        prefix = self.tokenize("--input", "-", "--tokenizer", self.path("large.json"), "--eos", "none", text=b"<|65999|><|0|>")
        dataset = IndexedDataset(prefix)
        self.assertEqual(dataset.letter, "i")
        (document,) = dataset.documents()
        self.assertEqual(document[0] - document[1], 65999)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    options, rest = parser.parse_known_args()
    BIN = options.bin
    unittest.main(argv=[sys.argv[0], *rest])
