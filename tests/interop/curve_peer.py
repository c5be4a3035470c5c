#!/usr/bin/env python3
"""The loss curve of a small model on real text: Muster as a user runs it, and PyTorch.

  curve_peer.py run --bin BIN --text kjv.txt --work DIR [--family gpt2|mamba2|hybrid] [--size 130m]
                    [--device cuda] [--ranks N --parallel "tensor: 2"] [--against CURVES.json ...]
  curve_peer.py plot CURVES.json ... OUT.svg

`run` makes the initial weights (a Hugging Face folder), trains from them through coordinator, daemon
and rank, twice with the same spec, and trains transformers' model in PyTorch from the same weights on
the same batches in the same order with the same optimizer and schedule. bf16 on CUDA (fp32 master
weights; in PyTorch: autocast) unless --precision says otherwise, fp32 on the CPU. Then `muster convert`
makes a Hugging Face folder of the last checkpoint, and transformers must give its logits as Muster does.
Exit code 1 unless it does, the two runs have equal losses to the last bit, and every curve is within
1 % of every other at each step. DIR/curves.json holds them; --against adds those of other runs to the
comparison. Needs torch and transformers; plot needs matplotlib.

--size 130m takes mamba2-130m, or a hybrid of 129 million parameters as wide, with 24 layers. Either
vocabulary has more tokens than the text has bytes.
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

# With a higher learning rate single batches make the loss jump, and what follows is chance in every
# precision.
SEED, LR, MIN_LR = 11, 5e-4, 5e-5


class Size:
    def __init__(self, layers, hidden, heads, kv_heads, ffn, vocab, sequence, batch, state, groups, pattern):
        self.layers, self.hidden, self.heads, self.kv_heads, self.ffn = layers, hidden, heads, kv_heads, ffn
        self.vocab, self.sequence, self.batch = vocab, sequence, batch
        self.state, self.groups, self.pattern = state, groups, pattern  # groups: of a hybrid
        self.mamba_heads = 2 * hidden // 64


SIZES = {
    "small": Size(4, 256, 4, 2, 768, 256, 128, 16, 64, 2, "M-M-*-M-"),
    "130m": Size(24, 768, 12, 4, 3072, 50288, 512, 8, 128, 2, "M-M-M-M*-M-M-M-M*-M-M-M-"),
}
MODELS = {
    "gpt2": "layers: {layers}, heads: {heads}",
    "mamba2": "layers: {layers}, mamba: {{head_width: 64, state: {state}}}",
    "hybrid": "pattern: {pattern}, heads: {heads}, kv_heads: {kv_heads}, ffn: {ffn}, mlp: relu2, positions: none, "
              "mamba: {{head_width: 64, groups: {groups}, state: {state}, step_min: 0.001}}",
}
SPEC = """\
name: {name}
engine:
  model: {{family: {family}, hidden: {hidden}, {model}, vocab: {vocab},
          sequence_length: {sequence}, initialize_from: initial}}
  data: {{train: [{{path: data/text.train}}]}}
  training:
    steps: {steps}
    global_batch: {batch}
    micro_batch: {micro_batch}
    precision: {precision}
    seed: {seed}
    optimizer: {{adamw: {{lr: {lr}, weight_decay: 0.1, betas: [0.9, 0.95], clip_norm: 1.0}}}}
    schedule: {{cosine: {{warmup_steps: {warmup}, min_lr: {min_lr}}}}}
  parallel: {{{parallel}}}
