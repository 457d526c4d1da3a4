"""The closed forms: shapes, limits, order, and how they hang together. Printed numbers are in the
doctests."""

import inspect

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gnnplan.papers import formulas as f
from gnnplan.planner.ownership.estimated_layout import expected_halo_rows

FORMULAS = [
    g
    for name, g in vars(f).items()
    if inspect.isfunction(g) and g.__module__ == f.__name__ and not name.startswith("_")
]
COUNTS = {
    "vertices": 10**6,
    "edges": 10**8,
    "parts": 64,
    "ranks": 64,
    "stages": 64,
    "servers": 16,
    "gpus": 8,
    "layers": 128,
    "hidden": 1024,
    "features": 4096,
    "itemsize": 8,
    "chunks": 256,
    "tensors": 2,
    "parameters": 10**8,
    "halo_rows": 10**7,
    "rows": 10**7,
    "group_halo": 10**6,
    "own": 10**6,
    "inputs": 10**7,
    "ids": 10**7,
    "ways": 2,
    "copies": 4,
    "max_hop": 3,
    "fanout": 25,
    "factor": 10,
}
SHARES = {"edge_probability", "exponent", "kappa"}
PER_LAYER = {"widths"}  # a sequence, one entry per exchange

count = st.integers(1, 10**6)
small = st.integers(1, 64)
positive = st.floats(1e-3, 1e3)
share = st.floats(0, 1)


