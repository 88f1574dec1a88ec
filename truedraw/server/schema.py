"""What clients may send: OpenAI's fields, those of vLLM that are about sampling, and `speculation`.

Every field either has its effect, or has none by its nature, or is refused by name. Unknown ones too, unless
their value says nothing (null, an empty list or object).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from truedraw.server.errors import ApiError
from truedraw.types import SamplingParams

MAX_TOP_LOGPROBS = 20
_MAX_INTEGER = 2**63 - 1

Count = Annotated[int, Field(ge=0, le=_MAX_INTEGER)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(max_length=4_000_000)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are accepted with these values only, because they then change nothing; (): with any value."""

    def refuse_unknown(self, where: str = "") -> None:
        """Raises ApiError for a field that would change the answer and is not supported."""
        for name, value in (self.model_extra or {}).items():
            allowed = self.neutral.get(name)
            if value is None or value == [] or value == {} or allowed == () or (allowed and value in allowed):
                continue
            shown = "" if not allowed else f"; {', '.join(map(repr, allowed))} would be"
            raise ApiError(
                400,
                f"{where}{name[:100]} is not supported{' with this value' if allowed else ''}{shown}: leave it out",
                param=where + name[:100],
                code="unsupported_value" if allowed else "unknown_parameter",
            )


class Speculation(_Strict):
    """How the answer is drafted. Whatever is chosen here changes its speed, never its law, but for lossy rules."""

    drafter: str | None = Field(None, description="One of the names that /v1/models lists.")
    max_draft: Count | None = Field(None, description="Draft at most so many tokens in a step.")
    rule: str | None = Field(None, description="One of the names that /v1/models lists.")
    off: bool = Field(False, description="Plain decoding.")
    trace: bool = Field(False, description="Tell the steps, and of each token its origin, p and q.")
    alternatives: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = Field(0, description="Likely tokens told with each.")


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Changes nothing here: see --steady-stream.")


class JsonSchema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="It is always strict.")


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Part(_Strict):
    """A part of a message."""

    type: str
    text: Text | None = None


class Message(_Strict):
    neutral = {"refusal": (), "annotations": (), "audio": (None,), "tool_calls": (None,), "function_call": (None,)}

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None

    def plain(self, place: int) -> dict[str, str]:
        """As chat templates have it."""
        self.refuse_unknown(f"messages[{place}].")
        parts = [] if self.content is None or isinstance(self.content, str) else self.content
        for part in parts:
            if part.type != "text" or part.text is None:
                message = f"messages[{place}].content has a part of type {part.type[:50]!r}: text parts are supported"
                raise ApiError(400, message, param="messages", code="unsupported_value")
        text = self.content if isinstance(self.content, str) else "".join(part.text or "" for part in parts)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text, **({"name": self.name} if self.name is not None else {})}


class _Sampled(_Strict):
    """The fields that both endpoints share."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        name: ()
        for name in (
            "user",
            "metadata",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "service_tier",
            "prediction",
        )
    }

    model: Annotated[str, Field(max_length=1000)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INTEGER)] | None = Field(None, description="0 and -1 keep all.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = Field(None, description="Over prompt and output; 1 is off.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_INTEGER)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    speculation: Speculation | None = None

    def checked(self) -> None:
        """Raises ApiError."""
        self.refuse_unknown()
        for name in ("speculation", "stream_options"):
            part = getattr(self, name)
            if part is not None:
                part.refuse_unknown(f"{name}.")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options goes with stream: true", param="stream_options")

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        """Raises InvalidParameter."""
        given = {
            name: value
            for name in (
                "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
                "min_tokens", "ignore_eos", "n",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        return SamplingParams(
            **given,
            top_k=max(self.top_k or 0, 0),
            logit_bias={_token_id(token): float(bias) for token, bias in (self.logit_bias or {}).items()},
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            seed=None if self.seed is None else self.seed % 2**64,
            max_tokens=max_tokens,
        )


def _token_id(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 10:
        raise ApiError(400, f"logit_bias has the key {text[:50]!r}: token ids are needed", param="logit_bias")
    return int(text)


class ChatRequest(_Sampled):
    """POST /v1/chat/completions."""

    neutral = {
        **_Sampled.neutral,
        "parallel_tool_calls": (),
        "tool_choice": ("none",),
        "function_call": ("none",),
        "store": (False,),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "echo": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "use_beam_search": (False,),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None

    def checked(self) -> None:
        super().checked()
        if self.response_format is not None:
            check_format(self.response_format)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs goes with logprobs: true", param="top_logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them", param="max_completion_tokens")

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are told with each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Sampled):
    """POST /v1/completions."""

    neutral = {
        **_Sampled.neutral,
        "best_of": (1,),
        "suffix": ("",),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "add_special_tokens": (True,),
        "use_beam_search": (False,),
    }

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None

    def checked(self) -> None:
        super().checked()
        if self.response_format is not None:
            check_format(self.response_format)

    @property
    def limit(self) -> int | None:
        """OpenAI's default of this endpoint is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else prompt


def check_format(format: ResponseFormat) -> None:
    """Raises ApiError."""
    format.refuse_unknown("response_format.")
    if (format.type == "json_schema") != (format.json_schema is not None):
        raise ApiError(400, "response_format has a json_schema exactly when its type is json_schema", param="response_format")
    if format.json_schema is not None:
        format.json_schema.refuse_unknown("response_format.json_schema.")
        if format.json_schema.schema_ is None:
            raise ApiError(400, "response_format.json_schema has no schema: give one", param="response_format")


def parse(kind: type[ChatRequest] | type[CompletionRequest], value: Any) -> ChatRequest | CompletionRequest:
    """Raises ApiError, for the first field that is wrong."""
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}: an object is needed")
    try:
        request = kind.model_validate(value)
    except ValidationError as error:
        raise _first(error) from None
    request.checked()
    return request


def _first(error: ValidationError) -> ApiError:
    details = error.errors(include_url=False, include_context=False)
    first = details[0]
    place = ".".join(
        str(part) for part in first["loc"] if isinstance(part, int) or not part.startswith(("str", "list[", "function"))
    )
    place = place.removesuffix(".Part")[:200]
    given = repr(first.get("input"))
    shown = "" if first["type"] == "missing" or len(given) > 60 else f" ({given} was given)"
    code = "missing_required_parameter" if first["type"] == "missing" else None
    return ApiError(
        400,
        f"{place}: {first['msg']}{shown}".encode("ascii", "backslashreplace").decode(),
        param=place.partition(".")[0],
        code=code,
    )
