"""Requests made up from the server's own description: none is answered with a failure of the server's."""

from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import checks
from schemathesis.generation import GenerationMode
from wire import CHAT, COMPLETIONS, PATIENCE, error_of, in_thread, is_well

from truedraw.drafters.choice import ChoiceDrafter
from truedraw.drafters.ngram import NGramDrafter
from truedraw.drafters.none import NoDrafter
from truedraw.runners.toy import ToyRunner, toy_language
from truedraw.server.access import Limits
from truedraw.server.schema import ChatRequest, CompletionRequest

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def client():
    runner = ToyRunner(toy_language(), 257, num_slots=2, max_length=64)
    drafter = ChoiceDrafter({"ngram": NGramDrafter(), "none": NoDrafter()}, "ngram")
    with in_thread(runner=runner, drafter=drafter, draft_length=3, limits=Limits(prompts=8, choices=4)) as client:
        yield client
        assert is_well(client)


GOOD = {
    COMPLETIONS: {"prompt": "the cat sat on the ", "max_tokens": 5},
    CHAT: {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 5},
}
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields} - {"model"})


def fuzz(client, mode, examples):
    """Of what is made up at most three fields are sent in a request that is sound otherwise: most others are refused for
    the first of many reasons, and never get far. Answers how often which status came."""
    described = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")
    how = settings(
        max_examples=examples, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    statuses = Counter()
    operations = [each.ok() for each in described.get_all_operations()]
    assert len(operations) == 6
    for operation in operations:

        @how
        @given(case=operation.as_strategy(generation_mode=mode), kept=st.none() | st.sets(st.sampled_from(FIELDS), max_size=3))
        def holds(case, kept):
            if case.operation.path in GOOD and kept is not None and isinstance(case.body, dict):
                case.body = GOOD[case.operation.path] | {name: case.body[name] for name in kept if name in case.body}
            answer = case.call_and_validate(checks=CHECKS, timeout=PATIENCE)
            if answer.status_code >= 400:
                error_of(answer)
            statuses[case.operation.path, answer.status_code] += 1

        try:
            holds()
        except Unsatisfiable:  # nothing of this operation can be wrong
            assert mode is GenerationMode.NEGATIVE and operation.method == "get"
    return statuses


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_makes_the_server_fail(client, mode):
    statuses = fuzz(client, mode, 60)
    assert all(statuses[path, 400] > 5 for path in GOOD)
    assert all(statuses[path, 200] > 5 for path in GOOD)


@pytest.mark.long
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_of_many_makes_the_server_fail(client, mode):
    print(fuzz(client, mode, 600))
