"""The emulated cluster: as fast as its cards, and gone with the process that made it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from calls import planned

from gnnplan.executor.launch import emulation as lab
from gnnplan.planner.vocabulary.errors import SpecError

GRAPH = "synthetic:community?vertices=300&edges=2400&features=8&classes=4&seed=0"


def _here() -> str:
    try:
        lab.check()
    except SpecError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.timeout(240), pytest.mark.processes]
needs_namespaces = pytest.mark.skipif(bool(_here()), reason=_here())
TALK = """
import os, socket, sys, time
n = int(sys.argv[1])
if os.environ["RANK"] == "0":
    with socket.create_server(("", 4000)) as server:
        peer, got = server.accept()[0], 0
        begin = time.monotonic()
        while got < n: got += len(peer.recv(1 << 20))
        print(time.monotonic() - begin)
else:
    for _ in range(100):
        try: peer = socket.create_connection((os.environ["MASTER_ADDR"], 4000)); break
        except OSError: time.sleep(0.1)
    peer.sendall(bytes(n))
"""


def plan(folder: Path, servers: int, each: int, *more: str) -> Path:
    shape = f"--set servers={servers} --set gpus_per_server={each} --hidden 8"
    return planned(folder / "plan.json", "--graph", GRAPH, shape, *more)


@needs_namespaces
def test_a_card_is_no_faster_than_its_rate_and_a_server_inside_is():
    rate, nbytes = 5e6, 4_000_000

    def seconds(places: list[int]) -> float:
        ranks = [
            subprocess.Popen(
                servers[place].inside(sys.executable, "-c", TALK, str(nbytes)),
                env=os.environ | {"RANK": str(rank), "MASTER_ADDR": servers[places[0]].address},
                stdout=subprocess.PIPE,
            )
            for rank, place in enumerate(places)
        ]
        took, _ = (rank.communicate(timeout=60)[0] for rank in ranks)
        return float(took)

    with lab.lab(2, rate) as servers:
        across, inside = seconds([0, 1]), seconds([0, 0])
        shaped = servers[0].inside("tc", "-json", "qdisc")
        [bucket] = [
            q["options"] for q in json.loads(subprocess.check_output(shaped)) if q["kind"] == "tbf"
        ]
    assert bucket["rate"] == rate  # [B/s]
    burst = 2 * max(lab.PACKETS[0], rate * lab.BURST_S)
    assert across > (nbytes - burst) / rate * 0.95
    assert inside < across / 3  # of 0.8 s: loopback takes milliseconds


@needs_namespaces
@pytest.mark.nightly
@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_whatever_ends_it(tmp_path, start, signalled):
    """A SIGTERM left the folder of the samplers behind: nothing had the launcher unwind."""
    (temporary := tmp_path / "tmp").mkdir()
    words = ["--epochs", "1000000", "--emulate", "unshaped"]
    run = start(plan(tmp_path, 2, 1), *words, TMPDIR=str(temporary))
    run.until_training()
    assert len(run.alive()) >= 6  # itself, two ranks, three namespaces
    run.process.send_signal(signalled)
    if signalled == signal.SIGKILL:  # what is left then, the next run removes
        assert run.ended() == -signalled
    else:
        assert run.ended() == 128 + signalled and not list(temporary.iterdir())


@needs_namespaces
@pytest.mark.nightly  # what `measure` does on one server is tested every time
@pytest.mark.usefixtures("sizes")
def test_emulated_servers_are_measured_apart():
    from gnnplan.executor.measure.measure import measure

    said: list[str] = []
    # messages of 27 ms: other tests have the cores for ten
    cluster = measure(1, said.append, servers=2, emulated=1e7, seconds=0.09)
    assert (cluster.servers, cluster.gpus_per_server, cluster.one_machine) == (2, 1, True)
    # no faster than the card, but for a burst
    assert cluster.inter_node and cluster.inter_node.bandwidth < 1.3 * 1e7
    assert cluster.inter_node.bandwidth > 2e6
    assert set(cluster.collectives) == {
        f"{op}.inter_node" for op in ("exchange", "send", "all_reduce")
    }
    assert any("between servers" in what for what in said)


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(
        lab.shutil, "which", lambda tool: None if tool == "tc" else f"/usr/bin/{tool}"
    )
    with pytest.raises(SpecError, match="needs tc; apt-get install iproute2"):
        lab.check()
    monkeypatch.setattr(lab.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    with pytest.raises(SpecError, match=r"needs root .* user 1000.* use sudo"):
        lab.check()
    monkeypatch.setattr(lab.os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab.torch.cuda, "is_available", lambda: True)
    with pytest.raises(SpecError, match=r"ranks are on the processor: .* CUDA_VISIBLE_DEVICES="):
        lab.check()
    monkeypatch.setattr(lab.sys, "platform", "darwin")
    with pytest.raises(SpecError, match="needs Linux"):
        lab.check()


@needs_namespaces
@pytest.mark.parametrize("servers", [0, 201])
def test_no_such_lab(servers):
    with pytest.raises(SpecError, match="1 to 200"), lab.lab(servers):
        pass
