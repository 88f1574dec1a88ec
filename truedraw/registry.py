"""Strings to models, drafters and rules. Heavy imports happen inside the functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from truedraw import kernels, profile
from truedraw.drafters.corpus import Corpus
from truedraw.errors import ConversionError, IncompatibleModels, InvalidParameter, RunnerError
from truedraw.protocols import Drafter, ModelRunner, Tokenizer, TokenMatrices
from truedraw.verify import Rule, block, coupled, family, lossy, multidraft, token, traversal

if TYPE_CHECKING:
    from truedraw.drafters.translation import Translation

RULES: dict[str, Rule] = {
    "block": block.verify,
    "coupled": coupled.verify,
    "multidraft": multidraft.verify,
    "resample_from_target": family.resample_from_target,
    "token": token.verify,
    "traversal": traversal.verify,
}
"""The exact rules."""

TREE_RULES = frozenset({"coupled", "multidraft", "traversal"})

LOSSY_RULES: dict[str, Callable[..., Rule]] = {
    "biased_resample": lambda: lossy.biased_resample,
    "lenience": lossy.lenience,
    "thresholds": lossy.thresholds,
    "typical": lossy.typical,
}
"""Factories of the rules that change the law; their numbers follow the name, as in lenience:0.5."""

MAX_F32_BYTES = 1_000_000_000
"""Larger models are not written out as f32 just to be compared with."""

DRAFTERS = ("none", "suffix", "ngram", "model", "tree", "mtp", "random")
MODELS = (
    "a path to a GGUF file, smollm2[:f32|bf16|q8_0|q4_0], hub:ORG/REPO[:FILE], toy, or, run by transformers, hf:FOLDER, "
    "hf:FILE.gguf, hf:ORG/NAME or hf:smollm2 (@bf16 or @f32 may follow)"
)


TRANSFORMERS = "hf:"
"""How the names of models begin that transformers runs."""

Measure: TypeAlias = Callable[[], Callable[[int], float]]
"""Measures a model, and answers with the seconds of a pass by its size."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is held.

    context     tokens per slot; None: what the model was trained for, 4096 at most
    clip_context  a context beyond the trained one is cut to it instead of refused (draft models:
                they stop drafting where their window ends)
    slots       sequences at a time
    threads     None: as `truedraw profile` found fastest for this model here, else all cores
    threads_small  for passes of one token; None: likewise, or as `threads` where that is given
    kv_type     f16, bf16, f32 or q8_0
    kv_unified  one cache shared by all slots (ragged batches in one pass), or a stream for each
    flash_attention  as LlamaCppRunner has it
    device      cpu, or cuda for models that transformers runs
    """

    context: int | None = None
    slots: int = 1
    threads: int | None = None
    threads_small: int | None = None
    kv_type: str = "f16"
    kv_unified: bool = True
    clip_context: bool = False
    flash_attention: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("context", "slots", "threads", "threads_small"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidParameter(name, value, "an integer >= 1")
        if self.kv_type not in ("f16", "bf16", "f32", "q8_0"):
            raise InvalidParameter("kv_type", self.kv_type, "f16, bf16, f32 or q8_0")
        if self.device not in ("cpu", "cuda"):
            raise InvalidParameter("device", self.device, "cpu or cuda")

    def refuse_all_but(self, names: Collection[str], whose: str) -> None:
        """Raises InvalidParameter if an option that is not among `names` was given."""
        for default in fields(self):
            if default.name not in names and getattr(self, default.name) != default.default:
                raise InvalidParameter(default.name, getattr(self, default.name), f"{default.default} only, for {whose}")


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model.

    path     the GGUF file that llama.cpp loaded it from; None: it was made up, or is transformers' own
    machine  what the best number of threads depends on, by name; empty: nothing is kept
    """

    name: str
    runner: ModelRunner
    tokenizer: Tokenizer
    path: Path | None = None
    machine: Mapping[str, str] = field(default_factory=dict)


