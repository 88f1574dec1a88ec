"""The rules on tensors against the reference: the same noise, the same verdict. `truedraw prove` asks more of them."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from truedraw import kernels, sampling  # noqa: E402
from truedraw.errors import RowError  # noqa: E402
from truedraw.randomness import Noise, Purpose  # noqa: E402
from truedraw.sampling import draw_draft  # noqa: E402
from truedraw.types import DenseRows, PointMass, Proposal, SparseRows, probabilities  # noqa: E402
from truedraw.verify import block, coupled, token  # noqa: E402
from truedraw.verify import torch as tensors  # noqa: E402
from truedraw.verify import torch_sampling as draws  # noqa: E402

RULES = {"token": token.verify, "block": block.verify, "coupled": coupled.verify}


def law(generator, vocab, dtype=np.float64):
    weights = generator.exponential(size=vocab) ** 3
    weights[generator.random(vocab) < 0.3] = 0
    weights[generator.integers(vocab)] += 0.1
    return probabilities((weights / weights.sum()).astype(dtype), "row")


def sequences(seed, vocab, lengths, point=False, dtype=np.float64):
    """Proposals, target rows and noises: drafts from rows that are equal to the target's, like them, or others."""
    generator = np.random.default_rng(seed)
    proposals, rows, noises = [], [], []
    for b, k in enumerate(lengths):
        noise = Noise(seed * 1000 + b).at(int(generator.integers(100)))
        p = [law(generator, vocab, dtype) for _ in range(k + 1)]
        q = []
        for i in range(k):
            mixed = p[i] if generator.random() < 0.2 else 0.3 * law(generator, vocab) + 0.7 * p[i]
            q.append(probabilities((mixed / mixed.sum()).astype(dtype), "row"))
        drafts = tuple(draw_draft(row, noise, i, coupled=b % 2 == 1) for i, row in enumerate(q))
        proposals.append(Proposal(drafts, PointMass() if point else DenseRows(tuple(q))))
        rows.append(p)
        noises.append(noise)
    return proposals, rows, noises


def run(rule, batch, noises, lengths):
    vocab = batch.p.shape[1]
    if rule == "coupled":
        return tensors.verify_coupled(batch, tensors.races_of(noises, [k + 1 for k in lengths], vocab))
    verify = {"token": tensors.verify_token, "block": tensors.verify_block}[rule]
    return verify(batch, tensors.uniforms_of(noises, batch), tensors.races_of(noises, [1] * len(noises), vocab))


def told(verdicts):
    columns = (verdicts.num_accepted, verdicts.next_token, verdicts.origin, verdicts.status)
    return [(a, y, tensors.ORIGINS[o], s) for a, y, o, s in zip(*(c.tolist() for c in columns), strict=True)]


def expected(rule, proposals, rows, noises):
    done = [RULES[rule](*each) for each in zip(proposals, rows, noises, strict=True)]
    return [(v.num_accepted, v.next_token, v.origin, 0) for v in done]


# ---------------------------------------------------------------- the same verdicts


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 3, 17, 63, 64, 65, 128, 200, 64 * 64 + 70]),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_ragged_batches_give_the_verdicts_of_the_reference(rule, seed, vocab, lengths, point, single):
    proposals, rows, noises = sequences(seed, vocab, lengths, point, np.float32 if single else np.float64)
    batch = tensors.pack(proposals, rows)
    if single:  # the same numbers, held in float32
        batch = replace(batch, p=batch.p.float(), q=None if batch.q is None else batch.q.float())
    assert told(run(rule, batch, noises, lengths)) == expected(rule, proposals, rows, noises)


@pytest.mark.parametrize("rule", RULES)
def test_every_branch_is_met(rule):
    lengths = [i % 5 for i in range(200)]
    proposals, rows, noises = sequences(1, 65, lengths)
    answers = told(run(rule, tensors.pack(proposals, rows), noises, lengths))
    assert {origin for _, _, origin, _ in answers} == {"residual", "bonus", "plain"}
    assert {accepted for accepted, *_ in answers} == {0, 1, 2, 3, 4}
    assert answers == expected(rule, proposals, rows, noises)


def test_sums_and_scans_have_the_bits_of_the_reference():
    generator = np.random.default_rng(3)
    for width in (1, 8, 64, 65, 700, 5000, 49152):
        rows = generator.exponential(size=(3, width)) ** 4
        assert np.array_equal(draws._block_sums(torch.from_numpy(rows)).numpy(), [kernels.block_sums(row) for row in rows])
        assert draws.row_totals(torch.from_numpy(rows)).tolist() == [kernels.total(kernels.block_sums(row)) for row in rows]
        for some in (rows, rows[:1]):
            assert np.array_equal(draws._cumulative(torch.from_numpy(some)).numpy(), np.cumsum(some, axis=1))


