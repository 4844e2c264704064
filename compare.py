"""
Does a mechanism beat a plain GPT? A study: baselines that match, runs paired by seed, intervals, a report.

    python compare.py config/studies/routing.py                  # this machine: its GPUs, or its cores
    python compare.py --mechanisms=unet_concat,unet_add          # without a file; unet_* is each that fits
    python compare.py config/studies/all.py --scale=small        # tiny | small | paper: which plain GPT
    python compare.py config/studies/all.py --seeds=1,2 --matched=0    # any key of a study can be set here
    python compare.py config/studies/all.py --submit=auto        # through submitit: Slurm where there is one
    python compare.py config/studies/all.py --dry_run            # what would run
    python compare.py --from_results=results/all-tiny.json       # a report once more, from its numbers alone

Every run is kept in out/trials, under a hash of its flags, its data and the code that matters: start a study
again and it goes on where it stopped; change a flag and only what depends on it runs again. --help: all keys.
"""

import copy
import json
import math
import os
import re
import shlex
import signal
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import asdict, fields, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import checkpoint
import configurator
from common import UserError, explain, git_commit, json_safe, pick_device, table, write_atomic
from dataset import Dataset
from evaluate import windows_of
from model import GPTConfig
from study import fingerprint, queue, report, stats, trial
from study.arms import BOOKKEEPING, ArmBuilder, StudyConfig, step_time_ratio

RATES = ("lr", "muon_lr", "embed_lr", "mechanism_lr", "min_lr")
CURVE_POINTS = 25  # of a run's validation curve that results.json keeps, the last one among them


# ---- a study: arms, baselines, trials ----

