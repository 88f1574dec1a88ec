"""The proposer that vLLM loads by name: {"method": "custom_class", "model": "truedraw.integrations.vllm.Proposer"}.

Point masses only, from what followed the end of the text earlier in it or in a corpus. vLLM verifies them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from truedraw.drafters.corpus import Corpus
from truedraw.drafters.evidence import GREEDY, SAMPLED
from truedraw.integrations.vllm import options
from truedraw.integrations.vllm.metrics import Metrics
from truedraw.integrations.vllm.steps import LEAST_PASSES, PROBE, Pass, PassTimes, lengths
from truedraw.integrations.vllm.texts import Known, Texts

_LEAST_MATCH = 2
_REACH = 4
"""Full steps by which a text may have grown between two calls: there are none while a request is at the context's end."""


class Asked(NamedTuple):
    """What a request wants of its text.

    end     tokens that it may hold, prompt included
    greedy  at temperature 0, where copies are right more often
    """

    end: int
    greedy: bool


class Proposer:
    """One per engine process; vLLM calls `propose` after each pass, for the whole batch.

    vllm_config  vLLM's own. Read: speculative_config.num_speculative_tokens, model_config.max_model_len,
                 scheduler_config.max_num_seqs, additional_config["truedraw"] (options.Options)
    Raises InvalidParameter or IncompatibleModels, which vLLM shows as the reason why it does not start.
    """

    def __init__(self, vllm_config: Any, *, version: str | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        options.check_version(version or options.installed())
        self._options = options.read(vllm_config.additional_config)
        self._most = options.check_most(vllm_config.speculative_config.num_speculative_tokens, self._options.draft_length)
        self._max_length: int = vllm_config.model_config.max_model_len
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        self._texts = Texts(2 * vllm_config.scheduler_config.max_num_seqs, _REACH * (self._most + 1))
        self._corpus = self._open(vllm_config)
        self._clock = clock
        self._times = PassTimes()
        self._returned: float | None = None  # when the last call did
        self._steps = 0
        self.asked: Sequence[Asked] = ()
        """Of each row of the batch: the plug-in sets it, which knows the requests. Empty: only the context bounds drafts, and
        all are taken to be sampled."""
        self.metrics = Metrics(self._most, counts=_is_first(vllm_config.parallel_config))

    def _open(self, vllm_config: Any) -> Corpus | None:
        """What all requests may copy from. Raises CorpusError."""
        chosen = self._options
        if chosen.corpus is None:
            return Corpus((), limit=chosen.corpus_size, learning=True) if chosen.learn else None
        from transformers import AutoTokenizer

        from truedraw.drafters.corpus_files import gather
        from truedraw.runners.transformers_tokenizer import TransformersTokenizer

        model = vllm_config.model_config
        loaded = AutoTokenizer.from_pretrained(
            model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
        )
        tokenizer = TransformersTokenizer(loaded, model.get_vocab_size())
        return gather(chosen.corpus, limit=chosen.corpus_size, learning=chosen.learn).open(tokenizer)

    def load_model(self, model: Any) -> None:
        """vLLM calls it with the target, of which nothing is wanted."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,  # vLLM gives it to all proposers
    ) -> list[list[int]]:
        """Up to num_speculative_tokens drafts for each row; none for a row that is still being read.

        sampled_token_ids   of each row what the pass emitted; empty: a prompt is not read to its end
        num_tokens_no_spec  (rows,) tokens of each, the emitted ones included
        token_ids_cpu       (rows, max_model_len), as long as these say
        """
        rows = [row for row, sampled in enumerate(sampled_token_ids) if len(sampled)]
        texts = [(token_ids_cpu[row, : num_tokens_no_spec[row]], len(sampled_token_ids[row])) for row in rows]
        found, forgotten = self._texts.find([(tokens, len(tokens) - emitted) for tokens, emitted in texts])
        self._observe(found, len(rows) == len(sampled_token_ids))
        self._learn(forgotten)
        asked = [self.asked[row] if row < len(self.asked) else Asked(self._max_length, False) for row in rows]
        survivals = [self._foresee(known, one) for known, one in zip(found, asked, strict=True)]
        for known, length in zip(found, self._choose(survivals), strict=True):
            del known.drafts[length:], known.survival[length:]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, known in zip(rows, found, strict=True):
            drafts[row] = list(known.drafts)
        self._returned = self._clock()
        return drafts

    def _observe(self, found: Sequence[Known], whole: bool) -> None:
        """Count what became of the drafts, and take the pass's time if it held these texts and nothing else: all of them came
        with the same earlier call (with pipeline parallelism, batches take turns). A pass takes as long as the last call lies
        back, whatever its batch was."""
        together = whole and len({known.seen for known in found}) == 1 and all(len(known.new) for known in found)
        if together and self._returned is not None:
            size = len(found) + sum(len(known.drafts) for known in found)
            seconds = self._clock() - self._returned
            self._times.observe(Pass(len(found), size, seconds))
            plain = self._times.plain(len(found))
            self.metrics.timed(seconds, plain, sum(len(known.new) for known in found) / len(found))
        for known in found:
            if known.drafts and len(known.new):
                self.metrics.judged(len(known.drafts), known.accepted)
            known.drafts, known.survival = [], []

    def _foresee(self, known: Known, asked: Asked) -> list[float]:
        """Drafts for a text, as many as could be right, and the survival of each: a pass emits one token more than drafts."""
        known.text.history.prior = GREEDY if asked.greedy else SAMPLED
        room = min(asked.end, self._max_length) - len(known.tokens) - 1
        most = min(self._most, room)
        text = known.text
        if self._corpus is not None:
            text.borrow(self._corpus, _LEAST_MATCH)
        if most > 0 and text.copy is not None and text.copy.length >= _LEAST_MATCH:
            drafts, survival, _ = text.survival(most)
            inside = next((i for i, token in enumerate(drafts) if token >= self._vocab_size), len(drafts))
            known.drafts, known.survival = drafts[:inside], survival[:inside]
        return known.survival

    def _choose(self, survivals: Sequence[Sequence[float]]) -> list[int]:
        self._steps += 1
        fixed = self._options.draft_length
        if fixed is not None:
            chosen = [min(fixed, len(survival)) for survival in survivals]
        elif len(self._times) < LEAST_PASSES:
            chosen = [0] * len(survivals)
        else:
            chosen = lengths(survivals, self._times.slope)
        if (
            fixed is None and not any(chosen) and self._steps % PROBE == 0 and any(survivals)
        ):  # a slope that is not tried stays as it is
            likeliest = max(range(len(survivals)), key=lambda request: sum(survivals[request][:1]))
            chosen[likeliest] = 1
        self.metrics.chosen(chosen)
        return chosen

    def _learn(self, forgotten: Sequence[Known]) -> None:
        if self._corpus is not None and self._options.learn:
            for known in chain(forgotten, self._texts.ended()):
                if not known.learned:
                    known.learned = True
                    self._corpus.add(known.answer.tolist())


def _is_first(parallel: Any) -> bool:
    """Whether this process is the one of its tensor-parallel group whose drafts vLLM takes."""
    return int(parallel.rank) % int(parallel.tensor_parallel_size) == 0