def test_the_inverse_cdf_at_its_edges():
    """Both sides of every edge of rows with zeros: never a token without mass."""
    generator = np.random.default_rng(4)
    for vocab in (5, 64, 130):
        row = law(generator, vocab)
        edges = np.cumsum(row) / row.sum()
        near = [v for e in edges for v in (np.nextafter(e, 0), e, np.nextafter(e, 2))]
        us = np.array([u for u in [0.0, *near, 1 - 2.0**-53] if u < 1])
        drawn = draws.inverse_cdf(torch.tensor(row).expand(len(us), -1), torch.from_numpy(us))
        assert drawn.tolist() == [sampling.inverse_cdf(row, u) for u in us]
        assert (row[drawn.numpy()] > 0).all()


def test_scans_that_round_differently_never_draw_a_token_without_mass(monkeypatch):
    """A device whose cumulative sums are off by some ulp, and not even monotonic."""
    exact = draws._cumulative
    generator = torch.Generator().manual_seed(5)

    def rough(weights):
        sums = exact(weights)
        return sums * (1 + torch.randint(-4, 5, sums.shape, generator=generator).double() * 2.0**-52)

    monkeypatch.setattr(draws, "_cumulative", rough)
    for vocab in (60, 300):
        weights = law(np.random.default_rng(6), vocab).copy()
        weights[-3:] = 0.0
        row = torch.tensor(weights / weights.sum())
        edges = exact(row[None])[0].clamp(0, 1 - 2.0**-53).repeat(20)
        us = torch.cat([torch.rand(2000, dtype=torch.float64, generator=generator), edges])
        drawn = draws.inverse_cdf(row.expand(len(us), -1), us)
        assert (row[drawn] > 0).all()
        assert (drawn != torch.tensor([sampling.inverse_cdf(row.numpy(), u) for u in us.tolist()]))[:2000].sum() == 0


def test_races_at_their_ties():
    """Noise that makes two tokens arrive within one ulp of each other."""
    row = law(np.random.default_rng(7), 130)
    alive = np.flatnonzero(row)
    for nudge in (np.nextafter(1, 0), 1.0, np.nextafter(1, 2)):
        blocks, tokens = kernels.block_sums(row) * 2, np.where(row > 0, row, 1.0)
        tokens[alive[::2]] *= nudge
        blocks[1] *= nudge

        class Tied:
            def __init__(self, blocks, tokens):
                self.blocks = lambda count: blocks[:count]
                self.tokens = lambda first, count: tokens[first : first + count]

        noise = draws.RaceNoise(torch.from_numpy(blocks)[None], torch.from_numpy(tokens)[None])
        assert draws.race_draw(torch.tensor(row)[None], noise).tolist() == [sampling.race(row, Tied(blocks, tokens))]


def test_race_noise_for_one_block_alone():
    """(rows, 64) noises stand for those of whichever block wins: the law, by 40,000 draws of a fixed seed (G-test at
    1e-3; a block whose noise is the next one's would leave it, a TV of 2 % would be seen)."""
    from truedraw.prove.goodness import g_test

    row, n = law(np.random.default_rng(8), 150), 40_000
    generator = torch.Generator().manual_seed(9)
    uniforms = torch.rand(n, 3 + 64, dtype=torch.float64, generator=generator)
    exponentials = -torch.log1p(-uniforms) + 2.0**-60
    noise = draws.RaceNoise(exponentials[:, :3], exponentials[:, 3:])
    counts = torch.bincount(draws.race_draw(torch.tensor(row).expand(n, -1), noise), minlength=150).numpy()
    assert g_test(counts, row).p_value > 1e-3


# ---------------------------------------------------------------- what is not drawn


def test_empty_sequences_without_race_noise_draw_from_p():
    proposals, rows, noises = sequences(10, 65, [0, 2, 0])
    batch = tensors.pack(proposals, rows)
    answers = told(tensors.verify_token(batch, tensors.uniforms_of(noises, batch)))
    for b in (0, 2):
        assert answers[b] == (0, sampling.inverse_cdf(rows[b][0], noises[b].uniform(Purpose.BONUS, 0)), "plain", 0)


