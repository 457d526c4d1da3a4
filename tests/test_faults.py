"""Ranks that are killed or interrupted: all processes end, the error names the rank, finished
epochs stay. Whatever else may happen to ranks and to their launcher, and when:
executor/test_injected.py."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from calls import call, everything, planned
from nightly import NIGHT, at_night

from gnnplan.executor.launch.failure import Failure, account, blame
from gnnplan.executor.ranks.activity import Activity
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.fixtures import fork_server as fork_server

GRAPH = "synthetic:community?vertices=200&edges=1600&features=8&classes=4&seed=0"
MINI = "--mode mini --batch 64 --fanout 3,3 --layers 2"
FOREVER = 1_000_000  # epochs

in_proc = "finds ranks by their environment in /proc"
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason=in_proc)


def plan(folder: Path, ranks: int, *more: str) -> Path:
    """A plan.json on `ranks` ranks, made in this process."""
    return planned(folder / "plan.json", "--graph", GRAPH, f"--ranks {ranks} --hidden 8", *more)


def test_a_killed_rank_ends_all_and_is_named(tmp_path, start):
    """At any moment: between two operations the one that ended last is named."""
    victim = 0  # who writes the metrics
    run = start(plan(tmp_path, 2, "--strategy", "gnnpipe"), "--epochs", str(FOREVER), "--json")
    run.until_training()
    os.kill(run.rank(victim), signal.SIGKILL)
    assert run.ended() == 4, run.stderr
    lost = rf"^error: rank {victim} \(server 0\) was lost in \S.* of epoch \d+: "
    words = rf"{lost}killed by SIGKILL\. All ranks were stopped; \d+ finished"
    assert re.search(words, run.stderr, re.M) and "Traceback" not in run.stderr, run.stderr
    run.check_metrics()
    said = json.loads(run.stdout)
    assert said["exit_code"] == 4 and f"rank {victim} (server 0) was lost" in said["error"]
    kept = everything(run.out)
    assert "weights.safetensors" not in {path.name for path in kept}
    with pytest.raises(SpecError, match="holds a run already"):  # what is left is not overwritten
        call("run", tmp_path / "plan.json", "--out", run.out)
    assert everything(run.out) == kept


@pytest.mark.nightly
def test_ranks_that_all_stop_end_the_run(tmp_path, start):
    """The launcher waited for ever: no rank was left to notice that its peers were silent."""
    how = f"--epochs {FOREVER} --timeout 1 --checkpoint-every 0"
    run = start(plan(tmp_path, 2, "--strategy graph_parallel"), *how.split())
    run.until_training()
    for rank in [run.rank(rank) for rank in range(2)]:
        os.kill(rank, signal.SIGSTOP)
    assert run.ended() == 4, run.stderr
    words = r"^error: rank \d \(server 0\) was lost in .*: no rank has done anything for \d+ s"
    assert re.search(words, run.stderr, re.M) and "Traceback" not in run.stderr, run.stderr
    run.check_metrics()


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["p3(pipelined=True,prefetch=2)", "gsplit(prefetch=3)"])
def test_samplers_that_all_stop_end_the_run(tmp_path, start, strategy):
    """A pipelined P3's were waited for for ever, others' three times as long as allowed."""
    planned = plan(tmp_path, 2, MINI, f"--strategy {strategy}")
    run = start(planned, "--epochs", str(FOREVER), "--timeout", "5", "--checkpoint-every", "0")
    run.until_training()
    ranks = {run.rank(rank) for rank in range(2)}
    for pid in run.alive():
        if parent(pid) in ranks:
            os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    assert run.ended() == 4, run.stderr
    assert time.monotonic() - began < 5 + 10
    words = r"lost in .*wait.*: its sampler \d of \d, .*, has said nothing for 5 s"
    assert re.search(words, run.stderr) and "Traceback" not in run.stderr, run.stderr


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
from gnnplan.cli import main
main()
"""


