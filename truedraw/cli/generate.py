"""truedraw generate: one prompt, its answer as it is made, statistics on standard error."""

from __future__ import annotations

import json
import secrets
import sys
from typing import Annotated, Any

import typer

from truedraw.cli import options as opt
from truedraw.cli import output
from truedraw.engine import Engine, Request
from truedraw.errors import TruedrawError, UsageError
from truedraw.text.prompt import Prompt
from truedraw.types import Result, SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: opt.ModelName = "smollm2",
    draft_model: opt.DraftModel = None,
    drafter: opt.DrafterName = "auto",
    draft_length: opt.DraftLength = "auto",
    corpus: opt.CorpusPaths = None,
    corpus_size: opt.CorpusSize = None,
    mtp_modules: opt.MtpModules = None,
    rule: opt.RuleName = "auto",
    allow_lossy: opt.AllowLossy = False,
    temperature: opt.Temperature = 1.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    logit_bias: opt.LogitBias = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = 0,
    stop: opt.Stop = None,
    stop_token_id: opt.StopTokenId = None,
    ignore_eos: opt.IgnoreEos = False,
    seed: opt.Seed = None,
    choices: opt.Choices = 1,
    system: opt.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the prompt as it stands.")] = False,
    context: opt.Context = None,
    slots: opt.Slots = None,
    threads: opt.Threads = None,
    kv_type: opt.KvType = "f16",
    device: opt.Device = "cpu",
    strict: opt.Strict = False,
    compare: Annotated[bool, typer.Option("--compare", help="Also decode plainly, with the same seed; colours drafts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> int:
    """Answer a prompt: the text on standard output, statistics on standard error."""
    if compare and seed is None:
        seed = secrets.randbits(32)
    params = opt.Sampling(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias,
        max_tokens, min_tokens, stop, stop_token_id, ignore_eos, seed, choices,
    ).params()  # fmt: skip
    text = opt.read_prompt(prompt)
    if raw and system is not None:
        raise UsageError("--system goes with a chat template, and --raw means none: leave one of them out")
    with opt.load_engine(
        model,
        drafter=drafter,
        draft_model=draft_model,
        draft_length=draft_length,
        corpus=corpus,
        corpus_size=corpus_size,
        mtp_modules=mtp_modules,
        rule=rule,
        allow_lossy=allow_lossy,
        context=context,
        slots=choices if slots is None else slots,
        threads=threads,
        kv_type=kv_type,
        device=device,
        strict=strict,
    ) as engine:
        return _Run(engine, _prompt(engine, text, system, raw), params, seed, quiet=as_json, raw=raw).go(compare=compare)


def _prompt(engine: Engine, text: str, system: str | None, raw: bool) -> Prompt:
    """Chat messages where the model has a template and --raw does not forbid it."""
    if raw:
        return text
    if engine.model.tokenizer.chat_template is None:
        if system is not None:
            raise UsageError(f"{engine.model.name} has no chat template, so --system has no place: put it into the prompt")
        return text
    return [*([{"role": "system", "content": system}] if system is not None else []), {"role": "user", "content": text}]


class _Run:
    """One generation and what is printed of it. Text that was made is kept, whatever ends the run."""

    def __init__(
        self, engine: Engine, prompt: Prompt, params: SamplingParams, seed: int | None, *, quiet: bool, raw: bool
    ) -> None:
        self._engine, self._prompt, self._params, self._seed = engine, prompt, params, seed
        self._quiet, self._raw = quiet, raw

    def go(self, *, compare: bool) -> int:
        engine, params = self._engine, self._params
        if compare:
            self._warm_up()
        request = engine.submit(self._prompt, params)  # a bad prompt or parameter ends here, before anything is made
        self._note()
        writer = output.TextWriter(engine.model.tokenizer, coloured=compare)
        plain: list[Result] | None = None
        status = 0
        failure: TruedrawError | None = None
        try:
            for step in engine.run(request):
                if step.choice == 0 and not self._quiet:  # the others would mix with it: they come once all is done
                    writer.write(step)
            if compare:
                baseline = engine.submit(self._prompt, params, max_draft=0)
                for _step in engine.run(baseline):
                    pass
                plain = _finished(baseline)
        except KeyboardInterrupt:
            engine.cancel(request)
            status = 130
        except TruedrawError as error:
            failure = error
        results = _finished(request)
        if self._quiet:
            print(json.dumps(self._json(results, plain), ensure_ascii=False), flush=True)
        else:
            writer.finish(results[0].text)
            for result in results[1:]:
                print(f"--- choice {result.choice} ---\n{result.text}", flush=True)
            self._report(results, plain)
        if status == 130:
            print("truedraw: interrupted: the text made so far is kept", file=sys.stderr)
        broken = [failure, *(result.error for result in results)]
        for reason in filter(None, broken):
            raise reason
        return status

    def _warm_up(self) -> None:
        """A few tokens with and without drafts, so that neither run pays for the first pass of a kind."""
        start = self._engine.encode(self._prompt)[:1]
        for max_draft in (None, 0):
            request = self._engine.submit(
                start, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), max_draft=max_draft
            )
            for _step in self._engine.run(request):
                pass

    def _report(self, results: list[Result], plain: list[Result] | None) -> None:
        console = output.stderr_console()
        if plain is None:
            for result in results:
                console.print(output.summary(result), style="dim", soft_wrap=True)
            return
        for result, baseline in zip(results, plain, strict=True):
            console.print()
            console.print(output.comparison(result, baseline))
            gain = output.speedup(result, baseline)
            differs = output.first_difference(result, baseline)
            if differs is None:
                agreement = "the same text"
            elif result.rule == "coupled":
                agreement = f"texts differ from token {differs} on: here the model's rows depend on the pass size"
            elif result.stats.drift is not None:
                agreement = output.drift(result.stats.drift)
            else:
                agreement = f"the same law but another text (rule {result.rule})"
            speed = "no time was spent" if gain is None else f"speed-up {gain:.2f}x"
            console.print(f"{speed}, {agreement}, seed {self._seed}", soft_wrap=True)

    def _note(self) -> None:
        """What the user did not ask for and should know."""
        if isinstance(self._prompt, str) and not self._raw:
            name = self._engine.model.name
            print(f"truedraw: {name} has no chat template: the prompt was continued as it stands", file=sys.stderr)

    def _json(self, results: list[Result], plain: list[Result] | None) -> dict[str, Any]:
        """The fields of choice 0; with several choices all of them under `choices` as well."""
        objects = [output.as_json(result, self._seed) for result in results]
        if plain is not None:
            for fields, result, baseline in zip(objects, results, plain, strict=True):
                fields["plain"] = output.as_json(baseline, self._seed)
                fields["speedup"] = output.speedup(result, baseline)
        return {**objects[0], **({"choices": objects} if len(objects) > 1 else {})}


def _finished(request: Request) -> list[Result]:
    return [result for result in request.results if result is not None]
