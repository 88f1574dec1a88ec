"""openvino-genai behind `serve`: an LLMPipeline with a draft model or with prompt lookup, and a plain one beside it.

python openvino_server.py MODEL.gguf --port 8000 [--draft DRAFT.gguf] [--lookup]
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
from pathlib import Path
from typing import Any

import openvino_genai as genai
from serve import Answer, Refused, Request, Token, serve

KNOWN = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "n")
)
PROPERTIES = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}
"""f32 throughout. The attention backend is the one that speculation runs on, so that the plain pipeline has the same kernels."""


class OpenVINO:
    """draft: the path of a draft model; lookup: prompt lookup instead. Drafts of `num_drafts` tokens; n-grams up to `ngram`."""

    name = "openvino"
    known = KNOWN

    def __init__(
        self, model: str, draft: str | None, *, lookup: bool, num_drafts: int, ngram: int, threads: int, prefix_caching: bool
    ) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = prefix_caching
        scheduler.cache_size = 1
        own: dict[str, Any] = {**PROPERTIES, "INFERENCE_NUM_THREADS": threads}
        properties = {**own, "ATTENTION_BACKEND": "PA", "scheduler_config": scheduler}
        self._plain = genai.LLMPipeline(model, "CPU", **properties)
        self._speculative = self._plain
        self._drafts: dict[str, Any] = {}
        if draft is not None:
            with tempfile.TemporaryDirectory() as folder:
                drafter = genai.draft_model(_converted(draft, Path(folder)), "CPU", **own)
                self._speculative = genai.LLMPipeline(model, "CPU", draft_model=drafter, **properties)
            self._drafts = {"num_assistant_tokens": num_drafts}
        elif lookup:
            self._speculative = genai.LLMPipeline(model, "CPU", prompt_lookup=True, **properties)
            self._drafts = {"num_assistant_tokens": num_drafts, "max_ngram_size": ngram}
        self._tokenizer = self._plain.get_tokenizer()
        self._eos = self._plain.get_generation_config().eos_token_id

    def answer(self, request: Request) -> list[Answer]:
        """As the engine's `generate` gives it."""
        if request.n > 1 and (request.temperature == 0 or (self._drafts and not request.off)):
            raise Refused("n: 1 at temperature 0, and with speculation")
        options: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "eos_token_id": self._eos,
            "stop_strings": set(request.stop),
            "apply_chat_template": False,
            "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty,
            "repetition_penalty": request.repetition_penalty,
        }
        if request.temperature > 0:
            options |= {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p}
            options |= {"min_p": request.min_p, "num_return_sequences": request.n}
            options |= {"top_k": request.top_k} if request.top_k else {}
            options["rng_seed"] = secrets.randbits(32) if request.seed is None else request.seed
        config = genai.GenerationConfig(**options, **({} if request.off else self._drafts))
        prompt = self._tokenizer.encode(request.prompt, add_special_tokens=False)
        done = (self._plain if request.off else self._speculative).generate(prompt, config)
        return [self._told(ids, str(why), request) for ids, why in zip(done.tokens, done.finish_reasons, strict=True)]

    def _told(self, ids: list[int], why: str, request: Request) -> Answer:
        ended = ids[-1:] == [self._eos]
        text = self._tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        return Answer(text, [Token(each, "") for each in ids], "stop" if ended or "STOP" in why else "length")


def _converted(gguf: str, folder: Path) -> str:
    """The folder, with the model in the engine's own format: draft models are not read from GGUF."""
    (folder / "model.gguf").symlink_to(Path(gguf).resolve())
    genai.LLMPipeline(str(folder / "model.gguf"), "CPU", enable_save_ov_model=True, INFERENCE_PRECISION_HINT="f32")
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--draft")
    parser.add_argument("--lookup", action="store_true")
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--ngram", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prefix-caching", action="store_true")
    given = parser.parse_args()
    engine = OpenVINO(
        given.model,
        given.draft,
        lookup=given.lookup,
        num_drafts=given.num_drafts,
        ngram=given.ngram,
        threads=given.threads,
        prefix_caching=given.prefix_caching,
    )
    serve(engine, given.port)


if __name__ == "__main__":
    main()
