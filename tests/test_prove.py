import numpy as np
import pytest

from truedraw.prove import engine_check
from truedraw.prove.coupling import certify_coupling, race_law
from truedraw.prove.exact import Parts, certify, output_law, target_law, total_variation
from truedraw.prove.mutants import RACE_ROWS, RACE_TOLERANCE, mutants
from truedraw.prove.problems import cases, random_problem
from truedraw.verify import coupled, token

CASES = cases()


def name(case):
    problem, lengths = case
    return f"{problem.name} {lengths}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_token_rule_has_exactly_the_law_of_the_target(case):
    problem, lengths = case
    certificate = certify(problem, Parts(token.verify), lengths)
    assert certificate.worst == 0  # a fraction: no tolerance
    assert certificate.num_paths > 1


def test_the_certificates_cover_what_they_say():
    assert {problem.vocab for problem, _ in CASES} == {2, 3, 4}
    assert {k for _, lengths in CASES for k in lengths} == {0, 1, 2, 3}
    assert all(len(lengths) >= 2 for _, lengths in CASES)
    assert any(problem.point for problem, _ in CASES)
    with pytest.raises(ValueError, match="two consecutive steps"):
        certify(CASES[0][0], Parts(token.verify), (2,))


@pytest.mark.parametrize("seed", range(20, 28))
def test_random_problems(seed):
    problem = random_problem(seed, 3, 5)
    assert certify(problem, Parts(token.verify), (1, 2), places=("middle",)).exact


def test_the_enumeration_is_complete():
    problem, lengths = CASES[1]
    law, _paths = output_law(problem, Parts(token.verify), lengths, 4)
    assert sum(law.values()) == 1
    assert total_variation(law, target_law(problem, 4)) == 0
    assert total_variation({(0,): 1}, {(1,): 1}) == 1


@pytest.mark.parametrize("problem", {problem.name: problem for problem, _ in CASES}.values(), ids=lambda problem: problem.name)
def test_every_noise_vector_gives_the_text_of_plain_decoding(problem):
    certificate = certify_coupling(problem, coupled.verify, range(40))
    assert certificate.num_different == 0 and certificate.num_tried == 40 * 8


@pytest.mark.parametrize(("row", "block"), RACE_ROWS)
def test_the_race_by_quadrature(row, block):
    assert np.abs(race_law(np.array(row), block) - row).sum() / 2 < RACE_TOLERANCE


def test_the_engine_agrees_with_its_oracle():
    assert engine_check.first_failure() is None


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_planted_faults_are_caught(mutant):
    assert mutant.catch() is not None


def test_there_are_enough_planted_faults_and_each_has_its_own_name():
    names = [mutant.name for mutant in mutants()]
    assert len(names) == len(set(names)) >= 12
