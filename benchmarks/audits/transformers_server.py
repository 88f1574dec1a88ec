"""transformers behind `serve`: `generate` with an assistant model or with prompt lookup, and without.

python transformers_server.py MODEL --port 8000 [--assistant FOLDER] [--lookup] [--logprobs raw|processed]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from serve import Answer, Refused, Request, Token, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

KNOWN = frozenset(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "seed", "stop", "n", "logprobs"))


class Transformers:
    """assistant: the folder of a draft model; lookup: so many tokens of prompt lookup instead.

    processed: log-probabilities are of `scores`, after temperature and top-p, instead of `logits`, before them
    """

    name = "transformers"
    known = KNOWN

    def __init__(self, folder: str, assistant: str | None, *, lookup: int, processed: bool) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._processed = processed
        self._speculation: dict[str, Any] = {}
        if assistant is not None:
            self._speculation = {"assistant_model": AutoModelForCausalLM.from_pretrained(assistant, dtype=torch.float32).eval()}
        elif lookup:
            self._speculation = {"prompt_lookup_num_tokens": lookup}
        self._eos = self._model.generation_config.eos_token_id
        self._spelled: dict[int, str] = {}

    def answer(self, request: Request) -> list[Answer]:
        """As the engine's `generate` gives it."""
        if request.n > 1 and self._speculation and not request.off:
            raise Refused("n: assisted generation has batches of one only")
        options: dict[str, Any] = {"max_new_tokens": request.max_tokens, "return_dict_in_generate": True, "do_sample": False}
        options |= {"output_scores": True} if self._processed else {"output_logits": True}
        if request.temperature > 0:
            options |= {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
            options |= {"min_p": request.min_p} if request.min_p else {}
        options |= {"repetition_penalty": request.repetition_penalty} if request.repetition_penalty != 1 else {}
        options |= {"num_return_sequences": request.n} if request.n > 1 else {}
        if request.logit_bias:
            options["sequence_bias"] = [[[token], bias] for token, bias in request.logit_bias.items()]
        if request.stop:
            options |= {"stop_strings": list(request.stop), "tokenizer": self._tokenizer}
        ids = torch.tensor([self._tokenizer(request.prompt, add_special_tokens=False)["input_ids"]])
        if request.seed is None:
            torch.seed()
        else:
            torch.manual_seed(request.seed)
        speculation = {} if request.off else self._speculation
        with torch.inference_mode():
            done = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options, **speculation)
        rows = torch.stack((done.scores if self._processed else done.logits), dim=1).float().log_softmax(-1)
        return [self._told(drawn.tolist(), rows[i], request) for i, drawn in enumerate(done.sequences[:, ids.shape[1] :])]

    def _told(self, ids: list[int], rows: torch.Tensor, request: Request) -> Answer:
        if self._eos in ids:  # of several choices, the shorter ones are padded
            ids = ids[: ids.index(self._eos) + 1]
        ended = ids[-1:] == [self._eos]
        text = self._tokenizer.decode(ids[:-1] if ended else ids)
        cut = min((text.find(stop) for stop in request.stop if stop in text), default=None)
        tokens = [self._token(token, row, request.logprobs) for token, row in zip(ids, rows, strict=False)]
        return Answer(text[:cut], tokens, "stop" if ended or cut is not None else "length")

    def _token(self, token: int, row: torch.Tensor, num_top: int | None) -> Token:
        if num_top is None:
            return Token(token, self._spell(token))
        values, ids = row.topk(num_top)
        top = [(self._spell(int(i)), value) for i, value in zip(ids, values.tolist(), strict=True) if value > -float("inf")]
        return Token(token, self._spell(token), float(row[token]), tuple(top))

    def _spell(self, token: int) -> str:
        """Its text; its name in the vocabulary where it is no text by itself."""
        if token not in self._spelled:
            text = self._tokenizer.decode([token])
            self._spelled[token] = text if text and "\ufffd" not in text else f"<{self._tokenizer.convert_ids_to_tokens(token)}>"
        return self._spelled[token]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--assistant")
    parser.add_argument("--lookup", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--logprobs", choices=("raw", "processed"), default="raw")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    serve(Transformers(given.model, given.assistant, lookup=given.lookup, processed=given.logprobs == "processed"), given.port)


if __name__ == "__main__":
    main()