def values(formula, name):
    if name in PER_LAYER or (formula, name) in (
        (f.in_server_halo_bytes, "halo_rows"),
        (f.split_bytes, "remote_rows"),
    ):
        return None
    if name in COUNTS:
        return st.integers(1, COUNTS[name])
    return share if name in SHARES else positive


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda g: g.__name__)
@given(data=st.data())
def test_arrays_equal_a_loop_over_their_elements(formula, data):
    arguments, loose = {}, {}
    for i, name in enumerate(inspect.signature(formula).parameters):
        drawn, shape = values(formula, name), ((2, 1), (3,))[i % 2]
        if drawn is None:
            loose[name] = [7, 5, 3]
        else:
            arguments[name] = np.array(
                data.draw(st.lists(drawn, min_size=max(shape), max_size=max(shape)))
            ).reshape(shape)
    got = formula(**loose, **arguments)
    loop = np.broadcast(*arguments.values())
    expected = [
        formula(**loose, **dict(zip(arguments, (x.item() for x in element), strict=True)))
        for element in loop
    ]
    assert np.shape(got) == loop.shape
    np.testing.assert_allclose(np.ravel(got), expected, rtol=1e-12, atol=0)
    if (
        all(np.issubdtype(a.dtype, np.integer) for a in arguments.values())
        and "bytes" in formula.__name__
    ):
        assert np.ravel(got).tolist() == expected  # volumes are whole and exact


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda g: g.__name__)
def test_every_formula_is_documented(formula):
    text = formula.__doc__
    head = text.partition("\n\n")[0]
    assert "[" in head and "`" in head, "first line: what it gives, its unit, the equation"
    assert all(word in " ".join(text.split()) for word in ("Source: ", "Valid ", ">>>"))
    assert all(
        f"`{name}`" in text or "s as `" in text or "As `" in text
        for name in inspect.signature(formula).parameters
    )


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32, np.uint64])
def test_narrow_and_unsigned_integers_do_not_wrap(dtype):
    one, hundred = np.array([1], dtype), np.array([100], dtype)
    assert f.halo_bytes(np.array([10**9]), [dtype(100)] * 100).tolist() == [
        2 * 4 * 100 * 100 * 10**9
    ]
    assert f.pipeline_bytes(hundred, hundred, hundred).tolist() == [2 * 99 * 100 * 100 * 4]
    assert f.in_server_halo_bytes([hundred], [dtype(100)]).tolist() == [80_000]
    assert f.t_preload(hundred, hundred, one, one, 1.0, 1.0, 1.0).tolist() == [100.0]
    assert f.preload_threshold(one, hundred).tolist() == [0.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: f.worst_halo_rows(10, 0), r"worst_halo_rows: parts must be at least 1, got 0"),
        (
            lambda: f.expected_halo_rows(10, 2, 1.5),
            "edge_probability must be between 0 and 1, got 1.5",
        ),
        (
            lambda: f.expected_halo_rows(10, 2, float("nan")),
            "edge_probability must be between 0 and 1, got nan",
        ),
        (lambda: f.bubble_share(np.array([4, 0]), chunks=8), "stages must be at least 1"),
        (lambda: f.bubble_share(4, chunks=0), "chunks must be at least 1, got 0"),
        (
            lambda: f.t_previous(1, 1, 1, 1, compute=0, internal=1, external=1),
            "compute must be above 0, got 0",
        ),
        (lambda: f.pipegcn_epoch(-1.0, 1.0), "compute must be at least 0"),
        (lambda: f.in_server_halo_bytes([1, 2], [8]), "shorter"),
    ],
)
def test_outside_the_domain_is_an_error_that_names_argument_and_rule(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- graph parallel --------------------------------------------------------------------------------


@given(n=count, m=small, p=share)
def test_expected_halo_lies_between_nothing_and_the_worst_case(n, m, p):
    assert 0 <= f.expected_halo_rows(n, m, p) <= f.worst_halo_rows(n, m)
    assert f.expected_halo_rows(n, m, 1.0) == f.worst_halo_rows(n, m)
    assert f.expected_halo_rows(n, m, 0.0) == 0


@given(n=count, m=small, p=share, q=share)
def test_expected_halo_grows_with_density(n, m, p, q):
    assert f.expected_halo_rows(n, m, min(p, q)) <= f.expected_halo_rows(n, m, max(p, q))


@given(n=count, m=small, p=share)
def test_plans_expect_the_same_halo(n, m, p):
    assert expected_halo_rows(n, m, p) == float(f.expected_halo_rows(n, m, p))


def test_expected_halo_of_a_drawn_random_graph():
    n, m, p, rng = 2000, 8, 2e-3, np.random.default_rng(0)
    upper = np.triu(rng.random((n, n)) < p, 1)
    wanted = (upper | upper.T).reshape(n, m, n // m).any(axis=2)  # vertex x part
    wanted[np.arange(n), np.arange(n) * m // n] = False
    assert wanted.sum() == pytest.approx(f.expected_halo_rows(n, m, p), rel=0.03)


@given(n=count, w=count)
def test_one_rank_sends_nothing(n, w):
    assert (
        f.worst_halo_rows(n, 1)
        == f.expected_halo_rows(n, 1, 0.5)
        == f.ring_all_reduce_bytes(1, w)
        == f.pipeline_bytes(1, n, 8)
        == 0
    )
    assert f.halo_bytes(f.worst_halo_rows(n, 1), [8, 8]) == 0
    assert f.hybrid_bytes(1, n, 8, 4, 0, 1, w) == 0


@given(rows=count, layers=st.integers(1, 64), hidden=st.integers(1, 2048))
def test_gnnpipes_count_has_one_exchange_more(rows, layers, hidden):
    more = f.halo_bytes_gnnpipe(rows, layers, hidden) - f.halo_bytes(rows, [hidden] * (layers - 1))
    assert more == 2 * f.input_bytes(rows, hidden)


@given(rows=st.lists(count, min_size=1, max_size=5), data=st.data())
def test_halo_bytes_add_up_over_layers_and_parts(rows, data):
    widths = data.draw(st.lists(st.integers(1, 512), max_size=4))
    assert f.halo_bytes(sum(rows), widths) == sum(
        f.halo_bytes(r, [w]) for r in rows for w in widths
    )
    assert f.in_server_halo_bytes([sum(rows)] * len(widths), widths) == f.halo_bytes(
        sum(rows), widths
    )
    assert f.halo_bytes(sum(rows), widths, itemsize=8) == 2 * f.halo_bytes(sum(rows), widths)


def test_a_single_layer_exchanges_nothing_hidden_and_keeps_its_shape():
    assert f.halo_bytes(100, []) == f.in_server_halo_bytes([], []) == 0
    assert f.halo_bytes(np.array([1, 2]), []).tolist() == [0, 0]


# -- PipeGCN ---------------------------------------------------------------------------------------


@given(compute=positive, exchange=positive, reduce=positive, c=share, kappa=share)
def test_stale_is_bounded_by_its_parts_and_never_slower_than_fresh_without_contention(
    compute, exchange, reduce, c, kappa
):
    epoch = f.pipegcn_epoch(compute, exchange, reduce)
    assert max(compute, exchange) + reduce <= epoch <= compute + exchange + reduce
    assert (
        f.pipegcn_epoch(compute, exchange, reduce, 0.0, kappa)
        <= epoch
        <= f.pipegcn_epoch(compute, exchange, reduce, c)
    )
    assert f.pipegcn_epoch(compute, 0.0) == compute


# -- GNNPipe ---------------------------------------------------------------------------------------


@given(stages=small, chunks=st.integers(1, 256), work=positive)
def test_bubble_is_what_the_slots_leave_idle(stages, chunks, work):
    slots, bubble = f.pipeline_slots(stages, chunks), f.bubble_share(stages, chunks)
    assert 0 <= bubble < 1 and (bubble == 0) == (stages == 1)
    assert slots * (1 - bubble) == pytest.approx(chunks)
    assert f.pipeline_time(stages, chunks, work, 2 * work) * (1 - bubble) == pytest.approx(
        chunks * 3 * work
    )
    assert f.bubble_share(stages, chunks + 1) <= bubble <= f.bubble_share(stages + 1, chunks)


def test_slots_of_a_drawn_pipeline():
    stages, chunks, free = 3, 4, [0, 0, 0]
    for chunk in range(chunks):
        for stage in range(stages):
            free[stage] = max(free[stage], free[stage - 1] if stage else chunk) + 1
    assert free == [4, 5, 6] and free[-1] == f.pipeline_slots(stages, chunks)


@given(
    stages=small,
    n=count,
    hidden=st.integers(1, 1024),
    layers=small,
    w=count,
    tensors=st.integers(1, 2),
)
def test_groups_of_one_are_the_plain_pipeline(stages, n, hidden, layers, w, tensors):
    assert f.hybrid_bytes(stages, n, hidden, layers, 0, 1, w, tensors=tensors) == f.pipeline_bytes(
        stages, n, hidden, tensors=tensors
    )


@given(gpus=small, n=count, hidden=st.integers(1, 1024), layers=small, halo=count, w=count)
def test_one_group_is_graph_parallel_as_gnnpipe_counts_it(gpus, n, hidden, layers, halo, w):
    graph_parallel = f.halo_bytes_gnnpipe(halo, layers, hidden) + f.ring_all_reduce_bytes(gpus, w)
    assert f.hybrid_bytes(1, n, hidden, layers, halo, gpus, w) == graph_parallel


@given(m=st.integers(2, 64), n=count, hidden=st.integers(1, 1024), layers=small)
def test_the_pipeline_saves_a_factor_of_layers_over_the_worst_halo(m, n, hidden, layers):
    assert f.pipeline_bytes(m, n, hidden) * layers == f.halo_bytes_gnnpipe(
        f.worst_halo_rows(n, m), layers, hidden
    )


# -- GraNNDis --------------------------------------------------------------------------------------

testbed = {
    "servers": st.integers(1, 16),
    "gpus": st.integers(1, 8),
    "compute": positive,
    "internal": positive,
}


@given(
    v=count,
    degree=positive,
    servers=small,
    gpus=small,
    compute=positive,
    external=positive,
    growth=st.floats(1, 100),
)
def test_equation_7_is_equation_6_solved(v, degree, servers, gpus, compute, external, growth):
    # not a tie
    assume(
        abs(compute / external - f.preload_threshold(growth, degree))
        > 1e-9 * (compute / external + growth / degree)
    )
    difference = f.preload_difference(v, v * degree, servers, gpus, compute, external, growth)
    assert (difference < 0) == f.preload_wins(compute, external, growth, degree)


@given(v=count, e=count, gpus=small, compute=positive, external=positive, growth=st.floats(1, 100))
def test_equation_6_is_the_limit_of_4_minus_3(v, e, gpus, compute, external, growth):
    servers, internal = 10**9, np.inf
    exact = f.t_preload(v, e, servers, gpus, compute, internal, growth) - f.t_previous(
        v, e, servers, gpus, compute, internal, external
    )
    terms = v * growth / (servers * gpus * compute) + e / (servers * gpus * external)
    assert (
        abs(exact - f.preload_difference(v, e, servers, gpus, compute, external, growth))
        <= 1e-8 * terms
    )


@given(
    v=count, e=count, growth=st.floats(1, 16), more=st.floats(1, 4), external=positive, **testbed
)
def test_slower_where_there_is_more_to_do_and_faster_where_there_is_more_to_do_it_with(
    v, e, growth, more, external, servers, gpus, compute, internal
):
    def preload(scale=1.0, growth=growth):
        return f.t_preload(v, e, servers, gpus, compute * scale, internal * scale, growth)

    def previous(scale=1.0):
        return f.t_previous(v, e, servers, gpus, compute, internal, external * scale)

    ulp = 1 + 1e-12
    assert (
        preload() <= preload(growth=growth * more) * ulp
        and preload(more) <= preload() * ulp
        and previous(more) <= previous() * ulp
    )
    # Eq. 8's bracket is never the smaller
    assert f.t_sampling(v, e, servers, gpus, compute, internal, growth) >= preload() / ulp


@given(v=count, e=count, external=positive, **testbed)
def test_on_one_server_there_is_nothing_to_preload(
    v, e, external, servers, gpus, compute, internal
):
    growth = f.growth_measured(v, 0)
    assert growth == 1
    same = f.t_preload(v, e, 1, gpus, compute, internal, growth)
    assert same == pytest.approx(
        f.t_previous(v, e, 1, gpus, compute, internal, external), rel=1e-12
    )


@given(own=count, servers=small)
def test_the_measured_growth_ends_where_every_server_holds_the_graph(own, servers):
    assert f.growth_measured(own, f.worst_halo_rows(own, servers)) == servers


def test_ranges_as_printed():
    assert f.preload_in_range(np.array([1, 1.5, 16, 17]), 4, 4).tolist() == [
        False,
        True,
        True,
        False,
    ]
    assert f.sampling_in_range(np.array([1, 2, 5, 6]), 6, 4, 4).tolist() == [
        False,
        True,
        True,
        False,
    ]
    assert f.sampling_in_range(np.array([2, 5]), 6, 4, 4, factor=3).tolist() == [False, False]
    assert not f.sampling_in_range(2, 17, 4, 4)


@given(
    servers=small.filter(lambda s: s > 1), inputs=count, rows=count, features=st.integers(1, 1000)
)
def test_p3_sends_as_much_as_data_parallelism_where_it_breaks_even(servers, inputs, rows, features):
    hidden = f.p3_break_even(servers, inputs, rows, features)
    assume(hidden >= 1)
    assert f.p3_bytes(servers, rows, hidden) == pytest.approx(
        f.remote_feature_bytes(servers, inputs, features)
    )
    assert f.p3_bytes(servers, rows, 2 * hidden) > f.remote_feature_bytes(servers, inputs, features)


@given(rows=st.lists(count, min_size=1, max_size=4), width=small)
def test_a_split_sends_input_rows_once_and_others_there_and_back(rows, width):
    assert f.split_bytes(rows, [width] * len(rows)) == 4 * width * (rows[0] + 2 * sum(rows[1:]))
