"""How wrong was the prediction? Train with two strategies, then compare with what was predicted."""

import gnnplan

GRAPH = "synthetic:community?vertices=2000&edges=40000&features=32&classes=4&seed=0"

if __name__ == "__main__":  # ranks are processes of their own
    plan = gnnplan.plan(GRAPH, ranks=2, layers=2, hidden=32)  # on `local`: see gnnplan.measure
    runs = [one.run(epochs=8) for one in (plan, plan.choose("NEXT"))]
    one = runs[0].validate()
    print(one)
    assert one.ok, "bytes and order of operations are as predicted, whatever the machine"
    print(f"\nits epoch was predicted {one.error:+.0%} off\n")
    print(gnnplan.validate(runs))  # errors by operation, and whether the ranking was right
