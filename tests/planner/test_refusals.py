"""What strategies refuse: the rule that is broken, its numbers, and what to use instead."""

import re
from itertools import pairwise

import numpy as np
import pytest

from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.laws import GRAPHS, cluster, problem_of

# servers x GPUs (of each server the islands' sizes) and fields of the workload | strategy | what the
# message says
REFUSED = r"""
2x1 layers=3 | gnnpipe(stages=6) | a layer per stage \(layers: 3, stages: 6\); use stages <= 3
2x1 layers=3 | gnnpipe(stages=3) | every stage equally many ranks \(stages: 3, ranks: 2\); use stages in \{1, 2\} or --ranks 3
2x1 layers=3 | gnnpipe(layers_per_stage=(3, 0)) | gives each of 2 stages a layer or more, 3 in all, not \(3, 0\)
2x1 layers=3 | gnnpipe(layers_per_stage=(1, 1)) | 3 in all, not \(1, 1\)
2x1 layers=3 | gnnpipe(layers_per_stage=(1, 1, 1)) | each of 2 stages .* not \(1, 1, 1\); leave it out
2x1 layers=3 | gnnpipe(stages=0) | stages is a number of stages, 1 or more, not 0; leave it out
2x1 layers=3 | gnnpipe(chunks=25) | a vertex per chunk \(vertices: 24, chunks: 25\); use fewer chunks
2x1 layers=3 | gnnpipe(chunks=0) | chunks is a number of chunks, 1 to 100,000, not 0; leave it out
2x1 layers=3 | gnnpipe(period=0) | period is the paper's alpha .*, 1 or more, not 0; use period=23
2x1 layers=3 | graph_parallel(staleness=2) | staleness is .*\(0: exact, 1: PipeGCN\), 0 to 1, not 2; use staleness=0
2x1 layers=3 | graph_parallel(smoothing='f') | only stale rows are smoothed; use staleness=1
2x1 layers=3 | pipegcn(smoothing='x') | pipegcn: smoothing is '' \(none\), 'f' .*not 'x'; use smoothing=''
2x1 layers=3 | pipegcn_gf(gamma=1) | gamma lies in \[0, 1\) .*not 1; use 0.95
2x1 layers=3 | pipegcn(gamma=0.3) | smoothing is off .gamma: 0.3.; use pipegcn_gf.gamma=0.3.
2x1 layers=3 | pipegcn_g(gamma=-0.1) | gamma lies in \[0, 1\) .*not -0.1
2x1 layers=3 | graph_parallel(bits=1) | 8, 4 or 2, 'adaptive', or None .* \(bits: 1\); use bits=2
2x1 layers=3 | bns(bits='adaptive') | only graph_parallel and pipegcn .* use bits=4, or graph_parallel\(bits=
2x1 layers=3 | granndis(bits=16) | \(bits: 16\); use bits=2
2x1 layers=3 | feature_parallel(order='narrow') | 'alternating' .*, not 'narrow'; use order='coupled'
2x1 layers=3 | tensor3d(x=3) | x \* y \* z = 2 ranks, each at least 1 \(x: 3\); .* use tensor3d\(x=
2x1 layers=3 | tensor3d(x=2,y=2,z=0) | \(x: 2, y: 2, z: 0\)
2x1 layers=3 | pipegcn_gf(bits=4) | smoothing: 'gf', bits: 4\); use pipegcn\(bits=4\) or pipegcn_gf
2x1 layers=3 | granndis(depth=4) | depth lies between 0 \(plain halo\) and the layers \(3, full preload\), not 4
2x1 layers=3 | granndis(max_hop=0) | max_hop is a number of hops, 1 to 10,000, not 0; leave it out
2x1 layers=3 | granndis(fanout=0) | fanout is a number of neighbours, 1 or more, not 0; leave it out
2x1 layers=3 | granndis(batches=0) | batches is a number of batches, 1 to 10,000, not 0; use batches=1
2x1 layers=3 | granndis(max_hop=1,depth=1) | no hidden row may cross servers \(depth: 1, layers: 3\); leave depth out
2x1 layers=3 | granndis(batches=2,depth=1) | fetched for a server as a whole, so no hidden row .*; leave depth out
2x1 layers=3 | granndis(batches=99) | a training vertex per batch on every server \(fewest .*: \d+, batches: 99\); use batches=\d+ or less
2x1 layers=3 | granndis(degrees='part') | degrees is 'global' .* or 'local' .*, not 'part'; use degrees='global'
2x1 layers=3 | granndis(degrees='local') | use degrees='local' with max_hop and fanout
5x5 layers=3 | graph_parallel | a vertex per rank \(vertices: 24, ranks: 25\); use fewer ranks
5x5 layers=3 | granndis | a vertex per rank \(vertices: 24, ranks: 25\); use fewer ranks
5x5 layers=3 | feature_parallel | a vertex per rank \(vertices: 24, ranks: 25\); use fewer ranks
2x2 | gsplit(splitter='rand') | splitter is 'gsplit' .*'node' .*'edge' .* or 'random' .*, not 'rand'; use splitter='random'
2x2 | p3(copies=3,over='server') | each copy of the columns is over equally many servers \(copies: 3, servers: 2\); use one of 1, 2
2x2 | p3(copies=0,over='rank') | over equally many ranks \(copies: 0, ranks: 4\); use one of 1, 2, 4
2x2 | gsplit(group='host') | group is 'server' .* or 'all' .*, not 'host'; use group='server'
2x2 | gsplit(presample=0) | presample is a number of epochs, .*, 1 to 1,000, not 0; use presample=10
2x2 | gsplit(imbalance=0) | an owner may have beyond it, 0.001 to 10, not 0; use imbalance=0.03
2x2 | gsplit(imbalance=11) | may have beyond it, 0.001 to 10, not 11
2x2 | gsplit(prefetch=-1) | prefetch is a number of batches, .*, 0 to 1,024, not -1
2x2 | data_parallel(prefetch=1025) | prefetch is a number .*, 0 to 1,024, not 1025; use prefetch=0
2x2 batch=100000 | data_parallel | at most the training vertices \(batch: 100,000, training vertices: \d+\); use --batch
2x2 batch=3 | data_parallel | a batch has a seed for every rank \(batch: 3, ranks: 4\); use --batch 4 or more
2x2 mode=full | data_parallel | data_parallel trains on mini-batches, and the workload asks for mode full; use --mode mini
1x3 | gsplit(split='last') | split is 'all' .*, 'first' .*dnp.*, not 'last'; use split='all'
1x3 layers=1 fanout=3, | dnp | hands its rows to layer 2 .layers: 1.; use gsplit
1x3 model=gcnii | dnp | gcnii reads an encoder's output; use gsplit
1x3 | dnp(narrow=True) | cannot multiply before the.* use narrow=False
1x3 | dnp(features='spread') | features: spread\); use features='everywhere', or gsplit
1x3 | dnp(structure='spread') | structure: spread\); use structure='everywhere'
1x3 layers=1 fanout=3, | snp | snp splits layer 1 and .* use gsplit
1x3 | snp(narrow=True) | cannot multiply before the.* use narrow=False
1x3 | snp(structure='spread') | snp's ranks read lists of each other's vertices
1x3 model=gat heads=2 | snp | of gat weighs an edge .*attention.; use dnp
1x3 model=gin | snp | gin is no plain sum \(those of gcn, sage, sgc are\); use dnp
2x2 | data_parallel(cache=-1) | data_parallel: cache is a number of bytes per GPU, 0 or more, not -1; use cache=0
2x2 | gsplit(cache=2000000000000) | the device's memory \(cache: 2.00 TB, device.memory: 1.00 TB\); use cache='500GB' or less
2x2 | gsplit(hot='degrees') | hot is 'frequency' .* or 'degree' .*, not 'degrees'; use hot='degree'
2x2 | data_parallel(features='everwhere') | features is .*, not 'everwhere'; use features='everywhere'
2x2 | data_parallel(shared_cache=True) | needs a cache to share \(shared_cache: True, cache: 0\); use cache=
2x2 | gsplit(shared_cache=True) | gsplit has no knob 'shared_cache'
2x2 | p3(over='rank',cache=-1) | p3: cache is a number of bytes per GPU, 0 or more, not -1
2x2 | data_parallel(structure='spred') | structure is .*, not 'spred'; use structure='spread'
2x2 | p3(structure='everwhere') | p3: structure is .*, not 'everwhere'; use structure='everywhere'
2x2 | gsplit(structure='hashed') | gsplit: structure is 'everywhere' .* or 'spread' .*, not 'hashed'; use
2x2 | data_parallel(structure='spread',structure_cache=-1) | structure_cache is a number of bytes per server, 0 or more, not -1; use structure_cache=0
2x2 | p3(structure_cache=2000) | \(structure_cache: 2,000, structure: everywhere\); use structure='spread', or structure_cache=0
2x2 | gsplit(structure_cache=2000) | gsplit has no knob 'structure_cache'
1x4 layers=3 | bns(p=1.5) | p is the share of halo rows that is sent, 0 to 1, not 1.5; use p=0.1
1x4 model=gat | bns | layer 1 of gat has a softmax; use graph_parallel
1x4 mode=mini batch=8 | bns | trains on the full graph
1x4 model=resgcn norm=batch layers=4 | gnnpipe | gnnpipe: .* batch norm .*use norm=layer
1x4 model=gcn norm=layer layers=4 | gnnpipe(historical_gradients=True) | historical_gradients .*; use .*without norm
1x4 model=resgcn norm=none layers=4 | gnnpipe(historical_gradients=True) | historical_gradients .* ReLU
2x2 layers=3 | graph_parallel(buckets=0) | graph_parallel: buckets .* \(buckets: 0, layers: 3\); use
2x2 layers=3 | graph_parallel(buckets=4) | graph_parallel: buckets .* \(buckets: 4, layers: 3\); use
2x2 layers=3 | granndis(buckets=4) | granndis: buckets .* \(buckets: 4, layers: 3\); use
1x4(2,2) layers=4 | granndis(group='switch') | group is 'server' .* or 'island' .*, not 'switch'; use group='server'
1x3(2,1) layers=4 | granndis(group='island') | equally large \(GPUs used of an island of cluster .*: 1, 2\); use group='server'
1x4(2,2) layers=4 | granndis(depth=1,max_hop=1,group='island') | leaves an island rows .* may cross islands \(depth: 1, layers: 4\)
1x4(2,2) layers=4 | granndis(depth=1,batches=2,group='island') | fetched for an island as a whole, so no hidden row may cross islands
1x4(2,2) layers=4 | granndis(batches=9999,group='island') | vertex per batch on every island \(fewest on one: \d+, batches: 9999\)
2x4 layers=4 | granndis(group='island') | names none \(GPUs per server: 4\); use group='server', or give it islands and island
2x2 layers=3 | bns(buckets=4) | bns: buckets .* \(buckets: 4, layers: 3\); use
1x1 model=gcnii | offload | the encoder's rows .* \(model: gcnii\)
1x1 | offload(chunks=0) | \[1, 24\].*\(chunks: 0, ranks: 1\); use chunks=1,
1x1 mode=mini | offload | trains on the full graph
1x4 mode=mini batch=8 | feature_parallel | trains on the full graph
1x4 mode=mini batch=8 | tensor3d | trains on the full graph
2x1 layers=3 dtype=bfloat16 | tensor3d | tensor3d has no rows in bfloat16 .* use graph_parallel, pipegcn,
2x1 dtype=bfloat16 | p3 | p3 has no rows in bfloat16 .* use data_parallel, gsplit, dnp or snp
2x1 layers=3 dtype=bfloat16 | graph_parallel(bits=4) | bits quantizes unrounded rows only
2x1 layers=3 dtype=bfloat16 | pipegcn_gf | too few for a moving average
1x4 model=gat mode=full | feature_parallel | layer 1 of gat has attention \(heads: 4\).*; use
1x4 model=resgcn mode=full | feature_parallel | layer 1 of resgcn has messages of its own.*; use
1x4 model=gat mode=full | tensor3d | those of gcn and sage, and gat has attention.*; use
1x4 model=gin mode=full | tensor3d | gin has layers of another kind.*; use
1x4 norm=layer mode=full | tensor3d | layer 2 has a norm \(layer\), of numbers that lie on.*; use
2x2 mode=mini batch=500 task=link | data_parallel(structure='spread') | from all edges.*structure='everywhere'
"""
MINI = {"mode": "mini", "batch": 16, "layers": 3, "fanout": (4, 3, 2)}


def value(text: str) -> object:
    """A field's, as `layers=3`, `fanout=3,3` and `model=gat` have it."""
    if text.replace(",", "").isdigit():
        numbers = tuple(int(number) for number in text.split(",") if number)
        return numbers if "," in text else numbers[0]
    return text


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_refusal_has_the_rule_its_numbers_and_a_remedy(row):
    where, name, words = row.split(" | ")
    size, *more = where.split()
    servers, gpus, *islands = map(int, re.findall(r"\d+", size))
    there = cluster(servers, gpus)
    if islands:
        ends = np.cumsum([0, *islands]).tolist()
        lists = tuple(tuple(range(*pair)) for pair in pairwise(ends))
        there = there.model_copy(update={"islands": lists, "island": there.intra_node})
    fields = {field: value(text) for field, _, text in (one.partition("=") for one in more)}
    with pytest.raises(SpecError, match=words):
        strategy = parse(name)
        if strategy.mode == "mini":
            fields = MINI | fields
        asked = problem_of(GRAPHS[0 if "mode" in fields else 3], there, **fields)
        strategy.settle(asked).check(asked)