def load_model(spec: str, options: LoadOptions, on_progress: Callable[[str], None] | None = None) -> Model:
    """Load what `spec` names: see MODELS. Raises ModelNotFound, ModelFileError, MissingExtra.

    on_progress is told, in a few words, of anything that takes seconds.
    """
    if spec == "toy":
        from truedraw.runners.toy import ByteTokenizer, ToyRunner, toy_language

        options.refuse_all_but(("context", "slots", "clip_context"), "the toy model")
        tokenizer = ByteTokenizer()
        runner = ToyRunner(toy_language(), tokenizer.vocab_size, num_slots=options.slots, max_length=options.context or 4096)
        return Model(spec, runner, tokenizer)
    say = on_progress or (lambda message: None)
    if spec.startswith(TRANSFORMERS):
        return _load_transformers(spec, options, say)
    options.refuse_all_but({option.name for option in fields(options)} - {"device"}, "models that llama.cpp runs")
    from truedraw.runners import gguf, llamacpp

    return _load_file(spec, gguf.locate(spec, llamacpp.quantise, say), options, say)


def _load_file(name: str, path: Path, options: LoadOptions, say: Callable[[str], None]) -> Model:
    from truedraw.runners import llamacpp

    machine = llamacpp.machine(path)
    options = _with_kept_threads(options, machine, say)
    with kernels.warming(say):  # beside the load, once there is a file; a toy's vocabulary gains nothing
        llama = llamacpp.LlamaCppRunner(
            path,
            context=options.context,
            num_slots=options.slots,
            threads=options.threads,
            threads_small=options.threads_small,
            kv_type=options.kv_type,
            kv_unified=options.kv_unified,
            clip_context=options.clip_context,
            flash_attention=options.flash_attention,
        )
    return Model(name, llama, llama.tokenizer, path, machine)


def _load_transformers(spec: str, options: LoadOptions, say: Callable[[str], None]) -> Model:
    options.refuse_all_but(
        ("context", "slots", "threads", "threads_small", "clip_context", "device"), "models that transformers runs"
    )
    from truedraw.runners import transformers, transformers_files

    name, dtype = transformers_files.parse(spec.removeprefix(TRANSFORMERS))
    with kernels.warming(say):
        source, loaded, tokenizer = transformers_files.load(name, dtype, options.device, say)
        weights = {**source.identity(), "weights": str(loaded.dtype).removeprefix("torch.")}
        machine = {**weights, **transformers.machine(loaded.device)}
        options = _with_kept_threads(options, machine, say)
        runner = transformers.TransformersRunner(
            loaded,
            context=options.context,
            num_slots=options.slots,
            threads=options.threads,
            threads_small=options.threads_small,
            clip_context=options.clip_context,
            identity=source.identity(),
        )
    return Model(spec, runner, tokenizer, machine=machine)


def _with_kept_threads(options: LoadOptions, machine: Mapping[str, str], say: Callable[[str], None]) -> LoadOptions:
    """With the threads that were found fastest here, unless some are asked for."""
    if options.threads is not None or options.threads_small is not None:
        return options
    choice, notice = profile.load_threads(machine)
    if notice is not None:
        say(notice)
    return options if choice is None else replace(options, threads=choice.large, threads_small=choice.small)


def keep_threads(model: Model, choice: profile.ThreadChoice) -> None:
    """Let later loads of this model, whatever their other options, take these threads."""
    if model.machine:
        profile.store_threads(choice, model.machine)


