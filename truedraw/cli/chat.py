"""truedraw chat: a conversation that keeps its cache between turns."""

from __future__ import annotations

import sys

from truedraw.cli import options as opt
from truedraw.cli import output
from truedraw.engine import Engine
from truedraw.errors import PromptError, UsageError
from truedraw.types import SamplingParams


def chat(
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
    system: opt.System = None,
    context: opt.Context = None,
    threads: opt.Threads = None,
    kv_type: opt.KvType = "f16",
    device: opt.Device = "cpu",
    strict: opt.Strict = False,
) -> int:
    """Talk to a model. /reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    params = opt.Sampling(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias,
        max_tokens, min_tokens, stop, stop_token_id, ignore_eos, seed,
    ).params()  # fmt: skip
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
        slots=1,
        threads=threads,
        kv_type=kv_type,
        device=device,
        strict=strict,
    ) as engine:
        if engine.model.tokenizer.chat_template is None:
            raise UsageError(f"{engine.model.name} has no chat template: use truedraw generate --raw")
        return _Conversation(engine, params, system).go()


class _Conversation:
    """The messages so far. The engine finds by itself how much of them its cache still holds."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine, self._params = engine, params
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._opening)
        self._console = output.stderr_console()
        if sys.stdin is None:
            raise PromptError("standard input is closed: chat reads its lines from there")
        self._interactive = sys.stdin.isatty()

    def go(self) -> int:
        if self._interactive:
            self._console.print("/reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer", style="dim")
        while (line := self._read()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return 0
                case "/reset":
                    self._messages = list(self._opening)
                case _:
                    self._answer(line)
        return 0

    def _read(self) -> str | None:
        """A line of the user's; None at the end of input."""
        try:
            return input("> ") if self._interactive else input()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise PromptError(
                f"standard input is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start} ({error.reason})"
            ) from None

    def _answer(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            request = self._engine.submit(self._messages, self._params)
        except PromptError as error:
            self._messages.pop()
            if not self._interactive:
                raise
            self._console.print(f"truedraw: {error}; /reset starts anew")
            return
        writer = output.TextWriter(self._engine.model.tokenizer, coloured=False)
        try:
            for step in self._engine.run(request):
                writer.write(step)
        except KeyboardInterrupt:
            self._engine.cancel(request)
            if not self._interactive:
                raise
        finally:
            result = request.results[0]
            assert result is not None
            writer.finish(result.text)
        self._messages.append({"role": "assistant", "content": result.text})
        self._console.print(output.summary(result), style="dim", soft_wrap=True)
        if result.error is not None:
            raise result.error
