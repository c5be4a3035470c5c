#!/usr/bin/env python3
"""Logits and every gradient of our models beside PyTorch's, on small models of odd sizes.

  gradients_peer.py --peer BIN/interop_model_peer --muster BIN/muster --work DIR [--device cuda]

For each model: transformers makes it with random weights, Muster reads its folder. The reference is
transformers in fp64 on the CPU, also where its code asks for fp32 (as its scans and norms do). An error is |x - reference| / |reference| over a whole tensor (of the
logits, or of one parameter's gradient); ours may be at most twice that of transformers itself in the
same precision on the same device (plus 1e-6 of slack in fp32, for sums in another order). On CUDA
that is done in fp32 and bf16, on the CPU in fp32 (the host's kernels compute in fp32 alone).

Our gradients come back as a model folder, which transformers loads; and `muster convert` turns
each model into a checkpoint and back, after which transformers must give the same logits to the bit.
Exit code 1 when anything is beyond its bound. Needs torch and transformers.
"""

import argparse
import copy
import json
import pathlib
import shutil
import subprocess
import sys

import torch
import transformers

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
# name, config, batch, sequence
MODELS = [
    ("gpt2, heads of 20, 211 tokens",
     transformers.GPT2Config(n_layer=3, n_embd=60, n_head=3, vocab_size=211, n_positions=64, bos_token_id=0, eos_token_id=0), 3, 37),
    ("gpt2, heads of 64, 1001 tokens",
     transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1001, n_positions=160, bos_token_id=0, eos_token_id=0), 2, 130),
    ("llama, 6 heads on 2, heads of 20",
     transformers.LlamaConfig(hidden_size=120, intermediate_size=88, num_hidden_layers=3,
                              num_attention_heads=6, num_key_value_heads=2, vocab_size=211,
                              max_position_embeddings=64, tie_word_embeddings=False,
                              rms_norm_eps=1e-5), 3, 37),
    ("llama, 8 heads on 2, heads of 32, tied, scaled",
     transformers.LlamaConfig(hidden_size=256, intermediate_size=680, num_hidden_layers=4,
                              num_attention_heads=8, num_key_value_heads=2, vocab_size=1001,
                              max_position_embeddings=160, tie_word_embeddings=True,
                              rope_theta=500000.0, rope_scaling=LLAMA3, rms_norm_eps=1e-5), 2, 129),
    ("mamba2, 6 heads of 20, state 24, one group",
     transformers.Mamba2Config(hidden_size=60, num_hidden_layers=3, expand=2, num_heads=6, head_dim=20, n_groups=1,
                               state_size=24, chunk_size=16, vocab_size=211, tie_word_embeddings=True), 3, 37),
    # transformers before 5.23 normalises over the whole width whatever the groups.
    ("mamba2, 8 heads of 64, state 128, 2 groups, an own head",
     transformers.Mamba2Config(hidden_size=256, num_hidden_layers=2, expand=2, num_heads=8, head_dim=64, n_groups=2,
                               state_size=128, chunk_size=64, vocab_size=1001, tie_word_embeddings=False), 2, 130),
    ("nemotron-h, 6 heads of 8 in 2 groups, 6 on 2 of attention, squared ReLU",
     transformers.NemotronHConfig(hidden_size=60, layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp"],
                                  num_attention_heads=6, num_key_value_heads=2, head_dim=20, intermediate_size=88,
                                  mlp_hidden_act="relu2", mamba_num_heads=6, mamba_head_dim=8, n_groups=2,
                                  ssm_state_size=24, chunk_size=16, time_step_min=0.5, vocab_size=211,
                                  max_position_embeddings=64), 3, 37),
    ("nemotron-h, 8 heads of 64 in 2 groups, 4 on 2 of attention, squared ReLU",
     transformers.NemotronHConfig(hidden_size=256, layers_block_type=["mamba", "mlp", "attention", "mlp", "mamba"],
                                  num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=768,
                                  mlp_hidden_act="relu2", mamba_num_heads=8, mamba_head_dim=64, n_groups=2,
                                  ssm_state_size=128, chunk_size=64, vocab_size=1001, tie_word_embeddings=True,
                                  max_position_embeddings=160), 2, 130),  # transformers ties nothing in it
]


