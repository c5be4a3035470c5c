#!/usr/bin/env python3
"""The loss curve of a small model on real text: Muster as a user runs it, and PyTorch.

  curve_peer.py run --bin BIN --text kjv.txt --work DIR [--family gpt2|mamba2|hybrid] [--device cuda]
                    [--against CURVES.json ...]
  curve_peer.py plot CURVES.json ... OUT.svg

`run` makes the initial weights (a Hugging Face folder), trains from them through coordinator, daemon
and rank, twice with the same spec, and trains transformers' model in PyTorch from the same weights on
the same batches in the same order with the same optimizer and schedule. bf16 on CUDA (fp32 master
weights; in PyTorch: autocast), fp32 on the CPU. Exit code 1 unless the two runs have equal losses to
the last bit, and every curve is within 1 % of every other at each step. DIR/curves.json holds them;
--against adds those of other runs to the comparison. Needs torch and transformers; plot needs
matplotlib.
"""

import argparse
import itertools
import json
import math
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from cluster import Cluster  # noqa: E402

LAYERS, HIDDEN, HEADS, VOCAB, SEQUENCE = 4, 256, 4, 256, 128
# With a higher learning rate single batches make the loss jump, and what follows is chance in every
# precision.
BATCH, SEED, WARMUP, LR, MIN_LR = 16, 11, 100, 5e-4, 5e-5
MODELS = {
    "gpt2": "heads: {heads}",
    "mamba2": "mamba: {{head_width: 64, state: 64}}",
    "hybrid": "pattern: M-M-*-M-, heads: {heads}, kv_heads: 2, ffn: 768, mlp: relu2, positions: none, "
              "mamba: {{head_width: 64, groups: 2, state: 64, step_min: 0.001}}",
}
SPEC = """\
name: {name}
engine:
  model: {{family: {family}, {layers}hidden: {hidden}, {model}, vocab: {vocab},
          sequence_length: {sequence}, initialize_from: initial}}
  data: {{train: [{{path: data/text.train}}]}}
  training:
    steps: {steps}
    global_batch: {batch}
    micro_batch: {batch}
    precision: {precision}
    seed: {seed}
    optimizer: {{adamw: {{lr: {lr}, weight_decay: 0.1, betas: [0.9, 0.95], clip_norm: 1.0}}}}
    schedule: {{cosine: {{warmup_steps: {warmup}, min_lr: {min_lr}}}}}
resources: {{device: {device}, ranks: 1}}
restart: {{max_failures: 0}}
"""


def config_of(family):
    import transformers
    if family == "gpt2":
        return transformers.GPT2Config(n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, vocab_size=VOCAB,
                                       n_positions=SEQUENCE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                       bos_token_id=0, eos_token_id=0)
    common = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if family == "mamba2":
        return transformers.Mamba2Config(num_hidden_layers=LAYERS, num_heads=8, head_dim=64, state_size=64, n_groups=1,
                                         expand=2, chunk_size=64, residual_in_fp32=False, tie_word_embeddings=True,
                                         **common)
    return transformers.NemotronHConfig(
        layers_block_type=["mamba", "mlp", "mamba", "mlp", "attention", "mlp", "mamba", "mlp"], num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=HIDDEN // HEADS, intermediate_size=768, mlp_hidden_act="relu2", mamba_num_heads=8,
        mamba_head_dim=64, ssm_state_size=64, n_groups=2, chunk_size=64, **common)


def decays(name, parameter):
    return parameter.dim() > 1 and "conv1d" not in name


def make_initial(folder, family):
    import torch
    import transformers
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if decays(name, parameter):
                # Not representable in bf16. The first updates are smaller than half of bf16's spacing:
                # from representable weights, no 16-bit copy would change until they add up, and a
                # curve in bf16 would lag behind. From these, some copies change with every update.
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    model.save_pretrained(folder)


def train_muster(cluster, name, options):
    spec = cluster.cwd / f"{name}.yaml"
    spec.write_text(SPEC.format(
        name=name, family=options.family, layers="" if options.family == "hybrid" else f"layers: {LAYERS}, ",
        hidden=HIDDEN, model=MODELS[options.family].format(heads=HEADS), vocab=VOCAB, sequence=SEQUENCE,
        steps=options.steps, batch=BATCH, seed=SEED, lr=LR, min_lr=MIN_LR, warmup=WARMUP,
        precision="bf16" if options.device == "cuda" else "fp32", device=options.device))
    started = time.monotonic()
    cluster.run("submit", spec)
    job = cluster.finish(name, 1200)
    if job["state"] != "succeeded":
        raise AssertionError(f"{name} ended as {job['state']}: {job.get('message')} {job['causes']}\n"
                             + cluster.run("logs", name, check=False).stdout)
    print(f"{name}: {job['steps']} steps in {time.monotonic() - started:.1f} s, "
          f"loss {job['trainLoss']:.4f}, {job['tokensPerSecond']:.0f} tokens/s", flush=True)
    return {int(point["step"]): point["trainLoss"] for point in job["losses"]}