@contextmanager
def f32_twin(model: Model, options: LoadOptions, say: Callable[[str], None]) -> Iterator[Model]:
    """The very weights of `model` as f32 numbers, with an f32 KV cache and plain attention.

    Where llama.cpp's file holds other weights, a copy lies in the cache directory for as long as this takes; transformers
    loads its own anew. Raises ConversionError where there can be none: no file, a copy larger than MAX_F32_BYTES, no
    room for it.
    """
    if model.name.startswith(TRANSFORMERS):
        with _f32_transformers(model, options, say) as twin:
            yield twin
        return
    from truedraw.runners import gguf, llamacpp

    options = replace(options, kv_type="f32", flash_attention=False)
    if model.path is None or not isinstance(model.runner, llamacpp.LlamaCppRunner):
        raise ConversionError(f"{model.name} has no weights in a file")
    with ExitStack() as stack:
        path = model.path
        if not model.runner.has_f32_weights:
            _check_f32_size(model.name, model.runner.num_parameters)
            size = 4 * model.runner.num_parameters / 1e6
            say(f"writing {model.name} as f32, {size:.0f} MB, for as long as rows are compared with it")
            path = stack.enter_context(gguf.as_f32(path, llamacpp.quantise))
        twin = _load_file(f"{model.name} as f32", path, options, say)
        stack.callback(twin.runner.close)
        yield twin


@contextmanager
def _f32_transformers(model: Model, options: LoadOptions, say: Callable[[str], None]) -> Iterator[Model]:
    from truedraw.runners import transformers, transformers_files

    assert isinstance(model.runner, transformers.TransformersRunner)
    _check_f32_size(model.name, model.runner.num_parameters)
    name, _ = transformers_files.parse(model.name.removeprefix(TRANSFORMERS))
    twin = load_model(f"{TRANSFORMERS}{name}@f32", options, say)
    try:
        yield twin
    finally:
        twin.runner.close()


def _check_f32_size(name: str, num_parameters: int) -> None:
    if (size := 4 * num_parameters) > MAX_F32_BYTES:
        raise ConversionError(f"{name} takes {size / 1e9:.1f} GB as f32, and at most {MAX_F32_BYTES / 1e9:g} GB are written")


def check_takes_corpus(drafter: str) -> None:
    """Raises InvalidParameter if no part of that drafter copies from a corpus."""
    if "suffix" not in drafter.split("+"):
        raise InvalidParameter("drafter", drafter, "suffix, or names joined by + with suffix among them, where a corpus is given")


@dataclass(slots=True)
class Made:
    """What drafters are made for and of, and those that were made: several names may stand for shared parts.

    measure  what passes of the draft model take, asked once it is known to fit
    corpus   what `suffix` copies from besides
    kept     and of each owner what it alone may copy from
    mtp_modules  the file that `mtp` drafts with, or the folder of a checkpoint that ships a module; None: the file that is
             shipped for the demo model
    say      is told what a user should know of them
    """

    target: Model
    draft: Model | None = None
    measure: Measure | None = None
    corpus: Corpus | None = None
    kept: Mapping[str, Corpus] = field(default_factory=dict)
    mtp_modules: Path | None = None
    say: Callable[[str], None] = lambda message: None
    drafters: dict[str, Drafter] = field(default_factory=dict)


def make_drafter(name: str, made: Made) -> Drafter:
    """`name`: one of DRAFTERS, or several joined by + (drafters/chain.py). Raises InvalidParameter."""
    if name not in made.drafters:
        made.drafters[name] = _new_drafter(name, made)
    return made.drafters[name]


def _new_drafter(name: str, made: Made) -> Drafter:
    if "+" in name:
        from truedraw.drafters.chain import ChainDrafter

        return ChainDrafter([make_drafter(part, made) for part in name.split("+")])
    vocab_size = made.target.runner.vocab_size
    match name:
        case "none":
            from truedraw.drafters.none import NoDrafter

            return NoDrafter()
        case "suffix":
            from truedraw.drafters.suffix import SuffixDrafter

            return SuffixDrafter(corpus=made.corpus, kept=made.kept)
        case "ngram":
            from truedraw.drafters.ngram import NGramDrafter

            return NGramDrafter()
        case "random":
            from truedraw.drafters.random import RandomDrafter

            return RandomDrafter(vocab_size)
        case "model" | "tree":
            from truedraw.drafters.model import ModelDrafter

            if made.draft is None:
                raise InvalidParameter(
                    "drafter", name, "suffix, ngram, random or none without a draft model (--draft-model names one)"
                )
            translation, width = _translation(made.target, made.draft, made.say), 2 if name == "tree" else 1
            pass_seconds = None if made.measure is None else made.measure()
            return ModelDrafter(
                made.draft.runner, vocab_size, width=width, translation=translation, pass_seconds=pass_seconds
            )  # fmt: skip
        case "mtp":
            return _mtp_drafter(made)
    raise InvalidParameter("drafter", name, f"auto, {', '.join(DRAFTERS)}, or several of them joined by +")


