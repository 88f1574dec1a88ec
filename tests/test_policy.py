import json
import math

import numpy as np
import pytest

from truedraw import calibrate, profile
from truedraw.errors import InvalidParameter
from truedraw.policy import (
    LOSS_SHARE,
    MOST_CREDIT,
    PLAIN_EVERY,
    PROBE_SHARE,
    SHARED_LOSS,
    START_LOSS,
    Controller,
    FixedLength,
    Ledger,
    PassCosts,
)
from truedraw.profile import CostPoint, Profile
from truedraw.protocols import Forecast, PointProposal, SequenceState, StepTiming
from truedraw.runners.toy import ToyRunner, hashed

Q8 = {1: 8, 2: 16, 4: 23, 8: 29, 16: 44, 32: 76}  # milliseconds, DESIGN.md 5
BF16 = {1: 10, 2: 15, 4: 19, 8: 24, 16: 35, 32: 58}


def curve(milliseconds, key="test"):
    return Profile(tuple(CostPoint(size, 0, 1, ms / 1000) for size, ms in milliseconds.items()), {"file": key})


def state(sequence=0, **counts):
    defaults = {"length": 50, "num_emitted": 10, "num_left": 100, "rule": "coupled", "proposed": 0, "accepted": 0}
    return SequenceState(sequence, **{**defaults, **counts})


def proposal(survival, sequence=0):
    return PointProposal(state(sequence), tuple(range(len(survival))), tuple(survival))


def rates(milliseconds, survival):
    """Tokens per second of every length, by hand."""
    table = np.interp(np.arange(33), list(milliseconds), list(milliseconds.values()))
    return [(1 + sum(survival[:k])) / table[1 + k] for k in range(32)]


# ---------------------------------------------------------------- the whole curve


def test_q8_with_long_survival_drafts_where_one_step_look_ahead_stops_at_none():
    """ALGORITHMS 2.4: q8_0 with S_k = .97^k: the rule that adds drafts while each pays gives 1.00x, the
    best length 2.34x. The controller finds it within a few steps of learning its own rate."""
    survival = [0.97 ** (i + 1) for i in range(31)]
    policy = Controller(curve(Q8))
    best = int(np.argmax(rates(Q8, survival)))
    for _ in range(200):
        (k,) = policy.cut([proposal(survival)])
        seconds = policy.costs.table(32, 0, 1)[1 + k]
        policy.observe(timing(1 + k, seconds, emitted=1 + sum(survival[:k])))
    assert rates(Q8, survival)[k] / rates(Q8, survival)[0] > 2.25 and abs(k - best) <= 8


def timing(size, seconds, emitted, states=None, draft=0.0):
    return StepTiming(size, draft, seconds, 0.0, states or (state(),), (size - 1,), (emitted - 1,))


def test_nothing_is_drafted_where_nothing_pays():
    for milliseconds in (Q8, BF16):
        assert Controller(curve(milliseconds)).cut([proposal([0.2, 0.05, 0.01])]) == [0]
    steep = {size: 10 * size for size in (1, 2, 4, 8, 16, 32)}
    assert Controller(curve(steep)).cut([proposal([0.9] * 8)]) == [0]


def test_flat_costs_draft_everything():
    assert Controller(curve(dict.fromkeys((1, 2, 4, 8, 16, 32), 10))).cut([proposal([0.5**i for i in range(1, 9)])]) == [8]


def test_a_batch_shares_one_pass_and_the_better_drafts_go_first():
    policy = Controller(curve(BF16))
    good, bad = [0.95**i for i in range(1, 16)], [0.3**i for i in range(1, 16)]
    lengths = policy.cut([proposal(good, 0), proposal(bad, 1)])
    assert lengths[0] > 5 and lengths[1] <= 1
    assert policy.cut([]) == [] and policy.cut([proposal([], 0)]) == [0]


