"""Runs vLLM once, in a process of its own, and prints what it emitted: a helper of test_vllm_engine.py.

Standard input: {"engine": options of vllm.LLM, "runs": [{"prompts": [[ids]], "params": [{...}], "together": n,
"abort": [...]}]}. Last line of standard output: {"texts": for each run a list of token lists, and of all runs the counts of
COUNTED}.
"""

import json
import sys

from vllm import LLM, SamplingParams

COUNTED = {
    "preemptions": "vllm:num_preemptions",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def run(llm, prompts, params, together, abort):
    """The tokens of each prompt; `together` of them are in the engine at a time. abort: numbers of those that are cancelled
    once each has emitted something, and whose place is None."""
    engine, texts = llm.llm_engine, [None] * len(prompts)
    waiting, running, cancelled = list(range(len(prompts))), set(), set()
    names = {}
    while waiting or running:
        while waiting and len(running) < together:
            number = waiting.pop(0)
            names[str(number)] = engine.add_request(str(number), {"prompt_token_ids": prompts[number]}, params[number])
            running.add(number)
        for output in engine.step():
            number = int(output.request_id)
            if number in abort and number not in cancelled and not output.finished and output.outputs[0].token_ids:
                engine.abort_request([output.request_id])
                cancelled.add(number)
                running.discard(number)
            elif output.finished:
                texts[number] = list(output.outputs[0].token_ids)
                running.discard(number)
    return texts


def main():
    given = json.load(sys.stdin)
    llm = LLM(**given["engine"], disable_log_stats=False)
    results = []
    for one in given["runs"]:
        params = [SamplingParams(**params) for params in one["params"]]
        for one_params in params:
            if one_params.logit_bias is not None:  # JSON has texts as keys
                one_params.logit_bias = {int(token): bias for token, bias in one_params.logit_bias.items()}
        results.append(run(llm, one["prompts"], params, one.get("together", 1), set(one.get("abort", []))))
    counted = {
        name: sum(metric.value for metric in llm.get_metrics() if metric.name == of_vllm) for name, of_vllm in COUNTED.items()
    }
    print(json.dumps({"texts": results, **counted}))


if __name__ == "__main__":
    main()
