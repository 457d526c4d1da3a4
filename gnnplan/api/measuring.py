"""`measure`: describe this machine, or servers emulated on it, as a Cluster."""

from __future__ import annotations

from pathlib import Path

from gnnplan.api.arguments import typed
from gnnplan.api.running import rate_of
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.vocabulary.files import cache_dir, must_be_writable, write_atomically
from gnnplan.planner.vocabulary.progress import Notify, reports_progress, silent

KEPT = "local.yaml"  # file of the preset 'local', in the cache


@reports_progress
@typed
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

    The result for one server is also kept as the preset 'local'.

    Args:
        ranks: Ranks per server; all of them are active at once.
        servers: Number of servers. More than one are emulated on this machine, which needs root.
        emulate: Rate of each emulated server's NIC, as 400Mbit/s, or unshaped (no limit).
        seconds: Seconds spent on each of about a hundred measurements.
        dtype: bfloat16 also measures matrix products and aggregation of bfloat16 rows, for `gnnplan
            plan --dtype bfloat16`. A CPU without AVX-512 BF16 or AMX needs minutes for them.
        output: YAML file to write the cluster to.
        notify: Called with progress messages.

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
    """Write the cluster to `output` if given, and as the preset 'local' if `local` is set."""
    text = cluster.to_yaml()
    if local:
        write_atomically(cache_dir() / KEPT, text, parents=True)
    if output:
        write_atomically(output, text)