def test_every_batch_is_cut_at_the_best_number_of_drafts_for_all():
    """Against all pairs of lengths, at the plain rate."""
    generator = np.random.default_rng(0)
    table = np.interp(np.arange(64), list(BF16), list(BF16.values())) / 1000
    for _ in range(40):
        each = [np.cumprod(generator.uniform(0.3, 1.0, size=6)) for _ in range(2)]
        chosen = Controller(curve(BF16)).cut([proposal(each[0], 0), proposal(each[1], 1)])

        def value(k, each=each):
            return sum(each[i][: k[i]].sum() for i in range(2)) - (2 / table[2]) * (table[2 + sum(k)] - table[2])

        assert value(chosen) == pytest.approx(max(value((a, b)) for a in range(7) for b in range(7)), abs=1e-12)


# ---------------------------------------------------------------- learning


def test_costs_follow_the_passes_that_were_made():
    costs = PassCosts(curve(Q8))
    for _ in range(100):
        costs.observe(8, 50, 1, 0.058)  # twice what the profile says
    table = costs.table(32, 50, 1)
    assert table[8] == pytest.approx(0.058, rel=0.01) and table[1] == pytest.approx(0.016, rel=0.01)
    for _ in range(100):
        costs.observe(1, 50, 1, 0.008)
    assert costs.table(32, 50, 1)[1] == pytest.approx(0.008, rel=0.01)
    before = costs.table(32, 50, 1)[8]
    costs.observe(8, 50, 1, 5.0)  # one pass beside another program
    assert costs.table(32, 50, 1)[8] < 1.05 * before


def drafted(policy, sequence, lengths, accepted, times=100, draft=0.0, seconds=0.019):
    for _ in range(times):
        told = tuple((1.0, float(d < accepted)) for d in range(min(accepted + 1, lengths)))
        policy.observe(StepTiming(1 + lengths, draft, seconds, 0.0, (state(sequence),), (lengths,), (accepted,), (told,)))


def test_drawn_drafts_are_chosen_by_the_acceptance_seen():
    policy = Controller(curve(BF16), blind={""})
    drafted(policy, 0, 4, 4)
    assert policy.limits([state(0)])[0] >= 3
    policy = Controller(curve(BF16), blind={""})
    drafted(policy, 1, 4, 0)
    policy.limits([state(1)])  # the first probe
    drafted(policy, 1, 1, 0, times=1)
    assert policy.limits([state(1)]) == [0]


def test_a_sequence_that_was_refused_is_probed_at_the_stated_share_of_the_time():
    policy = Controller(curve(BF16), blind={""})
    drafted(policy, 0, 1, 0)
    policy.ledger = Ledger()
    spent = probed = 0.0
    for _ in range(3000):
        (k,) = policy.limits([state(0)])
        assert k <= 1
        seconds = 0.015 if k else 0.010
        drafted(policy, 0, k, 0, times=1, seconds=seconds)
        spent, probed = spent + seconds, probed + k * 0.005
    assert 0.5 * PROBE_SHARE < probed / spent < 1.1 * PROBE_SHARE


def test_point_masses_nobody_can_judge_are_learned_from_and_then_left_alone():
    """The random drafter, request after request: one draft, then none but the probes."""
    policy = Controller(curve(Q8))
    total = 0
    for number in range(4):
        for _ in range(100):
            seen = state(number)
            (limit,) = policy.limits([seen])
            (k,) = policy.cut([PointProposal(seen, tuple(range(limit)))]) if limit else (0,)
            policy.observe(StepTiming(1 + k, 0.0, 0.008 * (1 + k), 0.0, (seen,), (k,), (0,), (((1.0, 0.0),) * k,)))
            total += k
    assert 1 <= total <= 400 * PROBE_SHARE + 3


def test_drafting_time_counts():
    policy = Controller(curve(BF16), blind={""})
    drafted(policy, 0, 3, 3)
    free = policy.limits([state()])[0]
    drafted(policy, 0, 3, 3, times=50, draft=0.060)
    assert policy.limits([state()])[0] < free


