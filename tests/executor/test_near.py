"""Ranks on one machine read messages out of each other's memory, and notice who is gone."""

import os
import re
import socket
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from gnnplan.executor.ranks.comm import all_reduce, swap
from gnnplan.executor.ranks.near import DONE, MESSAGE, Near, _Peer
from gnnplan.executor.ranks.rank import open_rank
from gnnplan.executor.ranks.rendezvous import on_this_machine, store_of_this_machine
from gnnplan.planner.vocabulary.schedule import Label


def exchange(number: int, port: int) -> None:
    os.environ |= on_this_machine(port, "near") | {"RANK": str(number), "WORLD_SIZE": "3"}
    rank = open_rank(10)
    dist.isend = dist.irecv = dist.all_reduce = None  # over Gloo it would fail

    def message(sender: int, receiver: int) -> torch.Tensor:
        rows = 0 if sender == 2 else 1 + 100_000 * receiver  # rank 2 sends nothing
        return torch.full((rows, 3), float(10 * sender + receiver))

    for _ in range(2):
        ins = [torch.empty_like(message(peer, number)) for peer in range(3)]
        outs = [message(number, peer) for peer in range(3)]
        swap(rank, outs, ins, rank.groups.exchanges)
        for peer in {0, 1, 2} - {number}:
            assert torch.equal(ins[peer], message(peer, number))
    for length in (0, 1, 2, 100_000):
        flat = torch.arange(length) + 10.0**number
        all_reduce(rank, Label("all_reduce", 0), flat, (0, 1, 2))
        assert torch.equal(flat, 3 * torch.arange(length) + 111.0)
    print("received")
    rank.close()


@pytest.mark.processes
def test_no_row_between_ranks_on_one_machine_passes_through_gloo(tmp_path, fork_server):
    store, script = store_of_this_machine(), tmp_path / "rank.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {sys.path}\nfrom test_near import exchange\n"
        f"exchange(int(sys.argv[1]), {store.port})\n"
    )
    ended = fork_server.run([([str(script), rank], {}) for rank in "012"], tmp_path, 40)
    assert [rank.stdout for rank in ended] == ["received\n"] * 3, ended


@pytest.fixture
def ends():
    """Two ranks' connections to each other, in one process."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.settimeout(0.2)
    yield [_Peer(1 - rank, end, os.getpid()) for rank, end in enumerate(ends)]
    for end in ends:
        end.close()


def test_peers_may_read_each_other(ends):
    answers = []
    other = threading.Thread(target=lambda: answers.append(ends[1].readable()))
    other.start()
    assert ends[0].readable()
    other.join()
    assert answers == [True]


def test_a_peer_that_is_silent_or_gone_or_sends_other_rows_is_named(ends):
    rows, peer = torch.zeros(4), Near({1: ends[0]})
    with pytest.raises(RuntimeError, match=re.escape("Connection to rank 1: timed out")):
        peer.swap({}, {1: rows})
    ends[1].offer(torch.zeros(5))
    with pytest.raises(RuntimeError, match="rank 1 sends 20 B instead of 16 B"):
        peer.swap({}, {1: rows})
    ends[1].connection.close()
    with pytest.raises(RuntimeError, match="Connection closed by rank 1"):
        peer.swap({}, {1: rows})
    with pytest.raises(RuntimeError, match="Connection to rank 1 is lost"):
        peer.swap({1: rows}, {})


def test_memory_that_may_not_be_read_goes_over_gloo(ends):
    ends[0].tell(MESSAGE.pack(8, 4))  # nothing is at address 8
    ends[0].tell(DONE)
    assert not ends[1].readable()
