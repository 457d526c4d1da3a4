"""The optimizers' functions against torch's classes, which a process of ours does not make."""

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from gnnplan.executor.ranks.learner import Optimizer
from gnnplan.planner.gnn.workload import Workload


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_torch_gets_no_weights_by_column_which_it_would_copy(kind):
    class Seen(TorchDispatchMode):
        by_row: bool | None = None

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if "fused" in str(operation):
                self.by_row = all(t.is_contiguous() for tensors in args[:4] for t in tensors)
            return operation(*args, **kwargs or {})

    weight = torch.nn.Parameter(torch.randn(40, 30).t())
    optimizer = Optimizer([weight], Workload(optimizer=kind))
    weight.grad = torch.randn_like(weight)
    with Seen() as seen:
        optimizer.step()
    assert seen.by_row


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("schedule", ["constant", "step", "cosine"])
def test_learning_rates_are_those_of_torch(schedule, warmup):
    epochs = 15
    how = Workload(lr=0.3, warmup=warmup, schedule=schedule, step_size=3, gamma=0.5, epochs=epochs)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    later = {
        "constant": lambda: LinearLR(optimizer, 1.0, 1.0),
        "step": lambda: StepLR(optimizer, 3, 0.5),
        "cosine": lambda: CosineAnnealingLR(optimizer, epochs - warmup),
    }[schedule]()
    if warmup:
        rises = LinearLR(optimizer, 1 / warmup, 1.0, total_iters=max(warmup - 1, 1))
        later = SequentialLR(optimizer, [rises, later], [warmup])
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its parts as torch advises against
        for _ in range(epochs):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            later.step()
    assert [how.lr_of(epoch) for epoch in range(epochs)] == pytest.approx(rates, rel=1e-12)
    assert how.varies_lr == (len({round(rate, 12) for rate in rates}) > 1)


def test_a_step_does_not_import_the_compiler(tmp_path, fork_server):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch; from gnnplan.executor.ranks.learner import Optimizer; "
        "from gnnplan.planner.gnn.workload import Workload; "
        "p = torch.zeros(2, requires_grad=True); p.grad = torch.ones(2); "
        "[Optimizer([p], Workload(optimizer=kind)).step() for kind in ('adam', 'adamw', 'sgd')];"
        " sys.exit('torch._dynamo' in sys.modules)"
    )
    (ended,) = fork_server.run([([str(program)], {})], tmp_path)
    assert ended.code == 0, ended.stderr
