import numpy as np
import pytest

from truedraw.randomness import Key, Noise, Purpose, philox


def test_a_key_is_a_stream_and_any_part_of_it_can_be_read():
    key = Key(7, 1, Purpose.RACE_TOKEN, 1000)
    whole = philox(key, 0, 200)
    for first, count in ((0, 1), (1, 3), (64, 64), (127, 70)):
        np.testing.assert_array_equal(philox(key, first, count), whole[first : first + count])


def test_every_part_of_the_key_counts():
    base = Key(7, 0, Purpose.DRAFT, 5, 2)
    others = [
        Key(8, 0, Purpose.DRAFT, 5, 2),
        Key(7 + 2**64, 0, Purpose.DRAFT, 5, 2),
        Key(7, 1, Purpose.DRAFT, 5, 2),
        Key(7, 0, Purpose.DRAFT, 6, 2),
        Key(7, 0, Purpose.DRAFT, 5, 3),
        *(Key(7, 0, purpose, 5, 2) for purpose in Purpose if purpose != Purpose.DRAFT),
    ]
    streams = [tuple(philox(key, 0, 8)) for key in (base, *others)]
    assert len(set(streams)) == len(streams)


def test_streams_of_neighbouring_keys_do_not_overlap():
    seen = np.concatenate([philox(Key(1, 0, Purpose.RACE_TOKEN, position), 0, 1000) for position in range(20)])
    assert len(np.unique(seen)) == len(seen)


def test_uniforms_are_half_open_and_exponentials_positive():
    draws = philox(Key(3, 0, Purpose.ACCEPT, 0), 0, 200_000)
    assert draws.min() >= 0 and draws.max() < 1
    # null: uniform; 20 cells, n = 200,000; chi-square above 52.4 has probability 5e-5 at 19 degrees of freedom
    counts = np.bincount((draws * 20).astype(int), minlength=20)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 52.4
    exponentials = Noise(3).at(0).race(9).tokens(0, 50_000)
    assert exponentials.min() > 0 and np.isfinite(exponentials).all()


def test_the_smallest_uniform_gives_a_positive_exponential():  # ALGORITHMS 8.5: E = 0 wins outright
    noise = Noise(0, 0, lambda key, first, count: np.zeros(count)).at(0).race(0)
    assert (noise.tokens(0, 4) > 0).all()


def test_race_noise_is_keyed_by_position_alone_and_block_noise_by_the_step():
    noise = Noise(11)
    np.testing.assert_array_equal(noise.at(3).race(9).tokens(0, 5), noise.at(8).race(9).tokens(0, 5))
    assert noise.at(3).uniform(Purpose.ACCEPT, 1) != noise.at(4).uniform(Purpose.ACCEPT, 0)
    assert noise.at(3).uniform(Purpose.ACCEPT, 0) != noise.at(3).uniform(Purpose.DRAFT, 0)
    blocks, tokens = noise.at(0).race(9).blocks(5), noise.at(0).race(9).tokens(0, 5)
    assert not (blocks == tokens).any()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (Key(1, 0, Purpose.RACE_TOKEN, 0), "0x1.429f93c64579ap-2"),
        (Key(2**64 - 1, 3, Purpose.RESIDUAL, 77, 2), "0x1.251ab8ebc9596p-2"),
    ],
)
def test_seeded_texts_stay_what_they_are(key, value):
    """Pinned: a change here changes the text of every seed that anybody wrote down."""
    assert philox(key, 0, 1)[0].hex() == value
