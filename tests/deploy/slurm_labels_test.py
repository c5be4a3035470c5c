"""Labels that deploy/slurm/muster.sbatch makes of Slurm's topology, with stubs of srun and of the programs. slurm_test runs the
script under Slurm itself, whose test cluster has no switches."""

import os
import pathlib
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "deploy/slurm/muster.sbatch"
STUBS = {
    "srun": 'while [ "$1" != bash ]; do shift; done; exec "$@"',
    "scancel": "exit 0",
    "muster": "exit 0",
    "muster-worker": 'printf "%s\\n" "$@" >"$MUSTER_STATE/arguments"',
}


class Labels(unittest.TestCase):
    def labels(self, address=None, pattern=None, flags=""):
        with tempfile.TemporaryDirectory() as home:
            folder = pathlib.Path(home)
            for name, text in STUBS.items():
                (folder / name).write_text(f"#!/bin/bash\n{text}\n")
                (folder / name).chmod(0o755)
            environment = {"PATH": f"{home}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": home,
                           "SLURMD_NODENAME": "n0", "MUSTER_STATE": home, "MUSTER_COORDINATOR": "127.0.0.1:1",
                           "MUSTER_FLAGS": flags}
            if address is not None:
                environment.update(SLURM_TOPOLOGY_ADDR=address, SLURM_TOPOLOGY_ADDR_PATTERN=pattern)
            ran = subprocess.run(["bash", SCRIPT], env=environment, cwd=home, capture_output=True, text=True)
            self.assertEqual(ran.returncode, 0, ran.stderr)
            words = (folder / "arguments").read_text().splitlines()
        self.assertIn("--stop-ranks-on-exit", words)
        return [words[i + 1] for i, word in enumerate(words) if word == "--label"]

    def test_the_nearest_switches_are_rack_block_and_zone(self):
        self.assertEqual(self.labels("leaf1.n0", "switch.node"), ["rack=leaf1"])
        self.assertEqual(self.labels("spine.leaf1.n0", "switch.switch.node"), ["rack=leaf1", "block=spine"])
        self.assertEqual(self.labels("core.pod2.spine.leaf1.n0", "switch.switch.switch.switch.node"),
                         ["rack=leaf1", "block=spine", "zone=pod2"])

    def test_without_a_tree_there_are_none(self):
        self.assertEqual(self.labels(), [])
        self.assertEqual(self.labels("n0", "node"), [])
        self.assertEqual(self.labels("", ""), [])
        # No value of a label, which the daemon would refuse.
        self.assertEqual(self.labels("spine.a b.n0", "switch.switch.node"), ["block=spine"])

    def test_labels_of_the_user_come_last(self):
        self.assertEqual(self.labels("leaf1.n0", "switch.node", "--label rack=r7"), ["rack=leaf1", "rack=r7"])


if __name__ == "__main__":
    unittest.main()
