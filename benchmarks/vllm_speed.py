"""vLLM plain, with its own n-gram drafts, and with truedraw, in turn: tokens per second as ratios to plain.

    TRUEDRAW_VLLM_MODEL=FOLDER .venv-vllm/bin/python benchmarks/vllm_speed.py [ROUNDS] [TEMPERATURE] [WORKLOAD,...]

Three engines in processes of their own answer the same prompts, one engine at a time, in another order each round, after one
prompt that warms them up. Runs in the environment that make test-vllm makes, and with its settings of the processor.
"""

import json
import os
import random
import subprocess
import sys
import time

DRAFTS = 8
ENGINES = {
    "plain": {},
    "its n-gram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
    "truedraw": {"method": "custom_class", "model": "truedraw.integrations.vllm.Proposer", "num_speculative_tokens": DRAFTS},
}
WORKLOADS = "editing code,open chat,quoting"
TOKENS = 96


def worker(name):
    from vllm import LLM, SamplingParams

    options = {"speculative_config": ENGINES[name]} if ENGINES[name] else {}
    llm = LLM(
        os.environ["TRUEDRAW_VLLM_MODEL"], dtype="bfloat16", enforce_eager=True, max_num_seqs=4, max_model_len=2048,
        async_scheduling=False, **options,
    )  # fmt: skip
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=asked["temperature"], max_tokens=TOKENS)
        started, tokens = time.perf_counter(), 0
        for first in range(0, len(asked["prompts"]), asked["together"]):
            answers = llm.chat(asked["prompts"][first : first + asked["together"]], params, use_tqdm=False)
            tokens += sum(len(one.outputs[0].token_ids) for one in answers)
        print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), flush=True)


def begin(name):
    environ = {**os.environ, "TRUEDRAW_VLLM": str(int(name == "truedraw")), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, __file__, "--worker", name]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    )
    answer(process)
    return process


def answer(process):
    """The next line that is not vLLM's own log."""
    for line in process.stdout:
        if line.startswith("ready"):
            return None
        if line.startswith("{"):
            return json.loads(line)
    sys.exit("an engine ended before it answered")


def main(rounds, temperature, workloads):
    from truedraw.bench.workloads import read, shipped

    prompts = read(shipped(), raw=False)
    engines = {name: begin(name) for name in ENGINES}
    for workload in workloads:
        for together in (4, 1):
            spent = {name: [0.0, 0] for name in ENGINES}
            for number in range(rounds + 1):
                for name in random.Random(number).sample(list(ENGINES), len(ENGINES)):
                    asked = {
                        "prompts": prompts[workload][: None if number else 1],
                        "together": together,
                        "temperature": temperature,
                    }
                    print(json.dumps(asked), file=engines[name].stdin, flush=True)
                    told = answer(engines[name])
                    if number:
                        spent[name][0] += told["seconds"]
                        spent[name][1] += told["tokens"]
            speeds = {name: tokens / seconds for name, (seconds, tokens) in spent.items()}
            ratios = ", ".join(f"{name} {speed / speeds['plain']:.2f}" for name, speed in speeds.items() if name != "plain")
            print(f"{together} at a time, {workload}: plain {speeds['plain']:.1f} tokens/s, {ratios}", flush=True)
    for process in engines.values():
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    else:
        given = [*sys.argv[1:], *("2", "0", WORKLOADS)[len(sys.argv) - 1 :]]
        main(int(given[0]), float(given[1]), given[2].split(","))
