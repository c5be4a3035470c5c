#!/usr/bin/env python3
"""That lint.py reports what clang-tidy finds in one of several sources, under that source's name."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
CLEAN = "int {name}() {{\n  return 1;\n}}\n"
# What is wrong with a source, by the check that says so.
WRONG = {
    "clang-diagnostic-unused-variable": "int Unused() {\n  int value = 3;\n  return 1;\n}\n",
    "modernize-use-override": "struct Base {\n  virtual ~Base() = default;\n  virtual void F();\n};\n"
                              "struct Derived : Base {\n  void F();\n};\n",
    "google-explicit-constructor": "struct Implicit {\n  Implicit(int value);\n};\n",
    "bugprone-infinite-loop": "void Endless() {\n  int i = 0, j = 0;\n  while (i < 10) j++;\n}\n",
    "unused": "namespace far {\nint Name();\n}\nnamespace near {\nusing far::Name;\n}\n",
}


class Lint(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def lint(self, **sources):
        database = []
        for name, text in sources.items():
            path = self.folder / f"{name}.cc"
            path.write_text(text)
            database.append({"file": str(path), "directory": str(self.folder),
                             "command": f"/usr/bin/ccache clang++ -std=c++20 -Wall -o {name}.o -c {path}"})
        (self.folder / "compile_commands.json").write_text(json.dumps(database))
        return subprocess.run([sys.executable, "-B", HERE / "lint.py", "--database", self.folder],
                              input="\n".join(entry["file"] for entry in database),
                              capture_output=True, text=True)

    def test_what_is_wrong_with_one_of_several_is_reported_of_that_one(self):
        for check, text in WRONG.items():
            with self.subTest(check):
                run = self.lint(a=CLEAN.format(name="A"), b=CLEAN.format(name="B"), wrong=text,
                                z=CLEAN.format(name="Z"))
                self.assertEqual(run.returncode, 1, run.stdout + run.stderr)
                self.assertIn(check, run.stdout)
                self.assertIn("wrong.cc:", run.stdout)
                self.assertNotIn("a.cc:", run.stdout)

    def test_names_that_collide_are_no_findings(self):
        run = self.lint(a="namespace {\nint X = 1;\n}\nint A() {\n  return X;\n}\n",
                        b="namespace {\ndouble X = 2;\n}\ndouble B() {\n  return X;\n}\n",
                        c="namespace {\nstruct\nX {\n  int x;\n};\n}\nint C() {\n  return X{1}.x;\n}\n")
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)

    def test_a_source_without_a_command_is_an_error(self):
        run = self.lint(a=CLEAN.format(name="A"))
        run = subprocess.run([sys.executable, "-B", HERE / "lint.py", "--database", self.folder],
                             input="/nowhere/else.cc\n", capture_output=True, text=True)
        self.assertNotEqual(run.returncode, 0)
        self.assertIn("/nowhere/else.cc", run.stderr)


if __name__ == "__main__":
    unittest.main()