def test_what_a_forecast_is_worth_is_the_best_length_of_the_whole_curve():
    survival = tuple(0.9**i for i in range(1, 16))
    table = np.interp(np.arange(33), list(BF16), list(BF16.values())) / 1000
    for seconds, start in ((0.0, 0.0), (0.001, 0.0), (0.0, 0.02), (0.004, 0.01)):
        policy = Controller(curve(BF16))
        policy.limits([state()])
        policy._probe_seconds, policy.ledger.steps = 0.0, math.inf
        values = [sum(survival[:k]) - (table[1 + k] - table[1] + seconds * k + start * (k > 0)) / table[1] for k in range(16)]
        told = policy.worth(state(), Forecast(survival, seconds, start))
        assert told.length == int(np.argmax(values)) and told.gain == pytest.approx(max(values))


def test_behind_drafts_that_are_drawn_only_what_is_to_come_is_judged():
    """Those that are drawn stay, however poor; a further one has to pay for itself, and none is a probe."""
    policy = Controller(curve(BF16))
    policy.limits([state()])
    policy._probe_seconds, policy.ledger.steps = 1.0, 10.0
    good, poor = (0.9, 0.8, 0.7), (0.1, 0.05, 0.02)
    assert policy.worth(state(), Forecast(good, 0.0005, drawn=1)).length == 3
    assert policy.worth(state(), Forecast(poor, 0.0005, drawn=1)) == (1, 0.0)
    assert policy.worth(state(), Forecast((*good, *poor), 0.0005, drawn=3)).length == 3
    assert policy.worth(state(), Forecast((0.9, 0.05, 0.02), 0.0005, drawn=2)).length == 2
    assert policy._probing is None
    policy.ledger.steps = 0.2
    assert policy.worth(state(), Forecast(good, 0.0005, drawn=1)).length == 1, "beyond what the ledger covers"


def test_a_profile_of_a_slower_hour_does_not_keep_drafting_for_ever():
    """Plain passes are twice as fast as the profile says, and none would be seen where every step drafts."""
    policy = Controller(curve({1: 20, 2: 20.5, 4: 21, 8: 22}))
    survival, lengths = (0.4, 0.2, 0.1), []
    for step in range(600):  # sizes are learned one after the other
        batch = [state()]
        length = policy.worth(batch[0], Forecast(survival, 0.0005)).length if policy.limits(batch)[0] else 0
        lengths.append(length)
        seconds = 0.010 if length == 0 else 0.020 + 0.0003 * length
        policy.observe(
            StepTiming(1 + length, 0.0005 * length, seconds, 0.0, (batch[0],), (length,), (int(length > 0 and step % 10 < 6),))
        )
    assert min(lengths[:PLAIN_EVERY]) > 0
    assert lengths[-100:].count(0) >= 98, "probes aside"


def test_where_drafts_win_much_no_step_is_plain():
    policy = Controller(curve({1: 20, 2: 20.5, 4: 21, 8: 22}))
    for _ in range(3 * PLAIN_EVERY):
        assert policy.limits([state()])[0] > 0
        policy.observe(StepTiming(4, 0.0, 0.021, 0.0, (state(),), (3,), (2,)))


def test_a_costly_start_is_no_probe():
    """A prompt that the draft model has not read is not read for one draft's sake."""
    policy = Controller(curve(BF16))
    policy.observe(timing(1, 0.01, 1))
    policy._probe_seconds = 0.1
    policy.ledger.steps = 4.0
    poor = (0.1, 0.01)
    policy.limits([state()])
    assert policy.worth(state(), Forecast(poor, 0.001, 0.2)).length == 0
    assert policy.worth(state(), Forecast(poor, 0.001, 0.05)).length == 0, "nor beyond what the ledger covers"
    policy.ledger.steps = 10.0
    assert policy.worth(state(), Forecast(poor, 0.001, 0.05)).length == 1
    assert policy.worth(state(1), Forecast(poor, 0.001)).length == 0  # one sequence probes in a step
    assert policy.worth(state(), Forecast(poor)).length == 0  # what is scored for nothing needs no probe


