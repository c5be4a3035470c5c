#!/usr/bin/env python3
"""How fast data sets and tokenizers are made, beside the libraries whose files Muster reads.

    ./dev bench data [--only PART...] [--runs N] [--tree DIRECTORY...] [--work FOLDER]

Parts, all in one run on this machine:
  encode         `muster data tokenize` from disk to disk, program start included, on the King James Bible eight times, beside
                 `tokenizers` (encode_batch_fast) and `tiktoken` (encode_ordinary_batch) from memory to memory, with tokenizers of
                 32,000 tokens in the forms of GPT-2 and Llama 3, on one thread and on all
  sentencepiece  the same beside `sentencepiece` (encode of all lines), BPE and unigram models, documents of a line
  train          `muster data train-tokenizer` of 32,768 tokens on --train-bytes of text beside `tokenizers`, with the largest memory
  memory         the largest memory of `muster data tokenize` on --memory-bytes of text

Text for the last two is what is UTF-8 below --tree. Ids of all documents are compared with the libraries' first. Prints a table of
medians with the smallest and largest run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "interop"))
from indexed_dataset import documents_of  # noqa: E402

PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"}

# Each peer is a process of its own, which prints the seconds of each run and, of the first, the ids.
PEERS = {
    "tokenizers": """
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(model)
encode = lambda: [each.ids for each in tokenizer.encode_batch_fast(documents, add_special_tokens=False)]
timed = lambda: tokenizer.encode_batch_fast(documents, add_special_tokens=False)
""",
    "tiktoken": """