class Study:
    """A study's arms, baselines and trials: which there are, which are done."""

    def __init__(self, config, name):
        self.config, self.name = config, name
        self.builder = ArmBuilder(config)
        self.scale = Path(config.base).stem if config.base else config.scale
        self.out = Path(config.out_dir or f"out/{name}-{self.scale}")
        self.arms = {"plain": self.builder.plain, **{arm.name: arm for arm in self.builder.variants()}}
        # variant -> {what is equal: name of the arm that it is compared with}
        self.baselines = {name: {"hyperparameters": "plain"} for name in self.arms if name != "plain"}
        self.tuning_runs = {}  # (arm name, learning-rate factor): folder
        self.selection = None  # in words, which variants got all baselines

    # ---- trials: an arm with a seed ----

    def spec(self, arm, seed, **changes):
        """trial.json of one run."""
        data = self.builder.data
        model = replace(arm.model, seed=seed + arm.flags.get("seed", 0))
        training = replace(arm.train, **{key: getattr(arm.train, key) * arm.lr_factor for key in RATES})
        flags = {key: value for key, value in asdict(training).items() if key not in BOOKKEEPING}
        # a cluster's node picks its own device; here, GPUs are handed out by number
        on_slurm = queue.on_slurm(self.config.submit)
        flags["device"] = self.config.device if on_slurm else pick_device(self.config.device).split(":")[0]
        spec = dict(model=fingerprint.own_flags(model), train=flags,
                    score=dict(split=self.config.split, tokens=self.config.test_tokens),
                    data={name: split["sha256"] for name, split in data.splits.items()},
                    code=fingerprint.code_digest(model), torch=torch.__version__)
        for part, values in changes.items():
            spec[part] = {**spec[part], **values}
        return spec

    def folder(self, arm, seed, **changes):
        spec = self.spec(arm, seed, **changes)
        return trial.folder_of(spec) if self.config.dry_run else trial.make(spec)

    def trials(self):
        """{(arm name, seed): folder}, seed by seed, so that a study that is cut short has whole pairs."""
        arms = self.arms.items()
        return {(name, seed): self.folder(arm, seed) for seed in self.config.seeds for name, arm in arms}

    def results(self):
        """{(arm name, seed): result.json} of what is done."""
        results = {key: trial.result(folder) for key, folder in self.trials().items()}
        return {key: result for key, result in results.items() if result}

    # ---- baselines made to match ----

    def add_baselines(self, names):
        """Make the baselines that match these variants, beside the one with the same hyperparameters."""
        plain = self.builder.plain
        for name in names:
            variant = self.arms[name]
            for what in self.config.match:
                baselines = [arm for arm in self.arms.values() if arm.kind == "baseline"]
                if what == "parameters":
                    arm = self.builder.same_parameters(variant, baselines)
                elif what == "FLOPs":
                    steps = variant.flops / (plain.flops / plain.train.max_iters)
                    arm = self.builder.same_cost(steps, baselines)
                else:
                    steps = variant.train.max_iters * self.time_ratio(variant)
                    arm = self.builder.same_cost(steps, baselines)
                self.arms.setdefault(arm.name, arm)
                self.baselines[name][what] = arm.name

    def time_ratio(self, variant):
        """step_time_ratio() of a variant to the plain GPT, measured once and kept in the study's folder."""
        plain, path = self.builder.plain, self.out / "clock.json"
        key = trial.folder_of([self.spec(variant, 0), self.spec(plain, 0)]).name
        ratios = json.loads(path.read_text()) if path.is_file() else {}
        if key not in ratios:
            threads = queue.Processes(self.config.jobs, self.config.device).threads
            ratios[key] = step_time_ratio(variant, plain, pick_device(self.config.device), threads)
            self.out.mkdir(parents=True, exist_ok=True)
            write_atomic(path, lambda f: f.write(json.dumps(ratios).encode()))
        return ratios[key]

    # ---- runs ----

    def tune(self, arms, place):
        """Choose each arm's learning-rate factor: the lowest validation loss of short runs.

        Their seed is one that no comparison uses.
        """
        c, runs = self.config, {}
        score = dict(split="val", tokens=self.config.test_tokens)
        for arm in arms:
            steps = c.tune_steps or max(1, arm.train.max_iters // 3)
            warmup = round(arm.train.warmup_iters * steps / arm.train.max_iters)
            short = dict(max_iters=steps, warmup_iters=warmup, lr_decay_iters=None, eval_interval=steps)
            for factor in c.tune_factors:
                arm_at = replace(arm, lr_factor=factor)
                runs[arm.name, factor] = self.folder(arm_at, max(c.seeds) + 10**6, train=short, score=score)
        if not c.report_only:
            queue.run_all(list(runs.values()), place, "learning rates")
        for arm in arms:
            scores = {factor: trial.result(runs[arm.name, factor]) for factor in c.tune_factors}
            scores = {factor: result["bpb"] for factor, result in scores.items() if result}
            if scores:
                arm.lr_factor = min(scores, key=scores.get)
                edges = min(c.tune_factors), max(c.tune_factors)
                arm.edge = len(c.tune_factors) > 1 and arm.lr_factor in edges
        self.tuning_runs.update(runs)
        return runs

    def run_arms(self, arms, place):
        if self.config.tune_lr:
            self.tune(arms, place)
        if not self.config.report_only:
            queue.run_all(list(self.trials().values()), place)

    def run(self, place):
        """Run what is not done, in two rounds where only the best variants get all baselines."""
        variants, best_n = list(self.baselines), self.config.matched
        if best_n is None or best_n >= len(variants):
            self.add_baselines(variants)
            self.run_arms(list(self.arms.values()), place)
            return
        self.run_arms(list(self.arms.values()), place)
        results = self.results()
        differences = {name: self.differences(name, "plain", results) for name in variants}
        paired = {name: [d for d in values if d is not None] for name, values in differences.items()}
        means = {name: np.mean(values) for name, values in paired.items() if values}
        self.add_baselines(sorted(means, key=means.get)[:best_n])
        if best_n:
            self.selection = (f"the best {best_n} of {len(variants)} by mean difference to the plain GPT "
                              "got all baselines")
        self.run_arms([arm for arm in self.arms.values() if arm.kind == "baseline"], place)

    # ---- comparisons ----

    def differences(self, variant, baseline, results):
        """Variant minus baseline in bits per byte for each seed; None where one of the two is not done."""
        pairs = [(results.get((variant, seed)), results.get((baseline, seed))) for seed in self.config.seeds]
        return [a["bpb"] - b["bpb"] if a and b else None for a, b in pairs]

    def comparisons(self, results, trials):
        """One row for each variant and baseline, corrected together.

        Where only the best variants meet all baselines, those that the others would have met are corrected
        for too: choosing by the scores that are then judged is another way of looking often.
        """
        rows, paired = [], []
        for variant, baselines in self.baselines.items():
            for baseline in dict.fromkeys(baselines.values()):
                differences = self.differences(variant, baseline, results)
                finished = [d for d in differences if d is not None]
                paired.append(stats.paired(finished, 1 - self.config.alpha))
                rows.append(dict(variant=variant, baseline=baseline, differences=differences,
                                 matched=[what for what, name in baselines.items() if name == baseline]))
        n = self.comparisons_made(len(rows))
        p_holm = stats.holm([each.p for each in paired] + [math.nan] * (n - len(rows)))
        for row, each, p in zip(rows, paired, p_holm):
            row.update(self.judged(row["variant"], each, float(p), n, trials))
            row["bootstrap"] = [self.bootstrap(row["variant"], row["baseline"], seed, results, trials)
                                for seed in self.config.seeds]
        return rows

    def judged(self, variant, paired, p_holm, n, trials):
        """What n corrected comparisons let one of them say, in numbers and in words."""
        c = self.config
        detectable = stats.detectable(paired.sd, paired.n, c.alpha / n)
        verdict = stats.verdict(paired, p_holm, c.alpha)
        words = stats.in_words(paired, p_holm, detectable, c.alpha)
        if paired.n < len(c.seeds):
            words += f" ({paired.n} of {len(c.seeds)} seeds)"
        failed = sum(trial.failure(trials[variant, seed]) is not None for seed in c.seeds)
        if failed and verdict == "better":  # those that diverged would have said something else
            verdict = "no difference shown"
            words = f"not called better, since {failed} of its {len(c.seeds)} runs failed; else {words}"
        return dict(mean=paired.mean, low=paired.low, high=paired.high, p=paired.p, p_holm=p_holm,
                    detectable=detectable, verdict=verdict, words=words)

    def comparisons_made(self, rows):
        """How many comparisons are corrected for: those made, or all that the best were chosen from."""
        if not self.selection:
            return max(1, rows)
        every = copy.copy(self)
        every.arms = dict(self.arms)
        every.baselines = {name: dict(own) for name, own in self.baselines.items()}
        every.config = replace(self.config,
                               match=[what for what in self.config.match if what != "wall-clock"])
        every.add_baselines(list(every.baselines))
        clocks = len(self.baselines) * ("wall-clock" in self.config.match)
        return sum(len(set(own.values())) for own in every.baselines.values()) + clocks

    def bootstrap(self, variant, baseline, seed, results, trials):
        """The paired block bootstrap over the test set for one seed; blocks are of tokens scored."""
        if not {(variant, seed), (baseline, seed)} <= results.keys():
            return None
        a, b = (np.load(trials[name, seed] / "nats.npy") for name in (variant, baseline))
        windows = max(1, self.config.block // self.builder.plain.model.block_size)
        size = results[variant, seed]["bytes"]
        mean, low, high = stats.block_bootstrap(a, b, size, windows, 1 - self.config.alpha)
        return dict(seed=seed, mean=mean, low=low, high=high)

    # ---- results.json ----

    def summary(self, command):
        """Everything that the report shows, as a dict for results.json."""
        c, results, trials = self.config, self.results(), self.trials()
        rows, failures = self.comparisons(results, trials), self.failures(trials)
        missing = {name: [what for what in c.match if what not in baselines]
                   for name, baselines in self.baselines.items()}
        plain, steps = self.builder.plain, c.tune_steps or max(1, self.builder.plain.train.max_iters // 3)
        nothing_runs = len(results) + len(failures) >= len(trials)
        return json_safe(dict(
            name=self.name, scale=self.scale, question=c.question, command=command,
            date=date.today().isoformat(), commit=git_commit(),
            versions=dict(python=sys.version.split()[0],
                          **{name: version(name) for name in ("torch", "numpy", "scipy")}),
            settings=self.builder.settings,
            plain={"base": self.builder.base, **flags_of(plain)},
            machine=self.machine(results, trials), data=self.scored(results),
            seeds=c.seeds, alpha=c.alpha, comparisons_made=self.comparisons_made(len(rows)),
            tuned=dict(factors=c.tune_factors, steps=steps) if c.tune_lr else None,
            arms={name: self.arm_summary(arm, results, trials, nothing_runs)
                  for name, arm in self.arms.items()},
            comparisons=rows, missing={name: what for name, what in missing.items() if what},
            selection=self.selection, failures=failures, planned=len(trials), done=len(results)))

    def failures(self, trials):
        runs = [(name, seed, folder) for (name, seed), folder in trials.items()]
        runs += [(f"{name}, learning rate x {factor:g}", "–", folder)
                 for (name, factor), folder in self.tuning_runs.items()]
        rows = [dict(arm=name, seed=seed, why=trial.failure(folder), log=str(folder / "trial.log"))
                for name, seed, folder in runs]
        return [row for row in rows if row["why"]]

    def machine(self, results, trials):
        threads = sorted({result["threads"] for result in results.values()})
        first = next((trials[key] for key in results), None)
        return dict(device=device_of(first) if first else None, cores=os.cpu_count(),
                    jobs=self.config.jobs or queue.Processes(0, self.config.device).slots,
                    threads=threads[0] if len(threads) == 1 else ", ".join(map(str, threads)) or None)

    def scored(self, results):
        """Which text was scored, and how."""
        data, T = self.builder.data, self.builder.plain.model.block_size
        split = data.splits[self.config.split]
        windows = windows_of(data, self.config.split, T, max_tokens=self.config.test_tokens)
        part = f"{len(windows):,} evenly spaced windows" if len(windows) < -(-split["tokens"] // T) else "all"
        first = next(iter(results.values()), {})
        return dict(dataset=data.meta["name"], split=self.config.split, sha256=split["sha256"],
                    tokens=first.get("tokens"), bytes=first.get("bytes"), of_bytes=split["bytes"],
                    name=f"{part} of {T:,} tokens", context=f"disjoint windows of {T:,}",
                    note=data.meta.get("note"))

    def arm_summary(self, arm, results, trials, nothing_runs):
        """One arm for the report: sizes, costs, each seed's score and curve, and a look inside a run."""
        seeds = self.config.seeds
        folders = [trials[arm.name, seed] for seed in seeds]
        found = [results.get((arm.name, seed)) for seed in seeds]

        def median(key):
            values = [result[key] for result in found if result and result.get(key) is not None]
            return statistics.median(values) if values else None

        first = next((folder for folder, result in zip(folders, found) if result), None)
        tuned = {"lr_factor": arm.lr_factor} if arm.lr_factor != 1 else {}
        inside = inspected(first, nothing_runs) if first else NOT_INSPECTED
        return dict(kind=arm.kind, label=arm.label, flags={**arm.flags, **tuned}, steps=arm.train.max_iters,
                    params=arm.params, flops_per_token=arm.flops_per_token, train_flops=float(arm.flops),
                    seconds=median("seconds"), tokens_per_s=median("tokens_per_s"),
                    memory_mib=median("memory_mib"), lr_factor=arm.lr_factor, edge=arm.edge,
                    bpb=[result and result["bpb"] for result in found],
                    curves=[curve_of(folder) if result else None for folder, result in zip(folders, found)],
                    commands=[self.command_of(arm)], folders=[str(folder) for folder in folders], **inside)

    def command_of(self, arm):
        """The train.py line that repeats a run of this arm, for the first seed."""
        seed = self.config.seeds[0] + arm.flags.get("seed", 0)
        changed = {**self.builder.settings, **arm.flags, "seed": seed}
        if arm.lr_factor != 1:
            changed.update({key: getattr(arm.train, key) * arm.lr_factor for key in RATES})
        name = "".join(ch if ch.isalnum() else "_" for ch in arm.name)
        flags = (f"--{key}={value}" for key, value in changed.items())
        return shlex.join(["python", "train.py", self.builder.base, *flags, f"--out_dir=out/{name}"])


def flags_of(arm):
    """Every flag of the model and of its training that has a say in an arm's numbers."""
    flags = {**{f.name: getattr(arm.model, f.name) for f in fields(GPTConfig)}, **asdict(arm.train)}
    return {key: value for key, value in flags.items() if key not in BOOKKEEPING | {"seed", "device"}}


def curve_of(folder):
    """Validation bits per byte of one run against tokens and seconds, at most CURVE_POINTS of them."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "val_bpb" in row]
    rows = rows[::-1][::math.ceil(len(rows) / CURVE_POINTS) or 1][::-1]
    return dict(tokens=[row["tokens"] for row in rows], seconds=[round(row["elapsed_s"], 2) for row in rows],
                bpb=[round(row["val_bpb"], 6) for row in rows])


def device_of(folder):
    """What a run trained on, from its config.json; None where that is not there."""
    with suppress(OSError, ValueError, KeyError):
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))["machine"]["device"]


# ---- inside a trained model ----

PROMPT, SAMPLE_TOKENS = "\n", 300  # what samples continue, and for how long
NOT_INSPECTED = dict(decode_tokens_per_s=None, heads=None, sample=None)
# traces of the heads that the report shows -> the dimensions over which their mean is taken
HEAD_TRACES = dict(
    entropy=(0, 2), concentration=(0, 2), gate=(1, 2), output_gate=(0, 2, 3), acag_gate=(0, 2, 3),
    router_gates=(0, 1), advantage=(0, 1), advantage_correlation=None, routing_load=None, dead_heads=None,
    effective_heads=None, token_entropy=None, batch_entropy=None)


def inspected(folder, nothing_runs=True):
    """{decode_tokens_per_s, heads, sample} of a finished run; measured once, when nothing runs, and kept."""
    path = folder / "inspected.json"
    if not path.is_file():
        # the weights may be on another machine
        if not nothing_runs or not (folder / "best.pt").is_file():
            return NOT_INSPECTED
        inside = inspect(folder)
        write_atomic(path, lambda f: f.write(json.dumps(inside).encode()))
    return json.loads(path.read_text(encoding="utf-8"))


@torch.no_grad()
def inspect(folder):
    """Decoding speed (cache, batch 1, the better of two), a sample, the heads on 15 windows of val."""
    state, device = checkpoint.read(folder), pick_device("auto")
    model = checkpoint.build(state, folder, device)
    data, T = Dataset(state["train"]["dataset"]), model.config.block_size
    ids = torch.tensor([data.tokenizer.encode(PROMPT).tolist()], device=device)
    best = math.inf
    for _ in range(2):
        began = time.perf_counter()
        generator = torch.Generator(device).manual_seed(1)
        tokens = model.generate(ids, SAMPLE_TOKENS, temperature=0.8, generator=generator)[0].tolist()
        best = min(best, time.perf_counter() - began)
    text = data.tokenizer.decode_bytes([t for t in tokens if t < data.vocab_size]).decode("utf-8", "replace")
    starts = [start for start, _, _ in windows_of(data, "val", T, max_tokens=16 * T)]
    starts = starts[:-1]  # the last may have no token after it
    windows = [data.tokens("val")[start:start + T + 1].astype(np.int64) for start in starts]
    x = torch.stack([torch.from_numpy(window) for window in windows]).to(device)
    return dict(decode_tokens_per_s=SAMPLE_TOKENS / best, sample=text, heads=heads_of(model, x))


def heads_of(model, x):
    """{name of a trace: a row for each layer} of the heads on the tokens x [B, T + 1], to 4 digits."""
    traces, found = model(x[:, :-1], x[:, 1:], traces=True).traces, {}
    for key, value in traces.items():
        name = key.split(".", 2)[-1]
        if key.startswith("blocks.") and name in HEAD_TRACES and value.numel():
            over = HEAD_TRACES[name]
            value = value.float() if over is None else value.float().mean(over)
            found.setdefault(name, []).append(rounded(value.tolist()))
    if "a2c.explained_variance" in traces:
        found["critic's explained variance"] = rounded(float(traces["a2c.explained_variance"]))
    return found


def rounded(value):
    return [rounded(v) for v in value] if isinstance(value, list) else float(f"{value:.4g}")


# ---- command line ----

def plan_of(study):
    """What a study consists of, as text: every arm with its size, and how many runs are left."""
    trials, c = study.trials(), study.config
    rows = []
    for arm in study.arms.values():
        flags = " ".join(f"{key}={value}" for key, value in arm.flags.items())[:80]
        rows.append((arm.name, f"{arm.params:,}", f"{arm.train.max_iters:,}", f"{arm.flops:.3g}", flags))
    left = sum(not trial.done(folder) for folder in trials.values())
    notes = [f"{len(trials):,} runs, {left:,} of them to do, in {trial.TRIALS}"]
    if c.tune_lr:
        notes.append("learning rates are tuned before, which is not counted")
    if c.matched and c.matched < len(study.baselines):
        notes.append(f"then come the other baselines of the best {c.matched}")
    arms = table(("arm", "parameters", "steps", "FLOPs", "flags"), rows, left=(0, 4))
    return f"{arms}\n{'; '.join(notes)}"


def name_of(config, files):
    """A study's name: its config files', else that of its mechanisms and variants."""
    names = [Path(file).stem for file in files]
    for name in [] if files else [*config.mechanisms, *config.variants]:
        names.append(re.sub(r"_?\*", "-all", name).lstrip("-"))
    return re.sub(r"[^\w+.-]", "_", "+".join(names))[:100]


def write_report(results, folder):
    """Print the table, write report.md, report.html and the forest plot; says where they are."""
    print(report.table_of(results))
    print(*report.write(results, folder), sep="\n")


def run(argv):
    config, = configurator.load((StudyConfig,), argv, __doc__)
    if config.from_results:
        results = report.read(config.from_results)
        out = Path(config.out_dir or f"out/{Path(config.from_results).stem}-report")
        out.mkdir(parents=True, exist_ok=True)
        write_report(results, out)
        return
    files = configurator.split_args(argv, configurator.keys_of((StudyConfig,)))[0]
    study = Study(config, name_of(config, files))
    if config.dry_run:
        config.match = [what for what in config.match if what != "wall-clock"]  # which would be measured
        if config.matched is None or config.matched >= len(study.baselines):
            study.add_baselines(list(study.baselines))
        print(plan_of(study))
        return
    study.out.mkdir(parents=True, exist_ok=True)  # refused now rather than after the last run
    place = (queue.Cluster(config.submit, config.jobs, config.submit_options) if config.submit
             else queue.Processes(config.jobs, config.device))
    study.run(place)
    results = study.summary(shlex.join(["python", "compare.py", *argv]))
    write_atomic(study.out / "results.json", lambda f: f.write(json.dumps(results).encode()))
    write_report(results, study.out)
    if results["failures"]:
        sys.exit(f"compare: {len(results['failures'])} run(s) failed, the report names them; "
                 "start again to try them once more")


def main(argv=None):
    # so that SIGTERM, too, stops the runs before it ends this program
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("\ncompare: stopped; what is done is kept, and the same command goes on", file=sys.stderr)
        sys.exit(130)
    except UserError as e:
        sys.exit("\n".join(f"compare: {line}" for line in str(e).splitlines()))
    except OSError as e:
        sys.exit(f"compare: {explain(e)}")
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