@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_in_a_batch_what_the_others_draft_is_expected_to_be_what_they_drafted(drafts):
    survival = tuple(0.8**i for i in range(1, 16))
    batch = tuple(state(i) for i in range(4))
    policy = Controller(curve(BF16))
    for _ in range(60):
        policy.observe(StepTiming(4, 0.0, 0.019, 0.0, batch, (drafts,) * 4, (0,) * 4, ((),) * 4))
    policy.limits(batch)
    policy.ledger.steps, policy.ledger._each = math.inf, dict.fromkeys(range(4), math.inf)
    table = policy.costs.table(40, 50, 4)
    others = 4 + 3 * drafts
    values = [sum(survival[:k]) - 4 / table[4] * (table[others + k] - table[others]) for k in range(16)]
    assert policy.worth(batch[0], Forecast(survival)) == (int(np.argmax(values)), pytest.approx(max(values)))


# ---------------------------------------------------------------- what wrong estimates can cost


def lying(policy, milliseconds, accepted, steps, sequences=1):
    """Steps of a drafter whose 12 drafts are always said to survive; yields (plain steps emitted, taken)."""
    table = np.interp(np.arange(200), list(milliseconds), list(milliseconds.values())) / 1000
    batch = tuple(state(i) for i in range(sequences))
    for _ in range(steps):
        policy.limits(batch)
        lengths = policy.cut([PointProposal(each, tuple(range(12)), (0.99,) * 12) for each in batch])
        right = tuple(min(accepted, length) for length in lengths)
        size = sequences + sum(lengths)
        policy.observe(StepTiming(size, 0.0, float(table[size]), 0.0, batch, tuple(lengths), right, ((),) * sequences))
        yield 1 + sum(right) / sequences, float(table[size] / table[sequences])


@pytest.mark.parametrize("milliseconds", [Q8, BF16])
@pytest.mark.parametrize("sequences", [1, 4])
def test_estimates_that_are_never_right_cost_a_hundredth_and_four_steps(milliseconds, sequences):
    policy = Controller(curve(milliseconds))
    plain = taken = 0.0
    for emitted, cost in lying(policy, milliseconds, 0, 3000, sequences):
        plain, taken = plain + emitted, taken + cost
        assert taken <= (plain + START_LOSS) / (1 - LOSS_SHARE) + 1e-9
    assert taken > plain + START_LOSS  # the estimates did lie


def test_steps_without_anything_to_draft_give_no_credit():
    policy = Controller(curve(Q8))
    for _ in range(500):
        policy.limits([state()])
        policy.observe(StepTiming(1, 0.0001, 0.008, 0.0, (state(),), (0,), (0,), ((),)))
    assert policy.ledger.steps == START_LOSS


def test_a_pass_that_took_longer_than_the_curve_says_is_booked_as_it_was_up_to_half_as_much_again():
    lost = []
    for seconds in (0.029, 0.036, 0.29):
        policy = Controller(curve(Q8))
        policy.limits([state()])
        policy.cut([proposal([0.9] * 7)])
        policy.observe(StepTiming(8, 0.0, seconds, 0.0, (state(),), (7,), (0,), ((),)))
        lost.append(START_LOSS - policy.ledger.steps)
    assert lost[0] < lost[1] < lost[2] < 2 * lost[0]


def test_after_winnings_no_more_than_the_credit_is_lost():
    policy = Controller(curve(Q8))
    assert sum(e for e, _ in lying(policy, Q8, 12, 300)) > 1.5 * 300
    plain = taken = 0.0
    for emitted, cost in lying(policy, Q8, 0, 2000):
        plain, taken = plain + emitted, taken + cost
        assert taken <= (plain + MOST_CREDIT) / (1 - LOSS_SHARE) + 1e-9
    assert taken > plain + 0.5 * MOST_CREDIT


