"""gnnplan: plan, simulate and run distributed training of a graph neural network.

    import gnnplan

    plan = gnnplan.plan("graph.npz", "dgx_a100", model="gcn", layers=4, hidden=128)
    plan                                        # the strategy, its certainty and its cost
    plan.best.strategy, plan.table, plan.explain()
    plan.simulate(overrides={"inter_node.bandwidth": "10GB/s"})
    plan.sweep({"servers": [1, 2, 4]})
    run = plan.run(epochs=50)                   # on this machine's GPUs or cores
    run.validate()                              # predicted, simulated and measured times

Every name listed in this file is public; names in other modules may move. Every error that a user
can mend is a GnnplanError with the message that the command line prints.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnplan.api.planning import Plan as Plan
    from gnnplan.api.planning import load_plan as load_plan
    from gnnplan.api.planning import plan as plan
    from gnnplan.api.running import Check as Check
    from gnnplan.api.running import Preflight as Preflight
    from gnnplan.api.running import Run as Run
    from gnnplan.api.running import check as check
    from gnnplan.api.running import measure as measure
    from gnnplan.api.scaling import Offers as Offers
    from gnnplan.api.scaling import Scale as Scale
    from gnnplan.api.scaling import offers as offers
    from gnnplan.api.scaling import scale as scale
    from gnnplan.api.simulation import Simulation as Simulation
    from gnnplan.api.simulation import Sweep as Sweep
    from gnnplan.api.tuning import Tuned as Tuned
    from gnnplan.api.tuning import tune as tune
    from gnnplan.api.validation import Validation as Validation
    from gnnplan.api.validation import Validations as Validations
    from gnnplan.api.validation import validate as validate
    from gnnplan.planner.cluster.spec import Cluster as Cluster
    from gnnplan.planner.decision.plan import Answer as Answer
    from gnnplan.planner.gnn.workload import Workload as Workload
    from gnnplan.planner.graph.formats import convert as convert
    from gnnplan.planner.vocabulary.errors import GnnplanError as GnnplanError
    from gnnplan.planner.vocabulary.errors import Infeasible as Infeasible
    from gnnplan.planner.vocabulary.errors import LostRank as LostRank
    from gnnplan.planner.vocabulary.errors import Mismatch as Mismatch
    from gnnplan.planner.vocabulary.errors import SpecError as SpecError
    from gnnplan.planner.vocabulary.progress import progress as progress

__version__ = "0.2.0.dev0"

# public name -> its module, read from the imports above; a module is imported when its name is
# first used, so that `import gnnplan` is quick
_LISTED = r"^    from (gnnplan\.\S+) import (\w+) as"
_HOMES = {name: home for home, name in re.findall(_LISTED, Path(__file__).read_text(), re.M)}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gnnplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
