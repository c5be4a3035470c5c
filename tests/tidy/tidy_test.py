"""House rules that a compiler does not check: who includes whom, line length, leftovers, documentation
that comes from the code."""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = None
SOURCE_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
PRODUCT = ("base", "proto", "security", "coordinator", "worker", "kernels", "parallel", "cli")

# Folder -> folders of ours that it may include. The longest matching prefix counts.
MAY_INCLUDE = {
    "base": {"base"},
    "proto": {"base", "proto", "parallel/mesh", "parallel/plan"},
    "security": {"base", "security"},
    "kernels": {"base", "kernels"},
    "parallel/mesh": {"base", "parallel/mesh"},
    "parallel/plan": {"base", "parallel/mesh", "parallel/plan"},
    "parallel/data": {"base", "parallel/data"},
    "parallel": {"base", "kernels", "parallel"},
    "coordinator": {"base", "proto", "security", "coordinator", "parallel/mesh", "parallel/plan"},
    "worker/run_directory": {"worker/run_directory"},
    "worker/daemon/core": {"base", "proto", "worker/daemon/core"},
    # muster-worker is the rank of a command too.
    "worker/daemon": {"base", "proto", "security", "worker/daemon", "worker/command", "worker/run_directory"},
    # worker/rank's client alone: it links nothing else of it.
    "worker/command": {"base", "proto", "worker/command", "worker/rank", "worker/run_directory"},
    "worker/rank": {"base", "proto", "kernels", "parallel", "worker/rank", "worker/run_directory"},
    # docs/decisions/0001: the pure data library serves `muster data`.
    "cli": {"base", "proto", "security", "cli", "parallel/mesh", "parallel/plan", "parallel/data"},
}

# Third-party header pattern -> path patterns that may include it.
ONLY_IN = {
    r"^(grpcpp|grpc)/|\.grpc\.pb\.h$": r"^(coordinator/(rpc/|main\.cc)|worker/daemon/|worker/rank/daemon_client|cli/|security/credentials)",
    r"^openssl/": r"^(security/|base/metrics_prometheus\.cc$)",
    r"^jwt\.h$": r"^security/jwt\.cc$",
    r"^rocksdb/": r"^coordinator/store/",
    r"^(cuda|cublas|cudnn|nvml|cupti|curand)": r"^(kernels/|parallel/comm/(nccl|peer_))",
    r"^nccl": r"^parallel/comm/nccl",
    r"^prometheus/": r"^base/metrics_prometheus\.cc$",
    r"^httplib\.h$": r"^(base/metrics_prometheus|coordinator/traces)\.cc$",
    r"^gloo/": r"^parallel/comm/gloo",
    r"^(oneapi/|dnnl)": r"^kernels/",
    r"^yaml-cpp/": r"^(proto/spec|cli)/|^security/access\.cc$",
    r"^CLI/": r"^(cli/|coordinator/main\.cc|worker/daemon/main\.cc|worker/rank/main\.cc)",
    r"^spdlog/": r"^base/log\.cc$",
    r"^(ranges|format|source_location)$": r"^$",
}
# Words of a private vocabulary: pattern, the folders in which it is banned, and what to say instead.
EVERYWHERE = PRODUCT + ("tests", "docs", "examples", "dev", "README.md", "CONTRIBUTING.md")
CODE = PRODUCT + ("tests",)
# SentencePiece's word for its tokens, which files that read its models share.
PIECES = r"(?<!Sentence)(?<!sentence)(?<!sentence_)[Pp]ieces?\b(?!\")"
BANNED = [
    (r"\bmatrix products?\b", EVERYWHERE, "GEMM in code, matmul in prose"),
    (r"\bMeetPeers\b|\bmeet_peers\b|\bmeetings?\b", EVERYWHERE, "barrier, or rendezvous at the start"),
    (r"\bAgain\b|\bForwardAgain\b", ("parallel",), "recompute"),
    (r"\bcopy engines?\b", ("kernels",), "TMA for Hopper's bulk copies"),
    (r"\bGradientRoom\b|\b[Rr]oom_? = |\broom of activations\b", CODE, "memory shared with activations"),
    (r"\bstrangers?\b", ("coordinator", "worker", "parallel", "cli", "base", "proto"),
     "unknown or unauthenticated peer"),
    (r"\bHorizons\b|\bShown\b", ("coordinator", "cli"), "the published state"),
    (r"\bsight\b", EVERYWHERE, "view or snapshot"),
    (r"\b[Aa]gents?\b|\bagent_|_agent\b", EVERYWHERE, "worker daemon"),
    (r"\bproducts?\b", ("kernels",), "GEMM"),
    (r"With\w*Products?\b", EVERYWHERE, "GEMM"),
    (PIECES, CODE, "chunk of a file, slice of a flat buffer, or allocation of an arena"),
    (r"\b[Ww]hoever\b", EVERYWHERE, "a sentence that names the subject"),
    (r"\b(ranks|peers)( are)?( to)? (meet|met)\b", EVERYWHERE, "connect, or reach a barrier"),
    (r"\bstands? (beside|behind|where|in front|still)\b", EVERYWHERE, "is, lies or waits"),
    (r"\b(Redirect|Settle|Hide)\(", ("coordinator",), "what the function does"),
    (r"\b[Rr]ound \d|\b(has|have) not (yet )?run\b", ("docs",), "current figures; git keeps the others"),
    (r"\bnobody wants\b|\bwho(ever)? (wants|needs|asks|reads)\b", PRODUCT,
     "a sentence that names the subject"),
    (r"\b(timer|alarm|it|that) rings\b", CODE, "fires"),
]