@pytest.mark.parametrize(
    ("files", "strategy"),
    [
        (40, "gsplit(prefetch=1)"),  # it hung
        *(
            at_night(files, strategy)
            for files in (24, 32, 48, 64)
            for strategy in ("gsplit(prefetch=1)", "p3(pipelined=True,prefetch=2)", "data_parallel")
        ),
    ],
)
def test_too_few_files_are_refused_before_ranks_start(tmp_path, fork_server, files, strategy):
    planned = plan(tmp_path, 2, MINI, f"--strategy {strategy}")
    (tmp_path / "limited.py").write_text(LIMITED.format(files))
    words = [str(tmp_path / "limited.py"), "run", str(planned), "--epochs", "2"]
    (ended,) = fork_server.run([([*words, "--out", str(tmp_path / "out")], {})], tmp_path)
    assert ended.code == 2, ended.stderr
    *_, error = ended.stderr.splitlines()
    assert re.fullmatch(rf"error: open files: .*, here {files}; .*\(ulimit -n \d+\)", error), error
    assert "Traceback" not in ended.stderr and not (tmp_path / "out").exists()


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no disk that is always full")
def test_a_standard_output_that_is_full_closed_or_read_no_more(tmp_path, start):
    """Training goes on where nobody reads of its progress; an answer that is lost is said."""
    planned, full = plan(tmp_path, 1), "error: standard output cannot be written"
    called = f"{sys.executable} -m gnnplan"
    for words, code, said in (
        (f"simulate {planned} > /dev/full", 2, f"{full} (No space"),
        (f"simulate {planned} --json > /dev/full", 2, full),
        (f"simulate {planned} >&-", 0, ""),
        *([(f"run {planned} --epochs 2 --out {tmp_path}/out 2> /dev/full", 0, "")] * NIGHT),
        (f"run {planned} --epochs 2 --out {tmp_path}/closed >&- 2>&- <&-", 0, ""),
    ):
        done = subprocess.run(f"{called} {words}", shell=True, capture_output=True, text=True)
        assert done.returncode == code and done.stderr.startswith(said), (words, done)
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


Gone = namedtuple("Gone", "exitcode timestamp")  # a failure as torch's launcher reports it


def test_a_rank_that_the_kernel_killed_for_its_memory():
    told = account({"features": 3e6, "halo": 0.0, "activations": 12e6})
    gone, names = {0: Gone(75, 1), 1: Gone(-9, 2)}, ["rank 0 (server 0)", "rank 1 (server 0)"]
    error = blame(gone, [Activity(), Activity()], names, 3.0, "All ranks were stopped", told)
    words = [
        r"rank 1 \(server 0\) was lost in start: killed by SIGKILL, as the kernel does to processes"
        r" when memory runs out\. the plan "
        r"predicts for its fullest rank 15(\.00)? MB:",
        r"  activations +12(\.00)? MB",
        r"  features +3(\.00)? MB\. All ranks were",
    ]
    assert re.match("\n".join(words), str(error)) and error.exit_code == 4, str(error)


# each rank's exit code @ time and note; ranks apart by ; -> what the error begins with
BLAME = """
75@2 Timed out waiting 3000ms; -15@2 -> rank 1 (server 1), in start, stopped answering: rank 0 (server 0) waited 3 s in halo
75@2 its peers did not answer (NCCL timed out after 600 s); -15@2 -> rank 1 (server 1), in start, stopped answering: rank 0 (server 0) waited 600 s in
-6@1; -15@2 -> rank 0 (server 0) was lost in start: killed by SIGABRT, as torch and Gloo do to a rank whose peers are lost
75@9 Timed out waiting 3000ms; -9@2 -> rank 1 (server 1) was lost in start: killed by SIGKILL
75@1 Connection closed by peer; -9@2 -> rank 1 (server 1) was lost in start: killed by SIGKILL
75@1 Connection reset; -15@0; 4@9 KeyError: 3 -> rank 2 (server 2) was lost in halo: KeyError: 3
75@1 Timed out waiting 3000ms; -9@6 -> rank 1 (server 1), in start, stopped answering: rank 0 (server 0) waited 3 s in halo
75@2 Connection closed by peer; 75@1 Timed out waiting 3000ms -> rank 0 (server 0), in halo, stopped answering: rank 1 (server 1) waited 3 s in halo
75@2 Timed out waiting 3000ms; 75@1 Timed out; -15@0 Connection closed -> ranks do not reach each other: rank 0 (server 0) in halo, rank 1 (server 1) in halo waited 3 s. None of them died: is a link
4@9 memory ran out; -6@2 -> rank 0 (server 0) was lost in halo: memory ran out
75@1 Connection closed by peer; -6@2 -> rank 1 (server 1) was lost in start: killed by SIGABRT
1@0 -> rank 0 (server 0) was lost in start: exit code 1
-15@0; 2@0 the plan is for 3 ranks -> the plan is for 3 ranks
"""


@pytest.mark.parametrize("row", BLAME.strip().splitlines())
def test_the_blame(row):
    told, words = row.split(" -> ")
    failures, records = {}, []
    for rank, part in enumerate(told.split("; ")):
        ended, _, message = part.partition(" ")
        failures[rank] = Gone(*map(int, ended.split("@")))
        records.append(Activity())
        if message:
            waited_s = 600.0 * ("NCCL" in message)
            failure = Failure(failures[rank].exitcode, message, "halo", waited_s)
            records[rank].leave(failure.note)
    names = [f"rank {rank} (server {rank})" for rank in failures]
    error = blame(failures, records, names, 3.0, "All ranks were stopped")
    assert str(error).startswith(words)
    assert error.exit_code == (2 if words.startswith("the plan is") else 4)
