"""What if the cluster were another? A plan of all GPUs is played in virtual time."""

import gnnplan

plan = gnnplan.plan("flickr", "p3_p100", model="sage", layers=2, hidden=64, per="epoch")
print(plan.best.strategy, "on", plan.cluster.name)

print(f"as it is:         {plan.simulate().epoch_s * 1e3:6.2f} ms per epoch")
slow = plan.simulate(overrides={"inter_node.bandwidth": "100MB/s"})
print(f"slower network:   {slow.epoch_s * 1e3:6.2f} ms")
straggler = plan.simulate(jitter=0.1, stragglers={0: 2.0}).document["noise"]
print(f"a slow first GPU: {straggler['p50_s'] * 1e3:6.2f} ms, in 95 % of epochs at most", end=" ")
print(f"{straggler['p95_s'] * 1e3:.2f} ms\n")

# at every point the best strategy is looked for anew
swept = plan.sweep({"servers": [1, 2, 4], "inter_node.bandwidth": ["1GB/s", "25GB/s"]})
print(swept)
for row in swept.rows:
    print(row["at"], "->", row["best"], f"{row['predicted_s'] * 1e3:.2f} ms")