def tracked(*folders):
    names = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True,
                           text=True).stdout.splitlines()
    return [pathlib.Path(name) for name in names if "/testdata/" not in name]


def sources(*folders):
    return [path for path in tracked(*folders) if path.suffix in SOURCE_SUFFIXES]


def includes(path):
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        match = re.match(r'\s*#\s*include\s+[<"]([^>"]+)[>"]', line)
        if match:
            yield number, match.group(1)


def owner(path):
    prefixes = [folder for folder in MAY_INCLUDE if str(path).startswith(folder + "/")]
    return max(prefixes, key=len, default=None)


class Tidy(unittest.TestCase):
    def test_folders_include_only_what_the_architecture_allows(self):
        wrong = []
        for path in sources(*PRODUCT):
            allowed = MAY_INCLUDE[owner(path)]
            for number, header in includes(path):
                first = header.split("/")[0]
                if header.startswith("muster/v1/"):
                    header, first = "proto/" + header, "proto"
                if first not in PRODUCT + ("tests", "deploy"):
                    continue
                if not any(header.startswith(folder + "/") for folder in allowed):
                    wrong.append(f"{path}:{number} includes {header}")
        self.assertEqual(wrong, [])

    def test_third_party_headers_stay_behind_their_seams(self):
        wrong = []
        for path in sources(*PRODUCT):
            for number, header in includes(path):
                for pattern, where in ONLY_IN.items():
                    if re.search(pattern, header) and not re.search(where, str(path)):
                        wrong.append(f"{path}:{number} includes {header}")
        self.assertEqual(wrong, [])

    def test_every_header_has_its_own_guard(self):
        wrong = []
        for path in sources(*PRODUCT, "tests"):
            if path.suffix not in (".h", ".cuh"):
                continue
            guard = "MUSTER_" + re.sub(r"[^A-Za-z0-9]", "_", str(path)).upper() + "_"
            if f"#ifndef {guard}\n#define {guard}\n" not in (ROOT / path).read_text():
                wrong.append(f"{path}: expected guard {guard}")
        self.assertEqual(wrong, [])

    def test_lines_are_at_most_100_columns(self):
        wrong = []
        for path in sources(*PRODUCT, "tests"):
            for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
                if len(line) > 100 and "http" not in line:
                    wrong.append(f"{path}:{number}: {len(line)} columns")
        self.assertEqual(wrong, [])

    def test_nothing_unfinished_is_left_behind(self):
        leftovers = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
        wrong = [f"{path}:{number}"
                 for path in tracked(*PRODUCT, "tests", "docs", "deploy", "examples")
                 if path.suffix in SOURCE_SUFFIXES | {".md", ".proto", ".yaml", ".py"}
                 and path.name != "tidy_test.py"
                 for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
                 if leftovers.search(line)]
        self.assertEqual(wrong, [])

    def test_words_are_those_of_the_field(self):
        wrong = []
        for pattern, folders, instead in BANNED:
            banned = re.compile(pattern)
            for path in tracked(*folders):
                if path.suffix not in SOURCE_SUFFIXES | {".md", ".proto", ".py", ".sh", ".txt", ".yaml", ""}:
                    continue
                if path.name == "tidy_test.py" or (pattern == PIECES and "sentence_piece" in path.name):
                    continue
                for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
                    if banned.search(line):
                        wrong.append(f"{path}:{number}: {banned.search(line).group(0)!r}: say {instead}")
        self.assertEqual(wrong, [])

    def test_pages_of_results_stay_short(self):
        lines = (ROOT / "docs/benchmarks/results.md").read_text().splitlines()
        self.assertLessEqual(len(lines), 100)

    def test_links_between_pages_lead_somewhere(self):
        wrong = []
        for path in tracked("docs", "README.md", "CONTRIBUTING.md"):
            if path.suffix != ".md":
                continue
            text = (ROOT / path).read_text()
            for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
                if not (ROOT / path.parent / target).exists():
                    wrong.append(f"{path}: {target}")
        self.assertEqual(wrong, [])

    def test_pages_that_code_names_exist(self):
        named = re.compile(r"\bdocs/[\w./-]+\.(?:md|svg)\b")
        wrong = [f"{path}:{number}: {match}"
                 for path in tracked(*EVERYWHERE) if path.name != "tidy_test.py"
                 if path.suffix in SOURCE_SUFFIXES | {".md", ".proto", ".py", ".sh", ".txt", ".yaml", ""}
                 for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
                 for match in named.findall(line) if not (ROOT / match).exists()
                 and match != "docs/benchmarks/gpu.md"]
        self.assertEqual(wrong, [])

    def test_the_tour_names_what_is_there(self):
        text = (ROOT / "docs/tour.md").read_text()
        stops = re.findall(r"^\d+\. \*\*`([^`]+)`, `([^`]+)`\*\*", text, re.MULTILINE)
        self.assertEqual(len(stops), 12, "docs/tour.md has twelve stops")
        for path, function in stops:
            # A definition: its type stands in front of the name, where a call has none.
            defined = re.compile(rf"^ *(?!return\b)\w[\w:<>,*& ]*[ *&>]{function}\(", re.MULTILINE)
            self.assertRegex((ROOT / path).read_text(), defined, f"{path} has no {function}")
        for path in re.findall(r"`([\w/]+\.(?:cc|h|cu))`", text):
            self.assertTrue((ROOT / path).exists(), path)

    def test_core_code_reads_no_clock_and_starts_no_thread(self):
        banned = re.compile(r"absl::Now\(|std::thread|std::chrono|\bMutex\b|SleepFor|getenv|rand\(")
        wrong = [f"{path}:{number}"
                 for path in sources("coordinator/core", "coordinator/scheduler",
                                     "worker/daemon/core")
                 for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
                 if banned.search(line.split("//")[0])]
        self.assertEqual(wrong, [])

    def test_locks_are_those_that_the_thread_sanitizer_sees(self):
        banned = re.compile(r"absl::(Mutex|MutexLock|ReaderMutexLock|WriterMutexLock|CondVar|Condition|"
                            r"Notification|BlockingCounter|Barrier)\b|absl/synchronization/")
        wrong = [f"{path}:{number}: use base/mutex.h"
                 for path in sources(*PRODUCT, "tests") if str(path) != "base/mutex.h"
                 for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
                 if banned.search(line.split("//")[0])]
        self.assertEqual(wrong, [])

    def test_tests_do_not_sleep(self):
        banned = re.compile(r"\b(SleepFor|sleep_for|usleep|nanosleep|sleep)\s*\(")
        # Benchmarks run for a time, and ctest runs none that waits.
        wrong = [f"{path}:{number}" for path in sources("tests")
                 if not str(path).startswith("tests/bench/")
                 for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
                 if banned.search(line.split("//")[0])]
        self.assertEqual(wrong, [])

    def test_docs_metrics_matches_the_catalogues(self):
        text = (ROOT / "docs/metrics.md").read_text()
        for name in ("muster-coordinator", "muster-worker", "muster-rank"):
            described = subprocess.run([str(BIN / name), "--describe-metrics"], check=True,
                                       capture_output=True, text=True).stdout
            self.assertIn(described, text, f"run ./dev docs: {name} differs from docs/metrics.md")

    def test_every_program_tells_the_version_of_the_project(self):
        version = re.search(r"project\(muster VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
        for name in ("muster", "muster-coordinator", "muster-worker", "muster-rank"):
            told = subprocess.run([str(BIN / name), "--version"], check=True, capture_output=True,
                                  text=True).stdout
            self.assertEqual(told, f"{name} {version.group(1)}\n")

    def test_the_repository_names_no_private_path(self):
        private = re.compile(r"(?<![\w.$}])/(work|farm|opt/torch)/")
        wrong = []
        for path in tracked():
            try:
                text = (ROOT / path).read_text()
            except UnicodeDecodeError:
                continue
            if path.name != "tidy_test.py" and private.search(text):
                wrong.append(str(path))
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    if "--bin" in sys.argv:
        at = sys.argv.index("--bin")
        BIN = pathlib.Path(sys.argv[at + 1])
        del sys.argv[at:at + 2]
    unittest.main()
