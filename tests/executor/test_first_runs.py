"""What went wrong in a new user's first hour: one test tells each story."""

import os
import re
import signal
import time
from pathlib import Path

import calls
import pytest

from gnnplan.executor.launch.rank_process import _progress_line

ACCURACIES = ("train_accuracy", "val_accuracy", "test_accuracy")
GRAPH = "synthetic:community?vertices=200&edges=1600&features=8&classes=4&seed=0"


def planned(folder: Path, *more: str) -> Path:
    return calls.planned(folder / "plan.json", "--graph", GRAPH, "--hidden 8", *more)


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds ranks in /proc")
def test_survivors_under_torchrun_name_the_lost_rank_and_the_remedy(tmp_path, start):
    """ "Connection closed by peer" was all that the rank that was left said."""
    plan = planned(tmp_path, "--ranks", "2", "--strategy", "graph_parallel")
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


def test_the_time_left_does_not_count_set_up(capsys):
    """50 epochs of 16 ms had "320 s left": ranks had taken 6 s to read the graph and the model."""
    report = _progress_line(epochs=100, first=0)
    time.sleep(0.1)  # reading the graph; times 99 epochs it was 10 s
    report({"epoch": 1, "epoch_s": 0.02, "loss": 1.0} | dict.fromkeys(ACCURACIES))
    assert "epoch 1/100" in (said := capsys.readouterr().err) and "2 s left" in said
