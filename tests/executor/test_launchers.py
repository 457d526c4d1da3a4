"""Launch files for torchrun, Slurm and Kubernetes: what they hold, and that they train and resume. How
launchers and runs of torchrun end, and what a killed process leaves."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from calls import call, ended_well, free_port, planned

from gnnplan.api.running import Run
from gnnplan.cli.files import FILES
from gnnplan.executor.emit.launch import Launch, kubernetes, slurm, torchrun
from gnnplan.executor.launch.launcher import scratch, unwound_by_signals
from gnnplan.planner.decision.plan import read
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.simulator.replay import replay

GRAPH = "synthetic:community?vertices=300&edges=2400&features=8&classes=4&seed=0"


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


SERVERS = """\
servers: 2
gpus_per_server: {each}
device: {{kind: {kind}, memory: 24GB, gemm: 10TFLOP/s, memory_bandwidth: 500GB/s}}
intra_node: {{bandwidth: 10GB/s, latency: 5us}}
inter_node: {{bandwidth: 1GB/s, latency: 20us}}
"""
Plan = Callable[..., Path]
# What these tests need of srun: a process per task, with Slurm's variables.
SRUN = """#!/usr/bin/env bash
shift  # --kill-on-bad-exit
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task SLURM_STEP_NUM_TASKS=2 \\
        SLURM_NTASKS_PER_NODE=1 "$@" &
