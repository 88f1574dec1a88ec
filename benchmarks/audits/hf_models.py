"""The demo model as transformers saves it, and a draft model of it: python hf_models.py DEMO.gguf FOLDER

FOLDER/hf has its weights in float32, FOLDER/hf-draft the same rounded to four bits in blocks of 32, with the final norm scaled
by 0.8 as in models.py. Runs in an environment with torch, transformers, gguf and accelerate.
"""

import sys
from pathlib import Path

import torch
import transformers


def main() -> None:
    demo, folder = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.parent, gguf_file=demo.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo.parent, gguf_file=demo.name, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    save(model, tokenizer, folder / "hf")
    with torch.no_grad():
        model.model.norm.weight.mul_(0.8)
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "layers" in name:
                blocks = weight.view(len(weight), -1, 32)
                scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7
                blocks.copy_((blocks / scale).round().clamp(-8, 7) * scale)
    save(model, tokenizer, folder / "hf-draft")


def save(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


main()