def _translation(target: Model, draft: Model, say: Callable[[str], None]) -> Translation | None:
    """None: both have one vocabulary. Raises IncompatibleModels where they share too little."""
    from truedraw.drafters.model import check_same_vocabulary
    from truedraw.drafters.translation import translated

    try:
        check_same_vocabulary(target.tokenizer, draft.tokenizer)
        return None
    except IncompatibleModels:
        translation, share = translated(target.tokenizer, draft.tokenizer, draft.runner, (target.name, draft.name))
    shared = f"{len(translation.target_ids):,} shared tokens, {share:.0%} of its mass"
    say(f"{draft.name} has another tokenizer than {target.name}: it drafts on {shared}")
    return translation


def _mtp_drafter(made: Made) -> Drafter:
    """Raises UsageError where the modules do not fit the target, or where the target tells too little of itself."""
    from truedraw.drafters import mtp, mtp_modules

    path = made.mtp_modules or mtp_modules.SHIPPED
    runner, name = made.target.runner, made.target.name
    if "final" not in runner.hidden_layers:
        raise IncompatibleModels(f"the runner of {name} hands out no final hidden states, which mtp reads: take another drafter")
    weights = None if path.is_dir() else mtp_modules.load(path)
    try:
        matrices = runner.token_matrices()
    except RunnerError as error:
        raise IncompatibleModels(f"mtp needs the embeddings and the output matrix of {name}: {error}") from error
    if weights is None:
        from truedraw.runners import transformers_mtp

        def check(embedding: Any, whose: str) -> TokenMatrices:
            mtp_modules.check_trained_with(embedding, matrices, whose, name)
            return matrices

        return mtp.MtpDrafter(transformers_mtp.load(path, check))
    mtp_modules.check_fits(weights, matrices, name)
    return mtp.MtpDrafter(mtp_modules.MtpModule(weights, matrices))


def check_takes_modules(drafter: str) -> None:
    """Raises InvalidParameter if no part of that drafter reads MTP modules."""
    if "mtp" not in drafter.split("+"):
        raise InvalidParameter("drafter", drafter, "mtp, or names joined by + with mtp among them, where MTP modules are given")


def find_rule(name: str, *, allow_lossy: bool = False) -> Rule:
    """The rule of that name; lossy ones take numbers, as in "lenience:0.5" or "typical:0.3,0.09".

    Raises InvalidParameter for an unknown name, and for a lossy rule that was not allowed.
    """
    base, colon, numbers = name.partition(":")
    if base in RULES and not colon:
        return RULES[base]
    if base not in LOSSY_RULES:
        known = f"auto, {', '.join(sorted(RULES))}, or, where lossy rules are allowed, {', '.join(sorted(LOSSY_RULES))}"
        raise InvalidParameter("rule", name, known)
    if not allow_lossy:
        raise InvalidParameter(
            "rule", name, "an exact rule: this one changes the law of the answer, and has to be allowed (--allow-lossy)"
        )
    try:
        return LOSSY_RULES[base](*(float(number) for number in numbers.split(",") if colon))
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidParameter):
            raise
        raise InvalidParameter(
            "rule", name, "biased_resample, lenience:L, thresholds:ACCEPT,SINGLE or typical:EPSILON,DELTA"
        ) from None
