"""A target that costs eight times as much as the demo model and has the same law: identity blocks (zeroed
output projections) between its layers. The draft model is the demo model with its final norm scaled, so
that the two agree in part. A test of the cost model and of block verification at a realistic ratio of
costs; synthetic, and no figure for anybody's model.

    python benchmarks/deepen.py [PAIRS] [SCALE] [WEIGHTS]

WEIGHTS: f32 (where a pass of 4 costs half as much again as a pass of 1) or q8_0 (where it costs twice as much).

Prints measured speed-up against what `truedraw plan` predicts from the measured acceptance and profile;
last line: JSON.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from common import last_line

from truedraw import Engine, SamplingParams
from truedraw.bench import measure, workloads
from truedraw.economics import Costs, MeasuredCost, curve
from truedraw.policy import Controller, FixedLength
from truedraw.runners import llamacpp
from truedraw.runners.gguf import locate

FACTOR = 8
ZEROED = ("attn_output.weight", "ffn_down.weight")


def deepen(source: Path, target: Path, factor: int) -> None:
    """Write `target`: each block of `source`, followed by factor - 1 blocks that add nothing."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.name == f"{architecture}.block_count":
            value *= factor
        kind = field.types[0]
        writer.add_key_value(field.name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        prefix, _, rest = tensor.name.partition(".")
        if prefix != "blk":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        number, _, name = rest.partition(".")
        for copy in range(factor):
            data = np.zeros_like(tensor.data) if copy and name in ZEROED else tensor.data
            writer.add_tensor(f"blk.{int(number) * factor + copy}.{name}", data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blur(source: Path, target: Path, scale: float) -> None:
    """Write `target`: `source` with its final norm, and so all its logits, times `scale`."""
    shutil.copyfile(source, target)
    reader = gguf.GGUFReader(target, "r+")
    norm = next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight")
    norm.data[:] = norm.data * np.float32(scale)
    reader.data.flush()


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    scale = float(sys.argv[2]) if len(sys.argv) > 2 else 0.75
    weights = sys.argv[3] if len(sys.argv) > 3 else "f32"
    source = locate(f"smollm2:{weights}", llamacpp.quantise, print)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        deep, draft = Path(folder) / "deep.gguf", Path(folder) / "draft.gguf"
        deepen(source, deep, FACTOR)
        blur(source, draft, scale)
        with Engine.load(str(deep), drafter="model", draft_model=str(draft), context=512) as engine:
            prompts = workloads.read(workloads.shipped(), raw=False)["open chat"]
            for rule in ("auto", "token"):
                for policy in (engine.policy, FixedLength(3)):
                    rows.append(compare(engine, prompts, rule, policy, pairs))
    last_line(benchmark="deepen", factor=FACTOR, weights=weights, scale=scale, rows=rows)


def compare(engine: Engine, prompts: list, rule: str, policy: object, pairs: int) -> dict[str, object]:
    engine._rule, kept, engine.policy = rule, engine.policy, policy
    params = SamplingParams(max_tokens=100, temperature=1.0, ignore_eos=True)
    *_, told = measure.run(engine, "open chat", prompts, params, concurrency=1, repeats=pairs, seconds=600)
    engine.policy = kept
    steps = told.stats
    lengths = "controlled" if isinstance(policy, Controller) else policy.length
    assert isinstance(kept, Controller)
    table = kept.costs.table(17, 100, 1)
    passes = MeasuredCost(tuple(range(1, 18)), tuple(float(x) for x in table[1:]))
    each = told.spec.draft / steps.proposed / table[1]
    survival = [accepted / steps.steps for accepted in steps.accepted_by_depth]
    mean_length = steps.proposed / steps.steps
    points = curve(tuple(survival), Costs(passes, draft=each), len(survival))
    predicted = float(np.interp(mean_length, [p.length for p in points], [p.speedup for p in points]))
    row = {
        "rule": "block" if rule == "auto" else rule,
        "length": lengths,
        "ratio": told.ratio,
        "predicted": predicted,
        "acceptance": steps.acceptance_rate,
        "tokens_per_step": steps.tokens_per_step,
        "mean_length": mean_length,
        "pairs": len(told.pairs),
    }
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return row


if __name__ == "__main__":
    main()
