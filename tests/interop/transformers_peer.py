#!/usr/bin/env python3
"""The real peer of `muster convert`: Hugging Face's transformers.

  transformers_peer.py make DIR     tiny random GPT-2 and Llama folders below DIR, as save_pretrained
                                    writes them, each with peer.json: tokens and the logits that
                                    transformers computes for them in fp32
  transformers_peer.py check DIR    loads the folder DIR that Muster wrote and prints the largest
                                    difference to the logits in DIR/muster.json; exit 1 when it
                                    exceeds 1e-4

Needs torch and transformers. The folders under tests/interop/data were made with `make`; the tests
read them without either.
"""

import json
import pathlib
import sys

import torch
import transformers

TOKENS = 11


def logits_of(model, tokens):
    with torch.no_grad():
        return model.float().eval()(torch.tensor([tokens])).logits[0]


def randomise(model):
    """Every tensor random: an identity norm or a zero bias would hide a mistake."""
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 and "bias" not in name else 0.0))


def make(directory):
    gpt2 = transformers.GPT2Config(n_layer=2, n_embd=24, n_head=3, vocab_size=61, n_positions=16)
    llama = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
                 num_key_value_heads=2, vocab_size=61, max_position_embeddings=64,
                 rms_norm_eps=1e-5)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    models = {
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**llama, tie_word_embeddings=False)),
        "llama-tied-scaled": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**llama, tie_word_embeddings=True, rope_theta=500000.0,
                                     rope_scaling=scaling)),
    }
    tokens = [int(t) for t in torch.randint(0, 61, (TOKENS,),
                                            generator=torch.Generator().manual_seed(7))]
    for name, model in models.items():
        randomise(model)
        model.tie_weights()
        folder = pathlib.Path(directory) / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        logits = logits_of(model, tokens)
        (folder / "peer.json").write_text(json.dumps(
            {"transformers": transformers.__version__, "tokens": tokens,
             "logits": [[round(float(v), 7) for v in row] for row in logits]}) + "\n")
        print(f"{folder}: {sum(p.numel() for p in model.parameters())} parameters")


def check(directory):
    folder = pathlib.Path(directory)
    ours = json.loads((folder / "muster.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = logits_of(model, ours["tokens"])
    worst = float((theirs - torch.tensor(ours["logits"])).abs().max())
    print(f"{folder}: largest difference of a logit {worst:.2e}")
    return worst <= 1e-4


if __name__ == "__main__":
    command, target = sys.argv[1:]
    if command == "make":
        make(target)
    else:
        sys.exit(0 if check(target) else 1)