import json, tiktoken
printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
others = [byte for byte in range(256) if byte not in printable]
byte_of = {**{chr(b): b for b in printable}, **{chr(0x100 + i): b for i, b in enumerate(others)}}
vocab = json.load(open(model))["model"]["vocab"]
ranks = {bytes(byte_of[c] for c in token): id for token, id in vocab.items() if all(c in byte_of for c in token)}
encoding = tiktoken.Encoding("peer", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
encode = timed = lambda: encoding.encode_ordinary_batch(documents, num_threads=threads)
""",
    "sentencepiece": """
import sentencepiece
processor = sentencepiece.SentencePieceProcessor(model_file=model)
encode = timed = lambda: processor.encode(documents, num_threads=threads)
""",
}
PEER_MAIN = """
import json, sys, time
model, source, pattern, threads, runs = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
documents = open(source, encoding="utf-8", newline="").read().split("\\0")
%s
ids, seconds = (encode() if threads == 1 else None), []
for _ in range(runs):
    start = time.monotonic()
    timed()
    seconds.append(time.monotonic() - start)
json.dump({"ids": ids, "seconds": seconds}, sys.stdout)
"""


def peer(name, model, source, pattern, threads, runs):
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    output = subprocess.check_output([sys.executable, "-c", PEER_MAIN % PEERS[name], model, source, pattern, str(threads), str(runs)],
                                     env=environment)
    return json.loads(output)


# Starts a program from a small process, since the largest memory that Linux accounts to a program includes that of the process
# that started it.
STARTER = """
import os, sys, time
start = time.monotonic()
process = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                                                                              (os.POSIX_SPAWN_DUP2, 1, 2)])
_, status, usage = os.wait4(process, 0)
print(os.waitstatus_to_exitcode(status), time.monotonic() - start, usage.ru_maxrss / 1024)
"""


def measured(command, feed=None):
    """Seconds, and the largest memory in MB, of a program; `feed` writes to its standard input."""
    starter = subprocess.Popen([sys.executable, "-S", "-c", STARTER, *command], stdin=subprocess.PIPE if feed else subprocess.DEVNULL,
                               stdout=subprocess.PIPE, text=True)
    if feed:
        feed(starter.stdin.buffer)
        starter.stdin.close()
    code, seconds, memory = starter.stdout.read().split()
    starter.wait()
    if code != "0":
        sys.exit(f"{' '.join(command)} ended with {code}")
    return float(seconds), float(memory)


class Bench:
    def __init__(self, arguments):
        self.arguments = arguments
        self.folder = arguments.work
        os.makedirs(self.folder, exist_ok=True)
        self.muster = os.path.join(arguments.bin, "muster")
        self.threads = sorted({1, os.cpu_count()})

    def path(self, name):
        return os.path.join(self.folder, name)

    def tokenize(self, tokenizer, source, threads, *more):
        return measured([self.muster, "data", "tokenize", "--input", source, "--output", self.path("out"), "--tokenizer", tokenizer,
                         "--bos", "none", "--eos", "none", "--threads", str(threads), *more])

    def row(self, name, size, seconds):
        speeds = sorted(size / 1e6 / each for each in seconds)
        median = statistics.median(speeds)
        print(f"  {name:14} {median:8.1f} MB/s  ({speeds[0]:.1f} to {speeds[-1]:.1f})", flush=True)
        return median

    def bible(self):
        path = self.path("bible")
        text = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True, text=True).stdout
        with open(path, "w", encoding="utf-8") as file:
            file.write(text * 8)
        return path, text * 8

    def compare(self, title, tokenizer, source, documents, peers, pattern, *more):
        """Muster beside the peers on the same documents, which lie one behind the other in `source`."""
        size = os.path.getsize(source)
        joined = self.path("documents")
        with open(joined, "w", encoding="utf-8", newline="") as file:
            file.write("\0".join(documents))
        for threads in self.threads:
            print(f"{title}, {threads} thread{'s' if threads > 1 else ''}, {size / 1e6:.0f} MB")
            found = {name: peer(name, tokenizer, joined, pattern, threads, self.arguments.runs) for name in peers}
            ours = [self.tokenize(tokenizer, source, threads, *more)[0] for _ in range(self.arguments.runs)]
            if threads == 1:
                lines = list(documents_of(self.path("out")))
                for name in peers:
                    # Documents that Muster was not told of lie in one.
                    whole = [sum(lines, [])] if len(lines) != len(documents) else lines
                    theirs = found[name]["ids"]
                    theirs = [sum(theirs, [])] if len(whole) == 1 else theirs
                    different = sum(a != b for a, b in zip(whole, theirs))
                    print(f"  ids of {len(theirs)} documents beside {name}: {different} differ")
            fastest = max(self.row(name, size, found[name]["seconds"]) for name in peers)
            print(f"  {'':14} {self.row('muster', size, ours) / fastest:8.2f} times the fastest of them")

    def encode(self):
        source, text = self.bible()
        # Some 4 kB each, which suits the batches of the libraries; Muster takes JSON lines of the same.
        documents, start = [], 0
        while start < len(text):
            end = text.find("\n", start + 4096) + 1 or len(text)
            documents.append(text[start:end])
            start = end
        lines = self.path("documents.jsonl")
        with open(lines, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in documents)
        for form in PATTERNS:
            tokenizer = self.path(f"{form}.json")
            measured([self.muster, "data", "train-tokenizer", "--input", source, "--output", tokenizer, "--vocabulary", "32000",
                      "--pattern", form, "--min-frequency", "1"])
            self.compare(f"{form} form", tokenizer, lines, documents, ["tokenizers", "tiktoken"], PATTERNS[form])

    def sentencepiece(self):
        import sentencepiece
        source, text = self.bible()
        lines = text.splitlines(keepends=True)
        for kind in ("bpe", "unigram"):
            model = self.path(f"{kind}.model")
            if not os.path.exists(model):
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=iter(text[:len(text) // 8].splitlines()), model_prefix=self.path(kind), vocab_size=8000,
                    model_type=kind, byte_fallback=True, minloglevel=2)
            self.compare(f"SentencePiece {kind}", model, source, lines, ["sentencepiece"], "", "--documents", "line")

    def files(self):
        for top in self.arguments.tree:
            for folder, folders, names in os.walk(top):
                folders.sort()
                yield from (os.path.join(folder, name) for name in sorted(names))

    def tree(self, size):
        """A file of text that differs, as long as there is some below the directories."""
        path = self.path(f"text-{size}")
        if os.path.exists(path):
            return path
        written = 0
        with open(path + ".tmp", "w", encoding="utf-8", newline="") as out:
            for file in self.files():
                try:
                    with open(file, encoding="utf-8", newline="") as source:
                        text = source.read()
                except (OSError, UnicodeDecodeError):
                    continue
                if "\0" not in text:
                    out.write(text)
                    written += len(text.encode())
                if written >= size:
                    break
        if written < size:
            sys.exit(f"there are {written} bytes of text below {' '.join(self.arguments.tree)}, not {size}: see --tree")
        os.rename(path + ".tmp", path)
        return path

    def train(self):
        source = self.tree(self.arguments.train_bytes)
        size = os.path.getsize(source)
        theirs = ("import sys\nfrom tokenizers import Tokenizer, models, pre_tokenizers, trainers\n"
                  "t = Tokenizer(models.BPE()); t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)\n"
                  "t.train([sys.argv[1]], trainers.BpeTrainer(vocab_size=32768, min_frequency=2, show_progress=False,\n"
                  "  special_tokens=['<|endoftext|>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))\n"
                  "t.save(sys.argv[2])")
        print(f"train-tokenizer, 32768 tokens, {size / 1e6:.0f} MB, {os.cpu_count()} threads")
        ours = measured([self.muster, "data", "train-tokenizer", "--input", source, "--output", self.path("ours.json"), "--vocabulary",
                         "32768"])
        peers = measured([sys.executable, "-c", theirs, source, self.path("theirs.json")])
        for name, (seconds, memory) in (("muster", ours), ("tokenizers", peers)):
            print(f"  {name:14} {seconds:8.1f} s, {memory:8.0f} MB")
        print(f"  {'':14} {peers[0] / ours[0]:8.2f} times as fast, {ours[1] / peers[1]:.2f} of the memory", flush=True)

    def memory(self):
        """The text again and again through a pipe: where it comes from makes no difference to what is held."""
        source = self.tree(self.arguments.train_bytes)
        tokenizer = self.path("ours.json")
        if not os.path.exists(tokenizer):
            measured([self.muster, "data", "train-tokenizer", "--input", source, "--output", tokenizer])
        sent = 0

        def feed(pipe):
            nonlocal sent
            while sent < self.arguments.memory_bytes:
                with open(source, "rb") as file:
                    while piece := file.read(1 << 20):
                        sent += pipe.write(piece)

        seconds, memory = measured([self.muster, "data", "tokenize", "--input", "-", "--output", self.path("large"), "--tokenizer",
                                    tokenizer, "--documents", "line"], feed)
        print(f"data tokenize, {sent / 1e9:.1f} GB, documents of a line: largest memory {memory:.0f} MB, "
              f"{sent / 1e6 / seconds:.0f} MB/s", flush=True)
        for suffix in (".bin", ".idx"):
            os.remove(self.path("large") + suffix)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/bin")
    parser.add_argument("--only", nargs="+", choices=["encode", "sentencepiece", "train", "memory"],
                        default=["encode", "sentencepiece", "train", "memory"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--work", default=".cache/bench-data/work", help="where texts and data sets are written")
    parser.add_argument("--tree", nargs="+", default=["/usr/include", "/usr/share", "/usr/lib"])
    parser.add_argument("--train-bytes", type=int, default=1_000_000_000)
    parser.add_argument("--memory-bytes", type=int, default=20_000_000_000)
    arguments = parser.parse_args()
    bench = Bench(arguments)
    for part in arguments.only:
        getattr(bench, part)()


if __name__ == "__main__":
    main()
