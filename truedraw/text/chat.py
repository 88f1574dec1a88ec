"""Chat templates: the model's own Jinja source, run in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from truedraw.errors import MissingExtra, TemplateError, UsageError
from truedraw.protocols import Tokenizer

Message = Mapping[str, Any]


def render_chat(tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    """The prompt text for a conversation.

    messages: mappings with "role" and "content". Raises UsageError if the model ships no template
    or a message lacks a field, TemplateError if the template fails.
    """
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise MissingExtra("jinja2", "llamacpp") from None
    if tokenizer.chat_template is None:
        raise UsageError("the model has no chat template: give the prompt as plain text (--raw)")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise UsageError(f"a chat message is {message!r}: mappings with 'role' and 'content' are needed")

    def refuse(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        return environment.from_string(tokenizer.chat_template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            bos_token=tokenizer.bos_text,
            eos_token=tokenizer.eos_text,
            raise_exception=refuse,
            strftime_now=lambda form: datetime.datetime.now().strftime(form),
        )
    except Exception as error:  # a template is the model's code: whatever it raises is its failure
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TemplateError(f"the model's chat template failed ({reason}): give the prompt as plain text (--raw)") from error