def learning_rate(update, steps):
    if update < WARMUP:
        return LR * update / WARMUP
    progress = min(1.0, (update - WARMUP) / (steps - WARMUP))
    return MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * progress))


def train_torch(work, options):
    import torch
    import transformers
    raw = torch.frombuffer(bytearray((work / "batches").read_bytes()), dtype=torch.int32)
    tokens, targets = raw.long().view(2, options.steps, BATCH, SEQUENCE).to(options.device)
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "initial", dtype=torch.float32)
    model = model.to(options.device).train()
    matrices = [p for name, p in model.named_parameters() if decays(name, p)]
    others = [p for name, p in model.named_parameters() if not decays(name, p)]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8)
    curve = {}
    started = time.monotonic()
    for step in range(1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            logits = model(tokens[step - 1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets[step - 1].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve[step] = loss.item()
    print(f"PyTorch {torch.__version__}: {options.steps} steps in {time.monotonic() - started:.1f} s, "
          f"loss {curve[options.steps]:.4f}", flush=True)
    return curve


def compare(curves):
    """Largest relative difference of any two at any step that both report; False beyond 1 %."""
    within = True
    for (a, first), (b, second) in itertools.combinations(curves.items(), 2):
        steps = sorted(first.keys() & second.keys())
        worst = max(steps, key=lambda s: abs(first[s] - second[s]) / second[s])
        difference = abs(first[worst] - second[worst]) / second[worst]
        last = [abs(first[s] - second[s]) / second[s] for s in steps[-10:]]
        print(f"{a} and {b}: {len(steps)} steps, at most {difference * 100:.3f} % apart (step {worst}: "
              f"{first[worst]:.4f}, {second[worst]:.4f}); mean of the last ten "
              f"{sum(last) / len(last) * 100:.3f} %")
        within &= difference <= 0.01
    return within


def read_curves(path):
    return {name: {int(step): loss for step, loss in curve.items()}
            for name, curve in json.loads(path.read_text()).items()}


def run(options):
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    (work / "data").mkdir(parents=True)
    make_initial(work / "initial", options.family)
    precision = "bf16" if options.device == "cuda" else "fp32"
    family = "" if options.family == "gpt2" else f"{options.family}-"
    names = [f"{family}muster-{options.device}-{precision}", f"{family}muster-{options.device}-{precision}-again"]
    curves = {}
    with Cluster(options.bin, work / "home", cwd=work, workers=1, slots=1) as cluster:
        cluster.run("data", "tokenize", "--input", options.text.resolve(), "--output", work / "data" / "text",
                    "--tokenizer", "bytes", "--split", "train=0.99,validation=0.01")
        for name in names[:options.runs]:
            curves[name] = train_muster(cluster, name, options)
    if not options.alone:
        subprocess.run([options.bin / "interop_model_peer", "batches", work / "data" / "text.train",
                        work / "batches", "--sequence", str(SEQUENCE), "--vocab", str(VOCAB),
                        "--batch", str(BATCH), "--steps", str(options.steps), "--seed", str(SEED)],
                       check=True)
        curves[f"{family}pytorch-{options.device}-{precision}"] = train_torch(work, options)
    equal = options.runs < 2 or curves[names[0]] == curves[names[1]]
    if options.runs > 1:
        print(f"the same spec twice: losses {'equal to the last bit' if equal else 'DIFFER'}")
        curves.pop(names[1])
    (work / "curves.json").write_text(json.dumps(curves))
    for other in options.against:
        curves.update(read_curves(other))
    return equal and compare(curves)


def plot(files):
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "muster"
    import matplotlib.pyplot as pyplot
    curves = {}
    for path in files[:-1]:
        curves.update(read_curves(path))
    styles = itertools.cycle(["-", "--", ":", "-."])
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, curve in sorted(curves.items()):
        axes.plot(list(curve), list(curve.values()), next(styles), label=name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="training loss, nats per byte",
             title=f"{LAYERS} blocks of {HIDDEN}, King James Bible")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(files[-1], metadata={"Date": None})
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--bin", required=True, type=pathlib.Path)
    runner.add_argument("--text", required=True, type=pathlib.Path)
    runner.add_argument("--work", required=True, type=pathlib.Path)
    runner.add_argument("--family", choices=tuple(MODELS), default="gpt2")
    runner.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    runner.add_argument("--steps", type=int, default=300)
    runner.add_argument("--runs", type=int, default=2)
    runner.add_argument("--alone", action="store_true", help="without PyTorch's curve")
    runner.add_argument("--against", nargs="*", type=pathlib.Path, default=[])
    plotter = commands.add_parser("plot")
    plotter.add_argument("files", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    return 0 if (run(options) if options.command == "run" else plot(options.files)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AssertionError, RuntimeError) as problem:
        print(f"curve: {problem}", file=sys.stderr)
        sys.exit(1)
