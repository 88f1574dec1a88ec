"""Which loss MTP modules learn best by: the same answers, first weights, order and time for each.

    pip install 'torch==2.13.0' && pip install -e '.[demo,train]'
    truedraw train mtp --model smollm2 --minutes 15 --save FOLDER
    python benchmarks/mtp_losses.py FOLDER [--minutes M] [--model smollm2]

Learns once by KL, once by TV and once by 0.3 KL + TV, each for M minutes, from the answers that the training left in FOLDER.
Figures: held-out acceptance by depth (mean of the sum of min(p, q)), and drafts accepted of a chain of three. Last line: JSON.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from common import last_line

from truedraw.registry import LoadOptions, load_model
from truedraw.train.batches import usable
from truedraw.train.learning import Learning, LearningOptions
from truedraw.train.mtp import shape_for
from truedraw.train.store import Store

LOSSES = {"KL": (1.0, 0.0), "TV": (0.0, 1.0), "0.3 KL + TV": (0.3, 1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    given = parser.parse_args()
    model = load_model(given.model, LoadOptions(context=256), print)
    matrices = model.runner.token_matrices()
    model.runner.close()
    vocab, width = matrices.embedding.shape
    store = Store(given.folder / "answers", width, vocab, 1 << 40)
    learn = usable(answer for answer in store.answers() if not answer.held_out)
    held_out = usable(answer for answer in store.answers() if answer.held_out)
    draft_ids = np.sort(np.argsort(-store.mass, kind="stable")[: given.draft_vocab])
    print(f"{sum(len(answer.tokens) for answer in learn):,} tokens, {given.minutes:g} minutes for each loss")
    figures = {}
    for name, (kl, tv) in LOSSES.items():
        options = LearningOptions(seconds=given.minutes * 60, kl=kl, tv=tv)
        with tempfile.TemporaryDirectory() as folder:
            learning = Learning(shape_for(width, vocab, model.name), draft_ids, matrices, learn, held_out, options, Path(folder))
            learning.run()
        learning.take_best()
        alphas = learning.evaluate()
        accepted = float(np.cumprod(alphas).sum())
        figures[name] = {"acceptance": alphas, "accepted": accepted, "steps": learning.progress.step}
        spelled = " ".join(f"{alpha:.3f}" for alpha in alphas)
        print(f"{name:12} acceptance {spelled}   accepted of three {accepted:.3f}   {learning.progress.step} steps")
    last_line(benchmark="mtp_losses", minutes=given.minutes, figures=figures)


main()