resources: {{device: {device}, ranks: {ranks}, threads_per_rank: {threads}}}
checkpoint: {{path: checkpoints/{name}, every_steps: {steps}}}
restart: {{max_failures: 0}}
"""


def vocab_of(options):
    # NemotronHForCausalLM has two tables, as nothing is tied in it.
    return 20480 if options.family == "hybrid" and options.size == "130m" else SIZES[options.size].vocab


def config_of(options):
    import transformers
    size = SIZES[options.size]
    if options.family == "gpt2":
        return transformers.GPT2Config(n_layer=size.layers, n_embd=size.hidden, n_head=size.heads,
                                       vocab_size=vocab_of(options), n_positions=size.sequence, resid_pdrop=0.0,
                                       embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    common = {"hidden_size": size.hidden, "vocab_size": vocab_of(options), "bos_token_id": 0, "eos_token_id": 0,
              "pad_token_id": 0}
    if options.family == "mamba2":
        return transformers.Mamba2Config(num_hidden_layers=size.layers, num_heads=size.mamba_heads, head_dim=64,
                                         state_size=size.state, n_groups=1, expand=2, chunk_size=64,
                                         residual_in_fp32=False, tie_word_embeddings=True, **common)
    layers = {"M": "mamba", "-": "mlp", "*": "attention"}
    return transformers.NemotronHConfig(
        layers_block_type=[layers[letter] for letter in size.pattern], num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, head_dim=size.hidden // size.heads, intermediate_size=size.ffn,
        mlp_hidden_act="relu2", mamba_num_heads=size.mamba_heads, mamba_head_dim=64, ssm_state_size=size.state,
        n_groups=size.groups, chunk_size=64, **common)


def decays(name, parameter):
    return parameter.dim() > 1 and "conv1d" not in name


def make_initial(folder, options):
    import torch
    import transformers
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config_of(options))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if decays(name, parameter):
                # Not representable in bf16. The first updates are smaller than half of bf16's spacing:
                # from representable weights, no 16-bit copy would change until they add up, and a
                # curve in bf16 would lag behind. From these, some copies change with every update.
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def train_muster(cluster, name, options):
    spec = cluster.cwd / f"{name}.yaml"
    size = SIZES[options.size]
    model = MODELS[options.family].format(**vars(size))
    spec.write_text(SPEC.format(
        name=name, family=options.family, hidden=size.hidden, model=model, vocab=vocab_of(options),
        sequence=options.sequence, steps=options.steps, batch=options.batch,
        micro_batch=options.batch // options.ranks, seed=SEED, lr=LR, min_lr=MIN_LR, warmup=options.warmup,
        precision=options.precision, parallel=options.parallel, device=options.device, ranks=options.ranks,
        threads=1 if options.ranks > 1 else 2))
    started = time.monotonic()
    cluster.run("submit", spec)
    job = cluster.finish(name, options.limit)
    if job["state"] != "succeeded":
        raise AssertionError(f"{name} ended as {job['state']}: {job.get('message')} {job['causes']}\n"
                             + cluster.run("logs", name, check=False).stdout)
    print(f"{name}: {job['steps']} steps in {time.monotonic() - started:.1f} s, "
          f"loss {job['trainLoss']:.4f}, {job['tokensPerSecond']:.0f} tokens/s", flush=True)
    return {int(point["step"]): point["trainLoss"] for point in job["losses"]}


def check_export(cluster, name, work, options):
    """Logits of the last checkpoint, exported, by transformers and by Muster; whether they are equal."""
    import torch
    import transformers
    last = sorted((work / "checkpoints" / name).glob("*/step-*"))[-1]
    cluster.run("convert", last, work / "exported", "--dtype", "fp32")
    samples = min(2, options.batch)
    raw = torch.frombuffer(bytearray((work / "batches").read_bytes()), dtype=torch.int32)
    tokens, targets = raw.long().view(2, -1, options.sequence)[:, :samples]
    (work / "batch.json").write_text(json.dumps(
        {"batch": samples, "sequence": options.sequence, "tokens": tokens.flatten().tolist(),
         "targets": targets.flatten().tolist()}))
    subprocess.run([options.bin / "interop_model_peer", "gradients", work / "exported", work / "batch.json",
                    work / "logits"], check=True)
    ours = torch.frombuffer(bytearray((work / "logits" / "logits.f32").read_bytes()), dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "exported", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(tokens).logits
    theirs = logits.flatten()
    difference = float((ours - theirs).norm() / theirs.norm())
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    print(f"{last.name} exported: transformers {transformers.__version__} loads it, logits within {difference:.1e} "
          f"of Muster's, loss {loss:.4f}", flush=True)
    return difference <= 1e-5


def learning_rate(update, options):
    if update < options.warmup:
        return LR * update / options.warmup
    progress = min(1.0, (update - options.warmup) / (options.steps - options.warmup))
    return MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * progress))


def train_torch(work, options):
    import torch
    import transformers
    raw = torch.frombuffer(bytearray((work / "batches").read_bytes()), dtype=torch.int32)
    tokens, targets = raw.long().view(2, options.steps, options.batch, options.sequence).to(options.device)
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
            group["lr"] = learning_rate(step, options)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16"):
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
    parameters = make_initial(work / "initial", options)
    print(f"{options.family}, {parameters / 1e6:.1f} million parameters, {options.ranks} ranks ({options.parallel}), "
          f"{options.steps} steps of {options.batch} x {options.sequence}", flush=True)
    family = "" if options.family == "gpt2" else f"{options.family}-"
    family += "" if options.size == "small" else f"{options.size}-"
    on = f"{options.device}-{options.precision}"
    ranks = f"-{options.ranks}-ranks" if options.ranks > 1 else ""
    names = [f"{family}muster-{on}{ranks}", f"{family}muster-{on}{ranks}-again"]
    curves = {}
    exported = True
    with Cluster(options.bin, work / "home", cwd=work, workers=1, slots=options.ranks) as cluster:
        cluster.run("data", "tokenize", "--input", options.text.resolve(), "--output", work / "data" / "text",
                    "--tokenizer", "bytes", "--split", "train=0.99,validation=0.01")
        for name in names[:options.runs]:
            curves[name] = train_muster(cluster, name, options)
        if not options.alone:
            subprocess.run([options.bin / "interop_model_peer", "batches", work / "data" / "text.train",
                            work / "batches", "--sequence", str(options.sequence),
                            "--vocab", str(vocab_of(options)), "--batch", str(options.batch),
                            "--steps", str(options.steps), "--seed", str(SEED)], check=True)
            exported = check_export(cluster, names[0], work, options)
    if not options.alone:
        curves[f"{family}pytorch-{on}"] = train_torch(work, options)
    equal = options.runs < 2 or curves[names[0]] == curves[names[1]]
    if options.runs > 1:
        print(f"the same spec twice: losses {'equal to the last bit' if equal else 'DIFFER'}")
        curves.pop(names[1])
    (work / "curves.json").write_text(json.dumps(curves))
    for other in options.against:
        curves.update(read_curves(other))
    return compare(curves) and equal and exported


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
             title="King James Bible, byte by byte")
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
    runner.add_argument("--size", choices=tuple(SIZES), default="small")
    runner.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    runner.add_argument("--steps", type=int, default=300)
    runner.add_argument("--precision", choices=("fp32", "bf16"))
    runner.add_argument("--ranks", type=int, default=1)
    runner.add_argument("--parallel", default="data: 1", help="of the spec, for all ranks")
    runner.add_argument("--batch", type=int, help="samples of a step; default: the size's")
    runner.add_argument("--sequence", type=int, help="tokens of a sample; default: the size's")
    runner.add_argument("--limit", type=int, default=1200, help="seconds that a run of Muster may take")
    runner.add_argument("--warmup", type=int, default=100, help="steps, fewer than --steps")
    runner.add_argument("--runs", type=int, default=2)
    runner.add_argument("--alone", action="store_true", help="without PyTorch's curve")
    runner.add_argument("--against", nargs="*", type=pathlib.Path, default=[])
    plotter = commands.add_parser("plot")
    plotter.add_argument("files", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    if options.command == "run":
        options.precision = options.precision or ("bf16" if options.device == "cuda" else "fp32")
        options.batch = options.batch or SIZES[options.size].batch
        options.sequence = options.sequence or SIZES[options.size].sequence
    return 0 if (run(options) if options.command == "run" else plot(options.files)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AssertionError, RuntimeError) as problem:
        print(f"curve: {problem}", file=sys.stderr)
        sys.exit(1)
