"""The entry point that vLLM calls in each of its processes (group vllm.general_plugins): off unless TRUEDRAW_VLLM is on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from truedraw.errors import IncompatibleModels, InvalidParameter

if TYPE_CHECKING:
    from truedraw.integrations.vllm.proposer import Asked

SWITCH = "TRUEDRAW_VLLM"
ON, OFF = ("1", "on"), ("", "0", "off")
_GREEDY = 1e-5  # below this temperature vLLM takes the likeliest token

_installed = False


def register() -> None:
    """Let vLLM draw as sampling.py says, if the switch is on; once in a process, however often it is called.

    Raises InvalidParameter for another value of the switch, IncompatibleModels for another version of vLLM.
    """
    value = os.environ.get(SWITCH, "").strip().lower()
    if value in OFF:
        return
    if value not in ON:
        raise InvalidParameter(SWITCH, value, f"{' or '.join(ON)}, or {' or '.join(OFF[1:])}")
    global _installed
    if not _installed:
        from truedraw.integrations.vllm import options

        options.check_version(options.installed())
        _install()
        _installed = True


def _install() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
    from vllm.v1.worker import gpu_model_runner, worker_base

    from truedraw.integrations.vllm import sampling
    from truedraw.integrations.vllm.proposer import Proposer

    runner = gpu_model_runner.GPUModelRunner
    wrapper, build, begin = worker_base.WorkerWrapperBase, gpu_model_runner.build_logitsprocs, worker_base.WorkerBase.__init__
    set_up = wrapper.init_device

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if isinstance(drafter, Proposer):
            drafter.asked = asked(self.input_batch, self.requests)
        self.input_batch.update_async_output_token_ids()
        drawn_from = None if spec_decode_metadata is None else self._get_spec_decode_draft_probs(spec_decode_metadata)
        blocks = () if drawn_from is None else as_block(self.input_batch, self.requests)
        return sampling.sample(self.sampler, self.input_batch, logits, spec_decode_metadata, drawn_from, blocks)

    def build_logitsprocs(
        vllm_config: Any, device: Any, is_pin_memory: bool, is_pooling_model: bool, custom_logitsprocs: Any = ()
    ) -> Any:
        """All of vLLM's own processors under speculation too, where it would leave out min-p and logit bias."""
        if vllm_config.speculative_config and not is_pooling_model and not custom_logitsprocs:
            return LogitsProcessors(make(vllm_config, device, is_pin_memory) for make in BUILTIN_LOGITS_PROCESSORS)
        return build(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check(vllm_config)
        begin(self, vllm_config, *args, **kwargs)

    def init_device(self: Any) -> None:
        set_up(self)
        check_runner(self.worker.model_runner, _sample)

    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        """Its holder counts the tokens of a thought by the rows of the batch, which are not those that are drawn here."""
        if speculative_config is not None and self.thinking_token_budget is not None:
            raise VLLMValidationError(
                f"thinking_token_budget is not supported with drafts while {SWITCH} is on: leave it out",
                parameter="thinking_token_budget",
            )

    runner._sample = _sample
    wrapper.init_device = init_device
    gpu_model_runner.build_logitsprocs = build_logitsprocs
    worker_base.WorkerBase.__init__ = __init__
    SamplingParams._validate_spec_decode = _validate_spec_decode


def asked(batch: Any, requests: Any) -> list[Asked]:
    """What each row of vLLM's batch was asked for: its text may become as long as its prompt and max_tokens."""
    from truedraw.integrations.vllm.proposer import Asked

    params = [requests[name].sampling_params for name in batch.req_ids]
    prompts = batch.num_prompt_tokens[: len(params)].tolist()
    return [
        Asked(batch.max_model_len, False)
        if one is None
        else Asked(batch.max_model_len if one.max_tokens is None else length + one.max_tokens, one.temperature < _GREEDY)
        for length, one in zip(prompts, params, strict=True)
    ]


def as_block(batch: Any, requests: Any) -> list[bool]:
    """Which requests' drawn drafts are judged together, by what was asked for alone: with a seed the text is that of plain
    decoding; vLLM tells log-probabilities of one draw at each position; and it cuts drafts that a grammar forbids, so that what
    is left of them is no block (its length depends on what was drawn)."""
    params = [requests[name].sampling_params for name in batch.req_ids]
    return [
        one is not None
        and one.temperature >= _GREEDY
        and one.seed is None
        and one.structured_outputs is None
        and one.logprobs is None
        and one.logprob_token_ids is None
        for one in params
    ]


def check_runner(runner: Any, sample: Any) -> None:
    """Raises IncompatibleModels for a model runner that draws with something else than `sample`."""
    if getattr(type(runner), "_sample", None) is not sample:
        raise IncompatibleModels(
            f"{SWITCH} is on, and this platform's model runner, {type(runner).__name__}, draws in its own way: switch the "
            "plug-in off"
        )


def check(vllm_config: Any) -> None:
    """Raises IncompatibleModels for a way to run that the plug-in does not know."""
    if vllm_config.use_v2_model_runner:
        raise IncompatibleModels(
            f"{SWITCH} is on, and vLLM runs its newer model runner, which draws in its own way: set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or switch the plug-in off"
        )
    if vllm_config.speculative_config is not None and vllm_config.scheduler_config.async_scheduling:
        raise IncompatibleModels(
            f"{SWITCH} is on, and drafts are scheduled ahead of the tokens that they follow: start vLLM with "
            "--no-async-scheduling, or switch the plug-in off"
        )
