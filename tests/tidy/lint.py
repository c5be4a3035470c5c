#!/usr/bin/env python3
"""Runs clang-tidy on the C++ sources named on stdin, of which none may have something to say.

    tests/tidy/lint.py --database build-clang [--jobs N] < sources

Nearly all that clang-tidy takes is reading headers and matching its checks on them. So sources of
the same flags are read as one: a file of their texts, each behind a #line that names it. Sources
that define the same name outside of any class are kept apart, as far as a glance at their text
tells. Where clang finds something in several sources, be it real or names that collide, each half is
read alone, down to single sources: what is reported is of one source alone.

What reading several as one would hide is a using-declaration that its own source does not need:
those are looked for in the text of each.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

CONFIG = pathlib.Path(__file__).resolve().parents[2] / ".clang-tidy"
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
USING = re.compile(r"^[ \t]*using\s+[\w:]+::(\w+);", re.MULTILINE)
# The first line of a definition that is indented by nothing: a type, or what has a name behind
# its type.
TYPE = re.compile(r"^(?:(?:struct|class|union|enum(?: class)?)\s+(\w+)\b(?!\s*;|::)|using\s+(\w+)\s*=)",
                  re.MULTILINE)
VALUE = re.compile(r"^(?!namespace|using|template|struct|class|union|enum|return|#|public|private)"
                   r"[A-Za-z][\w:<>,*& ]*[ *&](\w+)\s*(?:\(|=|\{|\[|;)", re.MULTILINE)


class Source:
    def __init__(self, path):
        self.path = path
        self.text = pathlib.Path(path).read_text()
        self.code = re.sub(r"^#include.*", "", COMMENT_OR_STRING.sub(" ", self.text), flags=re.MULTILINE)
        self.defined = {name for names in TYPE.findall(self.code) for name in names if name}
        self.defined |= set(VALUE.findall(self.code))
        self.words = set(re.findall(r"\w+", self.code))

    def unused(self):
        """Names of using-declarations that the source does not mention again on their own."""
        return [name for name in USING.findall(self.code)
                if not re.search(rf"(?<!::)\b{name}\b", self.code)]

    def collides(self, other):
        return bool(self.defined & other.words or other.defined & self.words)


def flags_of(database):
    """The compiler's words for each source, without the source and what is written."""
    flags = {}
    for entry in json.loads((database / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        if os.path.basename(words[0]) == "ccache":
            words.pop(0)
        for word, count in (("-o", 2), ("-c", 2), ("-MD", 1), ("-MT", 2), ("-MF", 2)):
            if word in words:
                at = words.index(word)
                del words[at:at + count]
        flags.setdefault(entry["file"], tuple(words))
    return flags


def groups_of(paths, flags, most):
    groups = []
    for path in paths:
        source = Source(path)
        for key, group in groups:
            if (key == flags[path] and len(group) < most and
                    not any(source.collides(other) for other in group)):
                group.append(source)
                break
        else:
            groups.append((flags[path], [source]))
    return groups


def tidy(options, folder, flags, sources):
    """What clang-tidy says of these, each alone where that is anything."""
    one = len(sources) == 1
    if one:
        path = sources[0].path
    else:
        with tempfile.NamedTemporaryFile("w", suffix=".cc", dir=folder, delete=False) as together:
            for source in sources:
                together.write(f'#line 1 "{source.path}"\n{source.text}\n')
        path = together.name
    run = subprocess.run(["clang-tidy", "--quiet", f"--config-file={CONFIG}", path, "--", *flags[1:]],
                         cwd=options.database, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if run.returncode == 0:
        return []
    if one:
        return [run.stdout + run.stderr]
    half = len(sources) // 2
    return (tidy(options, folder, flags, sources[:half]) +
            tidy(options, folder, flags, sources[half:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--database", type=pathlib.Path, required=True,
                        help="the build tree whose compile_commands.json has the flags")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--together", type=int, default=12, help="so many sources at most are read as one")
    options = parser.parse_args()
    flags = flags_of(options.database)
    paths = sorted({line.strip() for line in sys.stdin if line.strip()})
    unknown = [path for path in paths if path not in flags]
    if unknown:
        sys.exit(f"lint: {options.database} has no command for {', '.join(unknown)}")
    findings = 0
    groups = groups_of(paths, flags, options.together)
    for _, group in groups:
        for source in group:
            for name in source.unused():
                findings += 1
                print(f"{source.path}: using-declaration of '{name}' is unused")
    with tempfile.TemporaryDirectory() as folder, \
            concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        groups.sort(key=lambda group: -len(group[1]))
        for said in pool.map(lambda group: tidy(options, folder, *group), groups):
            findings += len(said)
            for text in said:
                print(text, flush=True)
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