@pytest.mark.parametrize("point", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_ids_outside_the_vocabulary_and_draft_vocabularies_of_other_sizes(rule, point):
    generator = np.random.default_rng(11)
    noises = [Noise(3).at(b) for b in range(3)]
    rows = [[law(generator, 6) for _ in range(3)] for _ in range(3)]
    proposals = []
    for drafts in ((7, 1), (2, -1) if point else (2, 8), (0, 1)):
        ids = np.array([*range(5), 7, 8])
        q = SparseRows((ids, ids), (np.full(7, 1 / 7), np.full(7, 1 / 7)))
        proposals.append(Proposal(drafts, PointMass() if point else q))
    answers = told(run(rule, tensors.pack(proposals, rows), noises, [2, 2, 2]))
    assert answers == expected(rule, proposals, rows, noises)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("token", "neighbour"), [(-1, 0), (-5, 0), (6, 5), (9, 5)])
def test_an_id_outside_is_rejected_though_the_nearest_token_is_certain(rule, token, neighbour):
    row = np.eye(6)[neighbour]
    noises = [Noise(seed).at(0) for seed in range(20)]
    proposals = [Proposal((token,), PointMass())] * len(noises)
    answers = told(run(rule, tensors.pack(proposals, [[row, row]] * len(noises)), noises, [1] * len(noises)))
    assert {answer[:2] for answer in answers} == {(0, neighbour)}


@pytest.mark.parametrize("rule", RULES)
def test_an_id_below_zero_beside_a_draft_that_was_drawn(rule):
    row = np.array([0.5, 0.5, 0.0])
    proposals = [Proposal((-1,), PointMass()), Proposal((0,), DenseRows((np.array([0.9, 0.1, 0.0]),)))]
    noises = [Noise(seed).at(0) for seed in (1, 2)]
    answers = told(run(rule, tensors.pack(proposals, [[row, row]] * 2), noises, [1, 1]))
    assert answers == expected(rule, proposals, [[row, row]] * 2, noises)


def test_a_draft_vocabulary_that_is_smaller():
    generator = np.random.default_rng(12)
    noises = [Noise(seed).at(0) for seed in range(40)]
    rows = [[law(generator, 6) for _ in range(2)] for _ in noises]
    small = [law(generator, 4) for _ in noises]
    proposals = [
        Proposal((draw_draft(q, noise, 0, coupled=False),), DenseRows((q,))) for q, noise in zip(small, noises, strict=True)
    ]
    batch = replace(tensors.pack(proposals, rows), q=torch.from_numpy(np.array(small)))
    for rule in ("token", "block"):
        assert told(run(rule, batch, noises, [1] * 40)) == expected(rule, proposals, rows, noises)


# ---------------------------------------------------------------- broken rows


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fault", [np.nan, -0.5, np.inf, -np.inf, "zero", "logits", "below zero"])
@pytest.mark.parametrize(("where", "status"), [("p0", 1), ("p2", 3), ("q1", -2)])
def test_a_broken_row_is_named_and_its_neighbours_are_not_touched(rule, fault, where, status):
    lengths = [2, 3, 1, 0]
    proposals, rows, noises = sequences(13, 65, lengths)
    sound = expected(rule, proposals, rows, noises)
    batch = tensors.pack(proposals, rows)
    row = {"p0": batch.p[3], "p2": batch.p[5], "q1": batch.q[3]}[where]  # of the sequence in the middle
    if fault == "zero":
        row[:] = 0
    elif fault == "logits":
        row *= 1.01
    elif fault == "below zero":  # and a sum of 1
        low, high = int(row.argmin()), int(row.argmax())
        row[low] -= 0.25
        row[high] += 0.25
    else:
        row[int(row.argmin())] = fault
    answers = told(run(rule, batch, noises, lengths))
    assert answers[1] == (0, -1, "broken", status)
    assert answers[:1] + answers[2:] == sound[:1] + sound[2:]
    broken = row.numpy().copy()
    with pytest.raises(RowError):
        probabilities(broken, "row")


def test_rows_a_little_off_are_laws_as_for_the_reference():
    proposals, rows, noises = sequences(14, 65, [2, 1])
    for factor, fine in ((1.0009, True), (1.0011, False), (0.9991, True), (0.9989, False)):
        batch = tensors.pack(proposals, rows)
        batch.p[1] *= factor
        assert told(run("token", batch, noises, [2, 1]))[0][3] == (0 if fine else 2)


def test_a_draft_that_its_own_row_cannot_have_drawn():
    proposals, rows, noises = sequences(15, 65, [2, 1])
    batch = tensors.pack(proposals, rows)
    batch.drafts[1] = int((batch.q[1] == 0).nonzero()[0])
    for rule in RULES:
        assert [status for *_, status in told(run(rule, batch, noises, [2, 1]))] == [-2, 0]


