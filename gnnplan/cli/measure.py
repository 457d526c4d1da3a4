"""`gnnplan measure`: a cluster file of this machine, of servers emulated on it, or of real ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gnnplan.cli.common import Json, app, emit, say
from gnnplan.cli.run import rate_of


@app.command()
def measure(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where the cluster file goes; also kept as preset 'local'.")] = None,
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Ranks active at once, per server.")] = 2,
    servers: Annotated[int, typer.Option(min=1, max=200, help="Servers; several are emulated on this machine.")] = 1,
    emulate: Annotated[str, typer.Option(metavar="RATE", help="What an emulated server's card moves: 400Mbit/s.")] = "unshaped",
    seconds: Annotated[float, typer.Option(min=0.01, max=60, help="Spent on each of some hundred numbers.")] = 0.25,
    as_json: Json = False,
) -> None:
    """Micro-benchmarks with all ranks active: the numbers that a plan uses, each with its provenance.

    Of this machine, of servers emulated on it (--servers 2 --emulate 400Mbit/s; needs root), or, started by torchrun or srun, of real ones.
    """
    import yaml

    from gnnplan.executor import launch
    from gnnplan.executor import measure as measuring
    from gnnplan.planner.files import cache_dir, must_be_writable, write_atomically

    if output:
        must_be_writable(output)
    rate = rate_of(emulate)
    if launch.started_by_launcher():
        first = os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0"
        cluster = measuring.measure_as_rank(say if first else lambda what: None, seconds)
        if cluster is None:  # rank 0 has it
            launch.leave(0)
    else:
        cluster = measuring.measure(ranks, say, servers, rate, seconds)
    text = yaml.safe_dump(cluster.model_dump(mode="json"), sort_keys=False)
    here = cluster.servers == 1
    if here:
        write_atomically(cache_dir() / "local.yaml", text, parents=True)
    if output:
        write_atomically(output, text)
    if as_json:
        emit(cluster.model_dump(mode="json"))
    else:
        print(text, end="")
    kept = [f"kept as preset 'local' in {cache_dir() / 'local.yaml'}"] * here + [f"written to {output}"] * bool(output)
    say(" and ".join(kept) or "kept nowhere; -o FILE writes it")
    if launch.started_by_launcher():
        launch.leave(0)
