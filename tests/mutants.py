"""Whether the suite still bites: small faults, one by one, and the tests that should notice each.

    python tests/mutants.py            all faults of mutants.toml, in copies of the repository
    python tests/mutants.py straggler  those whose name has all these words

The tests pass without a fault first, or nothing is said. Prints the survivors, faults that no test
noticed. Exits with 1 where more than two survive.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.toml"
MAY_SURVIVE = 2
AT_ONCE = 2  # faults, each in a copy of the repository
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "runs", "shared")


def mutants() -> list[dict]:
    """Each has a name, a file, what stands there once (`old`), the fault (`new`), and tests."""
    return tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]


def passes(copy: Path, tests: Iterable[str]) -> bool:
    """Whether all these tests pass in a copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if ended.returncode not in (0, 1):  # neither passed nor failed: the list is wrong
        raise SystemExit(f"pytest ended with {ended.returncode}\n{ended.stdout[-2000:]}")
    return ended.returncode == 0


def noticed(copies: SimpleQueue[Path], mutant: dict) -> tuple[bool, float]:
    """Whether one of the mutant's tests fails with the fault in place, and after how long [s]."""
    sound = (ROOT / mutant["file"]).read_text(encoding="utf-8")
    assert sound.count(mutant["old"]) == 1, f"{mutant['name']}: `old` must stand there once"
    copy, begin = copies.get(), time.monotonic()
    path = copy / mutant["file"]
    path.write_text(sound.replace(mutant["old"], mutant["new"]), encoding="utf-8")
    try:
        return not passes(copy, mutant["tests"]), time.monotonic() - begin
    finally:
        path.write_text(sound, encoding="utf-8")
        copies.put(copy)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", nargs="*", help="of the names of faults; default: all faults")
    words = parser.parse_args().word
    begin = time.monotonic()
    chosen = [each for each in mutants() if all(word in each["name"] for word in words)]
    if not chosen:
        parser.error(f"no fault's name has {' and '.join(words)}; {LIST} lists them")
    survivors = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(AT_ONCE):
            copy = Path(folder) / f"gnnplan{number}"
            copies.put(shutil.copytree(ROOT, copy, symlinks=True, ignore=IGNORED))
        if not passes(copy, dict.fromkeys(test for each in chosen for test in each["tests"])):
            raise SystemExit("a test of mutants.toml fails without any fault; mend it first")
        runs = {pool.submit(noticed, copies, mutant): mutant["name"] for mutant in chosen}
        for number, run in enumerate(as_completed(runs), 1):
            killed, seconds = run.result()
            survivors += [] if killed else [runs[run]]
            word = "noticed " if killed else "SURVIVED"
            print(f"{number:2}/{len(chosen)} {word} {seconds:4.0f} s  {runs[run]}", flush=True)
    seconds = time.monotonic() - begin
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed in {seconds:.0f} s")
    for name in survivors:
        print(f"survived: {name}")
    sys.exit(len(survivors) > MAY_SURVIVE)


if __name__ == "__main__":
    main()
