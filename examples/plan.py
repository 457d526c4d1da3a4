"""Which strategy for Reddit on two servers of A100s, and why? Needs no GPU: statistics do."""

import gnnplan

plan = gnnplan.plan("reddit", "dgx_a100", model="gcn", layers=4, hidden=128, per="epoch")
print(plan)  # what to use, how sure that is, what it costs, what was close

best = plan.best
print(f"\n{best.strategy}: {best.epoch_s * 1e3:.1f} ms per epoch on {best.gpus} GPUs")
for reason in plan.document["explanation"][:3]:
    print("-", reason)

# lossy strategies change the gradient; one is recommended only where it is surely faster
exact, fastest = (
    min((one for one in plan.answers if one.exact or lossy), key=lambda one: one.epoch_s)
    for lossy in (False, True)
)
print(f"\nexact gradients cost {exact.epoch_s / fastest.epoch_s - 1:.0%} over {fastest.strategy}")

plan.write("plan.json")  # `gnnplan simulate plan.json` and `gnnplan run plan.json` take it
