"""Where to train, and on how many GPUs: time and dollars of what may be rented."""

import csv

import gnnplan

OFFERS = ["l4_box?price=0.80", "dgx_a100?price=2.20", "p3_p100?price=1.10"]

found = gnnplan.offers("flickr", OFFERS, gpus=[1, 2, 4, 8], objective="cost", hidden=128)
print(found)
cluster, gpus = found.best
print(f"\ncheapest: {gpus} GPUs of {cluster}")

with open("offers.csv", "w", newline="") as file:
    fields = ["cluster", "gpus", "strategy", "epoch_s", "epoch_dollars"]
    table = csv.DictWriter(file, fields, extrasaction="ignore")
    table.writeheader()
    table.writerows(found.rows)

# what more speed costs: the cheapest of those that are no slower
for row in sorted(found.rows, key=lambda row: row["epoch_s"])[:3]:
    each = row["epoch_dollars"] * 1000
    print(f"{row['epoch_s'] * 1e3:7.2f} ms, ${each:.3f} for 1,000 epochs: {row['cluster']}")
