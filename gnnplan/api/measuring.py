"""`measure`: the cluster that this machine is, or that servers emulated on it are."""

from __future__ import annotations

from pathlib import Path

from gnnplan.api.running import rate_of
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.vocabulary.files import cache_dir, must_be_writable, write_atomically
from gnnplan.planner.vocabulary.progress import Notify, silent, tells

KEPT = "local.yaml"  # in the cache: the preset 'local'


@tells
def measure(
    ranks: int = 2,
    *,
    servers: int = 1,
    emulate: str = "unshaped",
    seconds: float = 0.2,
    dtype: str = "float32",
    output: str | Path | None = None,
    notify: Notify = silent,
) -> Cluster:
    """Measure this machine with all ranks active; takes a minute or two.

    One server is also kept as the preset 'local'.

    Args:
        ranks: Ranks active at once, per server.
        servers: Servers; several are emulated on this machine, which needs root.
        emulate: The rate of an emulated server's NIC: 400Mbit/s.
        seconds: Spent on each of some hundred numbers.
        dtype: bfloat16: measure products and aggregation of such rows too, for `gnnplan plan
            --dtype bfloat16`. Without AVX-512 BF16 or AMX that takes a core minutes.
        output: A YAML file for the result.
        notify: Is told what is being done.

    Raises:
        SpecError: An argument is wrong.
        LostRank: A rank was lost.
    """
    from gnnplan.executor.measure.measure import measure as measured_by_ranks
    from gnnplan.planner.vocabulary.progress import notify as tell

    if output:
        must_be_writable(Path(output))
    found = measured_by_ranks(ranks, tell, servers, rate_of(emulate), seconds, dtype)
    keep(found, Path(output) if output else None, local=servers == 1)
    return found


def keep(cluster: Cluster, output: Path | None, local: bool) -> None:
    """Write a cluster file to `output`, and as the preset 'local' if it is this machine."""
    text = cluster.to_yaml()
    if local:
        write_atomically(cache_dir() / KEPT, text, parents=True)
    if output:
        write_atomically(output, text)
