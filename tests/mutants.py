"""Whether the suite still bites: small faults, one by one, and the tests that should notice each.

    python tests/mutants.py            all faults of mutants.toml, in a copy of the repository
    python tests/mutants.py straggler  those whose name has the word

Prints the survivors, faults that no test noticed. Exits with 1 where more than two survive.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.toml"
MAY_SURVIVE = 2
IGNORED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "runs")


def mutants() -> list[dict]:
    """Each has a name, a file, what stands there once (`old`), the fault (`new`), and tests."""
    return tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]


def noticed(copy: Path, mutant: dict) -> bool:
    """Whether one of the mutant's tests fails with the fault in place."""
    path = copy / mutant["file"]
    sound = path.read_text(encoding="utf-8")
    assert sound.count(mutant["old"]) == 1, (
        f"{mutant['name']}: `old` must stand once in {path.name}"
    )
    path.write_text(sound.replace(mutant["old"], mutant["new"]), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [*command, *mutant["tests"]],
            cwd=copy,
            env=environment,
            capture_output=True,
            timeout=600,
        )
        if ended.returncode not in (0, 1):  # neither passed nor failed: the list is wrong
            raise SystemExit(
                f"{mutant['name']}: pytest ended with {ended.returncode}\n{ended.stdout[-2000:].decode()}"
            )
        return ended.returncode == 1
    finally:
        path.write_text(sound, encoding="utf-8")


def main() -> None:
    chosen = [each for each in mutants() if all(word in each["name"] for word in sys.argv[1:])]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "gnnplan"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=IGNORED)
        for number, mutant in enumerate(chosen, 1):
            begin = time.monotonic()
            killed = noticed(copy, mutant)
            survivors += [] if killed else [mutant["name"]]
            word = "noticed " if killed else "SURVIVED"
            print(
                f"{number:2}/{len(chosen)} {word} {time.monotonic() - begin:4.0f} s  {mutant['name']}",
                flush=True,
            )
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed")
    for name in survivors:
        print(f"survived: {name}")
    sys.exit(len(survivors) > MAY_SURVIVE)


if __name__ == "__main__":
    main()
