"""An epoch lasts until its slowest rank is through. Run as a script this file is one rank."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from gnnplan.testing.ranks import SECONDS, Case, _train, meeting

DELAY = 0.2  # [s] of rank 1 in every step, after all ranks have met


@pytest.mark.timeout(SECONDS)
def test_an_epochs_seconds_are_those_of_the_slowest_rank(tmp_path, graphs, fork_server):
    """Rank 0 waits for rank 1 outside its step: its own seconds are shorter than the delay."""
    _store, where = meeting(2)
    words, env = [__file__, graphs["rough"], str(tmp_path)], where | {"CUDA_VISIBLE_DEVICES": ""}
    ranks = [(words, env | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    ended = fork_server.run(ranks, tmp_path, SECONDS - 10)
    assert [rank.code for rank in ended] == [0, 0], ended
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(line["epoch_s"] >= DELAY for line in lines)


def main(graph: str, out: str) -> None:
    import torch

    from gnnplan.executor.ranks import learner
    from gnnplan.executor.ranks.rank import open_rank

    torch.set_num_threads(1)
    rank = open_rank(timeout_s=60)
    if rank.rank == 1:
        descend = learner.Optimizer.step

        def step(self: learner.Optimizer) -> None:
            time.sleep(DELAY)
            descend(self)

        learner.Optimizer.step = step  # type: ignore[method-assign]
    _train(rank, Case("pipegcn", graph, {"layers": 2}, epochs=3), Path(out))
    rank.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # at once: Gloo's threads sometimes abort a regular exit