def make(config, seed):
    torch.manual_seed(seed)
    config = copy.deepcopy(config)
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Every tensor random: an identity norm or a zero bias would hide a mistake.
            if parameter.dim() == 1:
                centre = 0.0 if "bias" in name else 1.0
                parameter.copy_(centre + 0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                scale = 0.5 if "conv1d" in name else 0.06
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.tie_weights()
    return model.eval()


class InDouble:
    """While it is entered, fp32 is fp64 for the code of transformers' models."""

    class Torch:
        float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    def __init__(self, model):
        self.module = sys.modules[type(model).__module__]
        self.to_float = torch.Tensor.float

    def __enter__(self):
        self.module.torch = self.Torch()
        torch.Tensor.float = torch.Tensor.double

    def __exit__(self, *_):
        self.module.torch = torch
        torch.Tensor.float = self.to_float


def differentiate(model, tokens, targets):
    """Logits, loss and gradients by name, all in fp64 on the CPU."""
    model.zero_grad(set_to_none=True)
    logits = model(tokens).logits
    work = logits.double() if logits.dtype == torch.float64 else logits.float()
    loss = torch.nn.functional.cross_entropy(work.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss.backward()
    return (logits.detach().double().cpu().flatten(0, 1), loss.item(),
            {name: p.grad.detach().double().cpu() for name, p in model.named_parameters()})


def ours(options, folder, batch, dtype, out):
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run([options.peer, "gradients", folder, batch, out, "--device", options.device,
                    "--dtype", dtype], check=True)
    raw = torch.frombuffer(bytearray((out / "logits.f32").read_bytes()), dtype=torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    gradients = {name: p.detach().double() for name, p in loaded.named_parameters()}
    return raw.double(), json.loads((out / "loss.json").read_text())["loss"], gradients


def error(value, reference):
    value = value.reshape(reference.shape)
    return float((value - reference).norm() / reference.norm())


def compare(what, mine, theirs, reference, slack):
    """Prints the worst tensors; the number of those beyond the bound."""
    rows = [("logits", error(mine[0], reference[0]), error(theirs[0], reference[0]))]
    assert mine[2].keys() == reference[2].keys(), mine[2].keys() ^ reference[2].keys()
    for name, gradient in reference[2].items():
        rows.append((name, error(mine[2][name], gradient), error(theirs[2][name], gradient)))
    beyond = [row for row in rows if not row[1] <= 2 * row[2] + slack]
    ratios = sorted((row[1] / row[2] for row in rows[1:]))
    worst = max(rows[1:], key=lambda row: row[1] / row[2])
    print(f"{what}: logits {rows[0][1]:.1e} (PyTorch {rows[0][2]:.1e}), {len(rows) - 1} gradients: "
          f"median {sorted(r[1] for r in rows[1:])[len(rows) // 2]:.1e}, ratio to PyTorch's error median "
          f"{ratios[len(ratios) // 2]:.2f}, worst {ratios[-1]:.2f} ({worst[0]}: {worst[1]:.1e}, {worst[2]:.1e}); "
          f"loss {mine[1]:.6f}, {theirs[1]:.6f}, fp64 {reference[1]:.6f}", flush=True)
    for row in beyond:
        print(f"  BEYOND twice: {row[0]}: {row[1]:.2e}, PyTorch {row[2]:.2e}")
    return len(beyond)


def convert(options, folder, work, model, tokens):
    """There and back through a checkpoint: transformers gives the same logits."""
    for name in ("checkpoint", "exported"):
        shutil.rmtree(work / name, ignore_errors=True)
    run = [options.muster, "convert"]
    subprocess.run([*run, folder, work / "checkpoint"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*run, work / "checkpoint" / "imported" / "step-00000000.e0", work / "exported",
                    "--dtype", "fp32"], check=True, stdout=subprocess.DEVNULL)
    # In what chunks transformers scans is no part of a model here, and rounds differently.
    chunks = {"chunk_size": model.config.chunk_size} if hasattr(model.config, "chunk_size") else {}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(work / "exported", dtype=torch.float32, **chunks)
    with torch.no_grad():
        found, wanted = loaded.eval()(tokens).logits, model(tokens).logits
    same = torch.equal(found, wanted)
    print("  exported by muster convert, loaded by transformers: logits "
          + ("equal" if same else f"DIFFER by {error(found, wanted):.1e}"))
    return 0 if same else 1


def check(options, number, title, config, batch, sequence):
    work = options.work / str(number)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model = make(config, 100 + number)
    model.save_pretrained(work / "model")
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, config.vocab_size, (batch, sequence), generator=generator)
    targets = torch.randint(0, config.vocab_size, (batch, sequence), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.1] = -1
    (work / "batch.json").write_text(json.dumps(
        {"batch": batch, "sequence": sequence, "tokens": tokens.flatten().tolist(),
         "targets": targets.flatten().tolist()}))
    bad = convert(options, work / "model", work, model, tokens)
    with InDouble(model):
        reference = differentiate(copy.deepcopy(model).double(), tokens, targets)
    on = (tokens.to(options.device), targets.to(options.device))
    for dtype in ("fp32", "bf16") if options.device == "cuda" else ("fp32",):
        precision = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        theirs = differentiate(copy.deepcopy(model).to(options.device, precision), *on)
        mine = ours(options, work / "model", work / "batch.json", dtype, work / dtype)
        bad += compare(f"{title}, {dtype}", mine, theirs, reference, 1e-6 if dtype == "fp32" else 0)
    return bad


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, type=pathlib.Path)
    parser.add_argument("--muster", required=True, type=pathlib.Path)
    parser.add_argument("--work", required=True, type=pathlib.Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.device}")
    bad = sum(check(options, number, *item) for number, item in enumerate(MODELS))
    print("every error is within twice PyTorch's" if bad == 0 else f"{bad} BEYOND the bound")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