@pytest.mark.parametrize("lengths", [[1, 1], [2, 2], [-1, 4], [4, -1]])
def test_lengths_that_do_not_add_up(lengths):
    proposals, rows, noises = sequences(16, 5, [2, 1])
    batch = tensors.pack(proposals, rows)
    wrong = replace(batch, num_drafts=torch.tensor(lengths))
    noise = tensors.uniforms_of(noises, batch)
    for verify in (tensors.verify_token, tensors.verify_block):
        assert [answer[1:] for answer in told(verify(wrong, noise))] == [(-1, "broken", tensors.MISPACKED)] * 2


def test_shapes_that_do_not_fit():
    batch = tensors.pack(*sequences(17, 5, [2, 1])[:2])
    with pytest.raises(RowError, match=r"p has shape \(4, 5\): 5 rows are needed, for 3 drafts and one more for each of 2"):
        replace(batch, p=batch.p[:4])
    with pytest.raises(RowError, match=r"q has shape \(2, 5\): 3 rows are needed"):
        replace(batch, q=batch.q[:2])


# ---------------------------------------------------------------- nothing waits


class NoWaiting(TorchDispatchMode):
    """Raises where the host would have to know what a tensor holds, or a tensor changes its device."""

    BANNED = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select", "unique", "repeat_interleave")

    def __init__(self):
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.num_ops += 1
        name = func.name().split("::")[1].split(".")[0]
        if name in self.BANNED or (name in ("_to_copy", "copy_") and kwargs.get("device") is not None):
            raise RuntimeError(f"{name} waits for the device")
        if name in ("index", "index_put") and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise RuntimeError("a mask as an index waits for the device")
        return func(*args, **kwargs)


def inputs(point=False, lengths=(3, 0, 2, 1), vocab=130):
    proposals, rows, noises = sequences(18, vocab, list(lengths), point)
    batch = tensors.pack(proposals, rows)
    races = [tensors.races_of(noises, counts, vocab) for counts in ([1] * len(lengths), [k + 1 for k in lengths])]
    return batch, tensors.uniforms_of(noises, batch), *races


def run_all(batch, uniforms, first, every):
    return [
        tensors.verify_token(batch, uniforms, first),
        tensors.verify_token(batch, uniforms),
        tensors.verify_block(batch, uniforms, first),
        tensors.verify_coupled(batch, every),
    ]


@pytest.mark.parametrize("point", [False, True])
def test_nothing_waits_for_the_device(point):
    given = inputs(point)
    with NoWaiting() as mode:
        run_all(*given)
    assert mode.num_ops > 100
    for waits in (lambda t: t.item(), lambda t: t[t > 0], lambda t: bool((t > 0).any()), lambda t: t.to(device="meta")):
        with NoWaiting(), pytest.raises(RuntimeError, match="waits for the device"):
            waits(torch.ones(1))


def moved(value, convert):
    """A frozen dataclass with its tensors converted."""
    fields = {name: getattr(value, name) for name in value.__slots__}
    return replace(value, **{n: convert(t) for n, t in fields.items() if isinstance(t, torch.Tensor)})


@pytest.mark.parametrize("point", [False, True])
def test_shapes_are_known_without_any_value(point):
    """Tensors without data: on the meta device, and as fakes, which raise where a value would have to be known."""
    given = inputs(point)
    for verdicts in run_all(*(moved(value, lambda t: t.to("meta")) for value in given)):
        assert all(getattr(verdicts, name).shape == (4,) for name in verdicts.__slots__)
    with FakeTensorMode() as fakes:
        for verdicts in run_all(*(moved(value, fakes.from_tensor) for value in given)):
            assert all(getattr(verdicts, name).shape == (4,) for name in verdicts.__slots__)
        with pytest.raises(DataDependentOutputException):
            fakes.from_tensor(given[0].num_drafts).sum().item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_device_is_never_waited_for_and_answers_as_the_cpu():
    lengths = [i % 6 for i in range(64)]
    given = inputs(False, lengths, 64 * 64 + 70)
    there = [moved(value, lambda t: t.cuda()) for value in given]
    with contextlib.ExitStack() as stack:
        torch.cuda.set_sync_debug_mode("error")
        stack.callback(torch.cuda.set_sync_debug_mode, "default")
        answers = run_all(*there)
    assert [told(verdicts) for verdicts in answers] == [told(verdicts) for verdicts in run_all(*given)]
