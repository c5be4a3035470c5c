#!/usr/bin/env python3
"""Makes the folders under tests/interop/data with Hugging Face's transformers.

  transformers_peer.py DIR     tiny random folders of each family below DIR, as save_pretrained
                               writes them, each with peer.json: tokens and the logits that
                               transformers computes for them in fp32

Needs torch and transformers; the tests read the folders without either. The other direction, folders of
ours in transformers, is checked by gradients_peer.py.
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
    # One group, as published models have: transformers 5.17 normalises over the whole width whatever the
    # groups, and Mamba-2 over each of them. The state has another width than a head.
    mamba2 = transformers.Mamba2Config(
        hidden_size=24, num_hidden_layers=2, expand=2, num_heads=6, head_dim=8, n_groups=1,
        state_size=5, vocab_size=61, chunk_size=4, tie_word_embeddings=True)
    # Heads that are wider together than the hidden state, two groups, and steps that the limit cuts.
    nemotron_h = transformers.NemotronHConfig(
        hidden_size=24, layers_block_type=["linear_attention", "mlp", "full_attention",
                                           "linear_attention", "mlp"],
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, intermediate_size=40,
        mamba_num_heads=6, mamba_head_dim=8, n_groups=2, ssm_state_size=5, chunk_size=4,
        time_step_min=0.5, vocab_size=61, max_position_embeddings=64, tie_word_embeddings=False)
    models = {
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**llama, tie_word_embeddings=False)),
        "llama-tied-scaled": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**llama, tie_word_embeddings=True, rope_theta=500000.0,
                                     rope_scaling=scaling)),
        "mamba2": transformers.Mamba2ForCausalLM(mamba2),
        "nemotron-h": transformers.NemotronHForCausalLM(nemotron_h),
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


if __name__ == "__main__":
    make(*sys.argv[1:])