def test_no_sequence_of_a_batch_pays_for_the_drafts_of_another():
    """One of four is always right and one never drafts: the time of each is bounded by its own account."""
    policy = Controller(curve(BF16))
    table = np.interp(np.arange(200), list(BF16), list(BF16.values())) / 1000
    batch = tuple(state(i) for i in range(4))
    emitted, taken, accepted = np.zeros(4), 0.0, 0
    for _ in range(2000):
        policy.limits(batch)
        lengths = [*policy.cut([PointProposal(batch[i], tuple(range(12)), (0.99,) * 12) for i in range(3)]), 0]
        right = (lengths[0], 0, 0, 0)
        size = 4 + sum(lengths)
        policy.observe(StepTiming(size, 0.0, float(table[size]), 0.0, batch, tuple(lengths), right, ((),) * 4))
        emitted, taken, accepted = emitted + 1 + np.array(right), taken + table[size] / table[4], accepted + right[0]
        assert all(taken <= (emitted + SHARED_LOSS) / (1 - LOSS_SHARE) + 1e-9)
    assert accepted > 20  # the share of time is used


# ---------------------------------------------------------------- profiles


def test_curves_are_interpolated_by_size_and_cached_length():
    points = [CostPoint(1, 0, 1, 0.01), CostPoint(4, 0, 1, 0.04), CostPoint(1, 100, 1, 0.02), CostPoint(4, 100, 1, 0.05)]
    costs = Profile(tuple(points), {})
    assert costs.curve(0).table(6).tolist() == pytest.approx([0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06])
    assert costs.curve(50).table(1)[1] == pytest.approx(0.015) and costs.curve(1000).table(4)[4] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "points",
    [(), (CostPoint(2, 0, 1, 0.1),), (CostPoint(1, 0, 1, 0.0),), (CostPoint(1, 0, 1, math.nan),), (CostPoint(1, -1, 1, 1.0),)],
)
def test_profiles_that_are_none_are_refused(points):
    with pytest.raises(InvalidParameter, match="profile"):
        Profile(points, {})


def test_a_stored_profile_comes_back(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = curve(Q8)
    assert profile.load(kept.key) == (None, None)
    profile.store(kept)
    assert profile.load(kept.key) == (kept, None)
    assert profile.load({"file": "other"}) == (None, None)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 1}', '{"format": 0, "key": {"file": "test"}, "points": []}',
                '{"format": 1, "key": {"file": "test"}, "points": [{"size": 1}]}', "\x00"]
)  # fmt: skip
def test_a_damaged_or_stale_profile_is_told_in_one_line(tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile.store(curve(Q8))
    (path,) = profile.folder().iterdir()
    path.write_text(content)
    known, notice = profile.load(curve(Q8).key)
    assert known is None and "measuring again" in notice and "\n" not in notice


def test_a_profile_of_another_version_or_key_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile.store(curve(Q8))
    (path,) = profile.folder().iterdir()
    kept = json.loads(path.read_text())
    for change in ({"format": profile.FORMAT + 1}, {"key": {"file": "other"}}):
        path.write_text(json.dumps({**kept, **change}))
        known, notice = profile.load(curve(Q8).key)
        assert known is None and "another version or machine" in notice


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    profile.store(curve(Q8))
    assert profile.load(curve(Q8).key)[0] is None


def test_the_quick_profile_measures_sizes_behind_two_lengths_and_leaves_the_slot_empty():
    runner = ToyRunner(hashed(9), 9, max_length=1024)
    now = iter(np.cumsum(np.full(10_000, 0.01)))
    told = calibrate.quick(runner, clock=lambda: float(next(now)))
    assert {point.size for point in told.points} == set(calibrate.QUICK_SIZES) and {point.cached for point in told.points} == {
        16,
        512,
    }
    assert all(point.seconds == pytest.approx(0.01) for point in told.points)
    assert runner._cells == [[]]
    small = calibrate.quick(ToyRunner(hashed(9), 9, max_length=20))
    assert {point.cached for point in small.points} == {0} and max(point.size for point in small.points) <= 20


def test_fixed_lengths():
    assert FixedLength(3).limits([state(), state(1)]) == [3, 3]
    assert json.dumps(FixedLength(0).cut([proposal([0.5])])) == "[1]"
