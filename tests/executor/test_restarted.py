"""What torchrun's `--max-restarts` starts anew goes on with its own run, and leaves others alone; how
runs of torchrun and launchers end."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from calls import planned

from gnnplan.executor.launch.launcher import scratch, unwound_by_signals
from gnnplan.executor.launch.run_request import last_of, must_be_new
from gnnplan.executor.ranks.checkpoint import onwards
from gnnplan.planner.decision.plan import chosen, question, read
from gnnplan.planner.vocabulary.errors import SpecError

GRAPH = "synthetic:community?vertices=300&edges=2400&features=8&classes=4&seed=0"


@pytest.fixture
def plans(tmp_path):
    """Two of one training: they go on from each other's checkpoints where a user asks for it."""
    made = {"one.json": "graph_parallel", "other.json": "granndis"}
    return [
        planned(tmp_path / name, "--graph", GRAPH, f"--hidden 8 --ranks 1 --strategy {strategy}")
        for name, strategy in made.items()
    ]


@pytest.fixture
def attempt(tmp_path, fork_server):
    """Be an attempt of a rank that torchrun started; returns its exit code, and what it said."""

    def run(restarts: int, *arguments: str) -> tuple[int, str]:
        env = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",  # one rank meets nobody there
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "CUDA_VISIBLE_DEVICES": "",
        }
        words = ["-m", "gnnplan", "run", *arguments]
        (ended,) = fork_server.run([(words, env)], tmp_path)
        return ended.code, ended.stderr

    return run


def files(out: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_restart_goes_on_with_its_own_run_alone(plans, attempt, tmp_path):
    """The other plan's first attempt was refused, and its second took this one's weights."""
    one, other = map(str, plans)
    out = tmp_path / "run"
    words = ["--out", str(out), "--epochs", "4", "--checkpoint-every", "2"]
    assert attempt(0, one, *words)[0] == 0
    there = files(out)
    for restarts in (0, 1):
        code, said = attempt(restarts, other, *words)
        assert (code, files(out)) == (2, there) and "holds a run already" in said
    # as if it had been lost after its checkpoint of epoch 2
    (out / "weights.safetensors").unlink()
    (out / "rank0.json").unlink()
    (out / "checkpoints" / "epoch4.rank0.safetensors").unlink()
    assert attempt(1, one, *words)[0] == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert files(out)[str(out / "weights.safetensors")] == there[str(out / "weights.safetensors")]


def test_a_restarted_resume_without_a_checkpoint_deletes_nothing(plans, attempt, tmp_path):
    """A disk that was away for a moment cost all epochs: the restart began from the first."""
    out = tmp_path / "run"
    words = ["--epochs", "4", "--checkpoint-every", "2"]
    assert attempt(0, str(plans[0]), "--out", str(out), *words)[0] == 0
    for path in (out / "checkpoints").iterdir():
        os.truncate(path, 8)
    there = files(out)
    for restarts in (0, 1):
        code, said = attempt(restarts, "--resume", str(out), "--epochs", "6")
        assert (code, files(out)) == (2, there) and "has no checkpoint that all ranks" in said


def test_checkpoints_alone_are_a_run(tmp_path):
    """Of a server without rank 0. A new run kept these, which are later, and deleted its own."""
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(SpecError, match="holds a run already"):
        must_be_new(tmp_path)


def test_ranks_with_disks_of_their_own_choose_one_plan():
    """Rank 0 has epoch 10 of both plans, rank 1 that of this one: each loaded what it had."""
    assert onwards([[10], [10]], [[(10, "other")], []]) == (10, False)
    assert onwards([[10], [10]], [[(10, "other")], [(10, "other")]]) == (10, False)
    assert onwards([[10], [10, 20]], [[(20, "other")], [(20, "other")]]) == (20, True)
    assert onwards([[10], [10]], [[(20, "other")], [(20, "third")]]) == (10, False)
    assert onwards([[], [10]], [[(10, "other")], []]) == (0, False)


def test_a_plan_that_has_nothing_takes_over_all(plans, attempt, tmp_path):
    one, other = plans
    out = tmp_path / "run"
    words = ["--out", str(out), "--epochs", "4", "--checkpoint-every", "2"]
    assert attempt(0, str(one), *words)[0] == 0
    for plan, of_another in ((one, False), (other, True)):
        document = read(plan)
        assert last_of(out, question(document), chosen(document)) == (4, of_another)


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    """A signal as whoever started this process may have it handled."""
    before = signal.signal(number, handler)
    try:
        yield
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("number", "handler", "raised"),
    [
        (signal.SIGTERM, signal.SIG_DFL, SystemExit),
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
    ],
)
def test_a_signal_unwinds_a_launcher_where_it_looks(number, handler, raised):
    """Raised while the launcher asked for a rank's end, it kept a lock that the end waited for."""
    with handled(number, handler):
        with pytest.raises(raised) as ended, unwound_by_signals() as unwind:
            os.kill(os.getpid(), number)
            passed = True
            unwind()
            passed = False
        assert passed and getattr(ended.value, "code", 128 + number) == 128 + number
        with pytest.raises(raised), unwound_by_signals():
            os.kill(os.getpid(), number)  # at the end of a run
        with pytest.raises(raised), unwound_by_signals():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # by somebody impatient
            raise AssertionError


def test_a_launcher_goes_on_where_it_is_to_ignore_a_signal():
    """`nohup gnnplan run` ended with its terminal."""
    with handled(signal.SIGHUP, signal.SIG_IGN), unwound_by_signals() as unwind:
        os.kill(os.getpid(), signal.SIGHUP)
        unwind()


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds ranks in /proc")
def test_survivors_under_torchrun_name_the_lost_rank_and_the_remedy(tmp_path, start):
    """ "Connection closed by peer" was all that the rank that was left said."""
    how = "--hidden 8 --ranks 2 --strategy graph_parallel"
    plan = planned(tmp_path / "plan.json", "--graph", GRAPH, how)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--monitor-interval", "5"]  # it ends survivors when it looks: by default in 0.1 s
    options = ["--epochs", "1000000", "--checkpoint-every", "2"]
    run = start(plan, *options, launcher=(*torchrun, "-m", "gnnplan"), CUDA_VISIBLE_DEVICES="")
    run.until_training()
    os.kill(run.rank(1), signal.SIGKILL)
    assert run.ended(60) != 0
    said = re.search(r"^error: rank 0 \(server 0, .*$", run.stderr, re.M)
    assert said, run.stderr
    assert "its peers did not answer" in said[0]
    assert re.search(r"rank 1 \(server 0, \S+\) was lost or stopped answering", said[0]), said[0]
    resume = r"resume: \d+ finished epochs are in \S+; go on from epoch \d+ with `torchrun .. -m"
    assert re.search(rf"{resume} gnnplan run --resume {re.escape(str(run.out))}`", said[0]), said[0]


KILLED = """
import os, signal, tempfile
with tempfile.NamedTemporaryFile() as file:
    print(file.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_a_killed_process_leaves_no_temporary_files(tmp_path):
    """torch opens some when it finds its sampler lost, and peers may end the rank just then."""
    with scratch(tmp_path) as folder:
        env = os.environ | {"TMPDIR": str(folder)}
        command = [sys.executable, "-c", KILLED]
        killed = subprocess.run(command, capture_output=True, text=True, env=env)
        left = Path(killed.stdout.strip())
        assert left.exists()
        assert left.parent == (tmp_path / ".scratch").readlink()
    assert not left.parent.exists()
    assert not list(tmp_path.iterdir())