done
wait -n && wait -n
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A graph in a file, whose name a shell would take apart."""
    rng, n = np.random.default_rng(0), 60
    path = tmp_path_factory.mktemp("my data") / "it's $HOME.npz"
    np.savez(
        path,
        src=rng.integers(0, n, 300),
        dst=rng.integers(0, n, 300),
        x=rng.standard_normal((n, 8)).astype("f4"),
        y=rng.integers(0, 3, n),
        train_mask=np.ones(n, bool),
        val_mask=np.ones(n, bool),
    )
    return path


@pytest.fixture(scope="module")
def plan(graph):
    """plan(words of `gnnplan plan`) -> a plan beside the graph."""

    def make(*words: object) -> Path:
        how = ("--hidden 8 --layers 2", *words)
        return planned(graph.parent / "plan.json", "--graph", graph, *how)

    return make


def two_servers(plan: Plan, folder: Path, kind: str, each: int) -> Path:
    cluster = folder / "cluster.yaml"
    cluster.write_text(SERVERS.format(kind=kind, each=each))
    return plan("--cluster", cluster, "--ranks", 2 * each, "--strategy", "graph_parallel")


def with_commands(folder: Path, **scripts: str) -> dict[str, str]:
    """The environment, with its torchrun and python, and these commands before them."""
    for name, script in scripts.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}


def must_be_as_planned(run: Path, path: Path, place: int) -> None:
    """Two epochs of a candidate of the plan, with the bytes that the plan says."""
    document = read(path)
    candidate = [document["best"], *document["alternatives"]][place]
    left = Run(run).document
    assert left["epochs"] == 2 and left["bytes"] == candidate["predicted"]["bytes"]
    assert read(run / "plan.json")["best"]["strategy"] == candidate["strategy"]
    assert replay(run).run.comparison["bytes"]["equal"]


@pytest.mark.processes
def test_scripts_are_bash_and_name_every_file(plan, graph, tmp_path):
    path = two_servers(plan, tmp_path, "cuda", 2)
    launch = Launch.of(path, read(path))
    assert (launch.servers, launch.ranks, launch.gpus) == (2, 2, 2)
    for text in (torchrun(launch), slurm(launch)):
        comments = [line for line in text.splitlines() if line.startswith("# ")]
        assert any(str(graph) in line for line in comments)
        assert any(str(path) in line for line in comments)
        assert not ended_well("bash", "-n", input=text).stderr
        says = text.split("\nexport")[0] + '\nprintf "%s" "$plan"'
        assert ended_well("bash", "-c", says, env={"SLURM_JOB_ID": "7"}).stdout == str(path)
    asked = [line for line in slurm(launch).splitlines() if line.startswith("#SBATCH")]
    for option in ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"):
        assert f"#SBATCH {option}" in asked


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_manifest_is_what_kubernetes_takes(plan, graph, tmp_path, kind):
    validator = pytest.importorskip("kubernetes_validate")
    path = two_servers(plan, tmp_path, kind, 2)
    text = kubernetes(Launch.of(path, read(path)), read(path), "registry/gnnplan:1")
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        validator.validate(document, validator.latest_version(), strict=True)
    config, service, job = documents
    assert json.loads(config["data"]["plan.json"]) == read(path)
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/gnnplan:1"
    units: dict[str, Any] = {"cuda": {"limits": {"nvidia.com/gpu": 2}}}
    assert container["resources"] == units.get(kind, {"requests": {"cpu": 2}})
    assert str(graph.parent) in [mount["mountPath"] for mount in container["volumeMounts"]]
    with pytest.raises(validator.ValidationError):  # the schema is not empty
        job["spec"]["completions"] = "two"
        validator.validate(job, validator.latest_version(), strict=True)


def test_what_cannot_be_launched(plan, tmp_path):
    path = two_servers(plan, tmp_path, "cuda", 2)
    document = read(path)
    document["best"]["placement"] = document["best"]["placement"][:3]
    with pytest.raises(SpecError, match="servers have"):
        Launch.of(path, document)
    document = read(path)
    document["graph"]["known"] = False
    with pytest.raises(SpecError, match="known by statistics only"):
        Launch.of(path, document)
    document = read(path)
    document["explanation"] = ["x" * 2_000_000]
    with pytest.raises(SpecError, match="a ConfigMap holds"):
        kubernetes(Launch.of(path, document), document, None)


@pytest.mark.parametrize("target", FILES)
def test_the_verb_writes_what_it_prints(plan, tmp_path, target, capsys):
    path, out = two_servers(plan, tmp_path, "cpu", 1), tmp_path / "file"
    capsys.readouterr()
    call("emit", path, "--for", target)
    printed = capsys.readouterr().out
    call("emit", path, "--for", target, "-o", out)
    assert out.read_text() == printed and printed.startswith("#")
    assert f"written to {out}; next: " in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("write", [torchrun, slurm])
def test_a_script_trains_on_two_servers(plan, tmp_path, write):
    """Slurm itself is not here: srun is a few lines that start a process per task."""
    path = two_servers(plan, tmp_path, "cpu", 1)
    nodes = "#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.2\\n'\n"
    env = with_commands(
        tmp_path, script=write(Launch.of(path, read(path))), srun=SRUN, scontrol=nodes
    )
    env |= {"SLURM_JOB_ID": "9518", "SLURM_JOB_NODELIST": "one,two"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    begun = [
        subprocess.Popen(
            ["bash", "script", "--epochs", "2", *(["--out", "runs/a"] * (write is torchrun))],
            cwd=tmp_path,
            env=env | {"NODE_RANK": node},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in ("01" if write is torchrun else "0")
    ]
    try:
        for process in begun:
            _, said = process.communicate(timeout=100)
            assert process.returncode == 0, said
    finally:
        for process in begun:
            process.kill()
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("-9518") or write is torchrun
    must_be_as_planned(run, path, 0)


@pytest.mark.processes
@pytest.mark.parametrize("target", FILES)
def test_a_launch_file_resumes_a_run(plan, tmp_path, target):
    """It named --out before, which --resume refuses: a job that met its time limit was stuck."""
    path = two_servers(plan, tmp_path, "cpu", 1)
    document = read(path)
    launch = Launch.of(path, document)
    if target == "kubernetes":
        job = list(yaml.safe_load_all(kubernetes(launch, document, None)))[-1]
        (container,) = job["spec"]["template"]["spec"]["containers"]
        program, *more = container["command"][1:]
        words = [program, *more, *container["args"]]
    else:
        (tmp_path / "job.sh").write_text({"slurm": slurm, "torchrun": torchrun}[target](launch))
        words = [str(tmp_path / "job.sh")]
    says, node = '#!/bin/sh\necho "$@"\n', "#!/bin/sh\necho here\n"
    env = with_commands(tmp_path, srun=says, torchrun=says, scontrol=node)
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "NODE_RANK": "0", "MASTER_ADDR": "n"}
    env |= {"JOB_COMPLETION_INDEX": "0"}

    def started(*options: str) -> str:
        return ended_well("bash", *words, *options, env=env).stdout

    out = "/runs/" if target == "kubernetes" else " runs/"
    assert f"--out {out.strip()}" in started("--epochs", "9")
    assert started("--epochs", "9").endswith(" --epochs 9\n")
    assert started("--resume", "runs/a").endswith(" gnnplan run --resume runs/a\n")
