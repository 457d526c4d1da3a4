"""The optimizers' functions against torch's classes, which a process of ours does not make."""

from pathlib import Path

import pytest
import torch
from ranks import ForkServer

from gnnplan.executor.ranks.optimizer import SGD, Adam


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("ours", "theirs"), [(SGD, torch.optim.SGD), (Adam, torch.optim.Adam)])
def test_steps_are_those_of_torch(ours: type, theirs: type, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape, dtype=dtype) for shape in ((3, 4), (5,))]
    mine, other = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    steps = ours(mine, 0.1), theirs(other, lr=0.1, **({"fused": True} if ours is Adam else {}))
    for _ in range(5):
        for p, q in zip(mine, other, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in steps:
            optimizer.step()
    for p, q in zip(mine, other, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_a_step_does_not_import_the_compiler(tmp_path: Path, fork_server: ForkServer) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch; from gnnplan.executor.ranks.optimizer import Adam; "
        "p = torch.zeros(2, requires_grad=True); p.grad = torch.ones(2); "
        "Adam([p], 0.1).step(); sys.exit('torch._dynamo' in sys.modules)"
    )
    process = fork_server.start([str(program)], {}, tmp_path / "stderr")
    try:
        assert process.ended(60)[0] == 0, (tmp_path / "stderr").read_text()
    finally:
        process.close()
