"""
Does a mechanism beat a plain GPT? A study: baselines made to match, runs paired by seed, intervals, one report.

    python compare.py config/study_routing.py                     # this machine: its GPUs, or its cores
    python compare.py config/study_routing.py --scale=small       # tiny | small | seed: the plain GPT that everything is added to
    python compare.py config/study_all.py --seeds=1,2 --matched=0 # any key of a study, on the command line
    python compare.py config/study_all.py --submit=auto           # through submitit: Slurm where there is one
    python compare.py config/study_all.py --dry_run               # what would run

Every run is kept in out/trials, under a hash of its flags, its data and the code that matters: start a study again and it
goes on where it stopped; change a flag and only what depends on it runs again. `python compare.py --help` lists every key.
"""

import copy
import json
import math
import os
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
import jobs
import report
import stats
from common import UserError, explain, git_commit, json_safe, pick_device, write_atomic
from dataset import Dataset
from evaluate import windows_of
from model import GPTConfig
from study import NOT_ITS_OWN, Maker, StudyConfig, step_time_ratio

# ---- trials: an arm with a seed ----

class Study:
    """A study's arms, baselines and trials: which there are, which are done."""

    def __init__(self, config, name):
        self.config, self.name, self.maker = config, name, Maker(config)
        self.scale = Path(config.base).stem if config.base else config.scale
        self.out = Path(config.out_dir or f"out/{name}-{self.scale}")
        self.arms = {"plain": self.maker.plain, **{arm.name: arm for arm in self.maker.variants()}}
        self.baselines = {name: {"hyperparameters": "plain"} for name, arm in self.arms.items() if arm.kind == "variant"}
        self.tried, self.selection = {}, None  # tried: the runs of the learning-rate search

    def spec(self, arm, seed, **changes):
        """trial.json of one run."""
        data, config, factor = self.maker.data, arm.train, arm.lr_factor
        model = replace(arm.model, seed=seed + arm.flags.get("seed", 0))
        rates = {key: getattr(config, key) * factor for key in ("lr", "muon_lr", "embed_lr", "min_lr")}
        device = self.config.device if jobs.on_slurm(self.config.submit) else pick_device(self.config.device).split(":")[0]
        flags = {k: v for k, v in asdict(replace(config, **rates)).items() if k not in NOT_ITS_OWN} | {"device": device}
        spec = dict(model=asdict(model), train=flags, score=dict(split=self.config.split, tokens=self.maker.test_tokens),
                    code=jobs.code_digest(), data={k: s["sha256"] for k, s in data.splits.items()}, torch=torch.__version__)
        for part, values in changes.items():
            spec[part] = {**spec[part], **values}
        return spec

    def folder(self, arm, seed, **changes):
        return jobs.make(self.spec(arm, seed, **changes)) if not self.config.dry_run else jobs.folder_of(self.spec(arm, seed, **changes))

    def trials(self):
        """{(arm name, seed): folder}, seed by seed, so that a study that is cut short has whole pairs."""
        return {(name, seed): self.folder(arm, seed) for seed in self.config.seeds for name, arm in self.arms.items()}

    def results(self):
        """{(arm name, seed): result.json} of what is done."""
        return {key: found for key, folder in self.trials().items() if (found := jobs.result(folder))}

    def add_baselines(self, names):
        """Make the baselines that match these variants, beside the one with the same hyperparameters."""
        for name in names:
            variant = self.arms[name]
            for what in self.config.match:
                made = [arm for arm in self.arms.values() if arm.kind == "baseline"]
                if what == "parameters":
                    arm = self.maker.same_parameters(variant, made)
                else:
                    plain = self.maker.plain
                    steps = (variant.flops / (plain.flops / plain.train.max_iters) if what == "FLOPs" else
                             variant.train.max_iters * self.clock(variant))
                    arm = self.maker.same_cost(steps, made)
                self.arms.setdefault(arm.name, arm)
                self.baselines[name][what] = arm.name

    def clock(self, variant):
        """step_time_ratio() of a variant to the plain GPT; kept in the study's folder, so that starting again changes no plan."""
        path, key = self.out / "clock.json", jobs.folder_of([self.spec(variant, 0), self.spec(self.maker.plain, 0)]).name
        known = json.loads(path.read_text()) if path.is_file() else {}
        if key not in known:
            threads = jobs.Processes(self.config.jobs, self.config.device).threads
            known[key] = step_time_ratio(variant, self.maker.plain, pick_device(self.config.device), threads)
            self.out.mkdir(parents=True, exist_ok=True)
            write_atomic(path, lambda f: f.write(json.dumps(known).encode()))
        return known[key]

    def tune(self, arms, place):
        """Choose each arm's learning-rate factor: the lowest validation loss of short runs with a seed that no comparison uses."""
        c, trials = self.config, {}
        for arm in arms:
            steps = c.tune_steps or max(1, arm.train.max_iters // 3)
            warmup = round(arm.train.warmup_iters * steps / arm.train.max_iters)
            shorter = dict(max_iters=steps, warmup_iters=warmup, lr_decay_iters=None, eval_interval=steps)
            for factor in c.tune_factors:
                trials[arm.name, factor] = self.folder(replace(arm, lr_factor=factor), max(c.seeds) + 10**6, train=shorter,
                                                       score=dict(split="val", tokens=self.maker.test_tokens))
        if not c.report_only:
            jobs.run_all(list(trials.values()), place, "learning rates")
        for arm in arms:
            found = {f: jobs.result(trials[arm.name, f])["bpb"] for f in c.tune_factors if jobs.done(trials[arm.name, f])}
            if found:
                arm.lr_factor = min(found, key=found.get)
                arm.edge = len(c.tune_factors) > 1 and arm.lr_factor in (min(c.tune_factors), max(c.tune_factors))
        self.tried.update(trials)
        return trials

    def run(self, place):
        """Run what is not done, in two rounds where only the best variants get all baselines."""
        c, variants = self.config, [name for name, arm in self.arms.items() if arm.kind == "variant"]
        some = c.matched is not None and c.matched < len(variants)

        def go(arms):
            if c.tune_lr:
                self.tune(arms, place)
            if not c.report_only:
                jobs.run_all(list(self.trials().values()), place)

        first = list(self.arms.values())
        if not some:
            self.add_baselines(variants)
        go(first + [arm for arm in self.arms.values() if arm.kind == "baseline"])
        if some:
            found = self.results()
            paired = {name: [d for d in self.differences(name, "plain", found) if d is not None] for name in variants}
            means = {name: np.mean(d) for name, d in paired.items() if d}
            best = sorted(means, key=means.get)[:c.matched]
            self.add_baselines(best)
            self.selection = f"the best {c.matched} of {len(variants)} by mean difference to the plain GPT got all baselines" if c.matched else None
            go([arm for arm in self.arms.values() if arm.kind == "baseline"])

    def differences(self, variant, baseline, found):
        """Variant minus baseline in bits per byte for each seed; None where one of the two is not done."""
        return [found[variant, s]["bpb"] - found[baseline, s]["bpb"] if {(variant, s), (baseline, s)} <= found.keys() else None
                for s in self.config.seeds]

    # ---- what it all says ----

    def compared(self, found, trials):
        """The comparisons, as the report wants them: one for each variant and baseline, corrected together.

        Where only the best variants meet all baselines, those that the others would have met are corrected for too: choosing
        by the scores that are then judged is another way of looking often.
        """
        c, rows = self.config, []
        for variant, baselines in self.baselines.items():
            for baseline in dict.fromkeys(baselines.values()):
                differences = self.differences(variant, baseline, found)
                rows.append(dict(variant=variant, baseline=baseline, matched=[what for what, b in baselines.items() if b == baseline],
                                 differences=differences, paired=stats.paired([d for d in differences if d is not None], 1 - c.alpha)))
        made = self.comparisons_made(len(rows))
        adjusted = stats.holm([row["paired"].p for row in rows] + [math.nan] * (made - len(rows)))
        for row, p_holm in zip(rows, adjusted):
            paired = row.pop("paired")
            smallest = stats.detectable(paired.sd, paired.n, c.alpha / made)
            verdict, words = stats.verdict(paired, p_holm, c.alpha), stats.in_words(paired, p_holm, smallest, c.alpha)
            if paired.n < len(c.seeds):
                words += f" ({paired.n} of {len(c.seeds)} seeds)"
            lost = sum(jobs.failure(trials[row["variant"], seed]) is not None for seed in c.seeds)
            if lost and verdict == "better":  # those that diverged would have said something else
                verdict, words = "no difference shown", f"not called better, since {lost} of its {len(c.seeds)} runs failed; else {words}"
            row.update(mean=paired.mean, low=paired.low, high=paired.high, p=paired.p, p_holm=float(p_holm), detectable=smallest,
                       verdict=verdict, words=words,
                       bootstrap=[self.bootstrap(row["variant"], row["baseline"], seed, found, trials) for seed in c.seeds])
        return rows

    def comparisons_made(self, rows):
        """How many comparisons are corrected for: those that were made, or all that the best were chosen from."""
        if not self.selection:
            return max(1, rows)
        every = copy.copy(self)
        every.arms, every.baselines = dict(self.arms), {name: dict(own) for name, own in self.baselines.items()}
        every.config = replace(self.config, match=[what for what in self.config.match if what != "wall-clock"])
        every.add_baselines(list(every.baselines))
        clocks = len(self.baselines) * ("wall-clock" in self.config.match)
        return sum(len(set(own.values())) for own in every.baselines.values()) + clocks

    def bootstrap(self, variant, baseline, seed, found, trials):
        """The paired block bootstrap over the test set for one seed; of a slice, a block is so many of its tokens."""
        if not {(variant, seed), (baseline, seed)} <= found.keys():
            return None
        a, b = (np.load(trials[name, seed] / "nats.npy") for name in (variant, baseline))
        windows = max(1, self.config.block // self.maker.plain.model.block_size)
        mean, low, high = stats.block_bootstrap(a, b, found[variant, seed]["bytes"], windows, 1 - self.config.alpha)
        return dict(seed=seed, mean=mean, low=low, high=high)

    def summary(self, command):
        """Everything that the report shows, as a dict for results.json."""
        found, trials, c, maker = self.results(), self.trials(), self.config, self.maker
        data, split = maker.data, maker.data.splits[c.split]
        cuts = windows_of(data, c.split, maker.plain.model.block_size, max_tokens=maker.test_tokens)
        one, first = next(iter(found.items()), (None, {}))
        every = f"{len(cuts):,} evenly spaced windows" if len(cuts) < -(-split["tokens"] // maker.plain.model.block_size) else "all"
        rows = self.compared(found, trials)
        failures = [dict(arm=name, seed=seed, why=why, log=str(folder / "trial.log"))
                    for (name, seed), folder in trials.items() if (why := jobs.failure(folder))]
        failures += [dict(arm=f"{name}, learning rate x {factor:g}", seed="–", why=why, log=str(folder / "trial.log"))
                     for (name, factor), folder in self.tried.items() if (why := jobs.failure(folder))]
        threads = sorted({r["threads"] for r in found.values()})
        lacks = {name: [what for what in c.match if what not in baselines] for name, baselines in self.baselines.items()}
        return json_safe(dict(
            name=self.name, scale=self.scale, question=c.question, command=command, date=date.today().isoformat(), commit=git_commit(),
            versions=dict(python=sys.version.split()[0], **{name: version(name) for name in ("torch", "numpy", "scipy")}),
            settings=maker.settings,
            machine=dict(device=machine_of(trials[one]) if one else None, cores=os.cpu_count(), jobs=c.jobs or jobs.Processes(0, c.device).slots,
                         threads=threads[0] if len(threads) == 1 else ", ".join(map(str, threads)) or None),
            data=dict(dataset=data.meta["name"], split=c.split, tokens=first.get("tokens"), bytes=first.get("bytes"), of_bytes=split["bytes"],
                      name=f"{every} of {maker.plain.model.block_size:,} tokens", note=data.meta.get("note"),
                      context=f"disjoint windows of {maker.plain.model.block_size:,}"),
            seeds=c.seeds, alpha=c.alpha, comparisons_made=self.comparisons_made(len(rows)),
            tuned=dict(factors=c.tune_factors, steps=c.tune_steps or max(1, maker.plain.train.max_iters // 3)) if c.tune_lr else None,
            arms={name: self.shown(arm, found, trials, len(found) + len(failures) >= len(trials)) for name, arm in self.arms.items()}, comparisons=rows,
            missing={name: whats for name, whats in lacks.items() if whats}, selection=self.selection, failures=failures,
            planned=len(trials), done=len(found)))

    def shown(self, arm, found, trials, quiet):
        """One arm for the report: sizes, costs, scores and curves of every seed, and what its first finished run looks like inside.

        quiet: nothing is training any more, so that decoding can be timed.
        """
        got = [found.get((arm.name, seed)) for seed in self.config.seeds]

        def middle(key):
            values = [r[key] for r in got if r and r.get(key) is not None]
            return statistics.median(values) if values else None

        first = next((trials[arm.name, seed] for seed, r in zip(self.config.seeds, got) if r), None)
        flags = {**{f.name: getattr(arm.model, f.name) for f in fields(GPTConfig)}, **asdict(arm.train)}
        factor = {"lr_factor": arm.lr_factor} if arm.lr_factor != 1 else {}
        return dict(kind=arm.kind, label=arm.label, flags={**arm.flags, **factor}, steps=arm.train.max_iters, params=arm.params,
                    flops_per_token=arm.flops_per_token, train_flops=float(arm.flops), seconds=middle("seconds"), tokens_per_s=middle("tokens_per_s"),
                    memory_mib=middle("memory_mib"), lr_factor=arm.lr_factor, edge=arm.edge, bpb=[r and r["bpb"] for r in got],
                    curves=[curve(trials[arm.name, seed]) if r else None for seed, r in zip(self.config.seeds, got)],
                    commands=[self.command_of(arm, flags)], folders=[str(trials[arm.name, seed]) for seed in self.config.seeds],
                    **(observed(first, quiet) if first else UNSEEN))

    def command_of(self, arm, flags):
        """The train.py line that repeats a run of this arm, for the first seed."""
        changed = {**self.maker.settings, **arm.flags, "seed": self.config.seeds[0] + arm.flags.get("seed", 0)}
        if arm.lr_factor != 1:
            changed.update({key: flags[key] * arm.lr_factor for key in ("lr", "muon_lr", "embed_lr", "min_lr")})
        name = "".join(ch if ch.isalnum() else "_" for ch in arm.name)
        return shlex.join(["python", "train.py", self.maker.base, *(f"--{key}={value}" for key, value in changed.items()), f"--out_dir=out/{name}"])


def curve(folder):
    """Validation bits per byte of one run against tokens and seconds."""
    rows = []
    for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "val_bpb" in row:
            rows.append(row)
    return dict(tokens=[r["tokens"] for r in rows], seconds=[r["elapsed_s"] for r in rows], bpb=[r["val_bpb"] for r in rows])


# ---- a look inside a trained model ----

PROMPT, SHOWN = "\n", 300  # what samples continue, and for how many tokens
UNSEEN = dict(decode_tokens_per_s=None, heads=None, sample=None)


def observed(folder, quiet=True):
    """{decode_tokens_per_s, heads, sample} of a finished run; measured once, when nothing else runs, and kept beside it."""
    path = folder / "observed.json"
    if not path.is_file():
        if not quiet or not (folder / "best.pt").is_file():  # the weights may have been left on another machine
            return UNSEEN
        found = observe(folder)
        write_atomic(path, lambda f: f.write(json.dumps(found).encode()))
    return json.loads(path.read_text(encoding="utf-8"))


@torch.no_grad()
def observe(folder):
    """Decoding speed with the cache (batch 1, the better of two), a sample, and what the heads do on 15 windows of val."""
    state, device = checkpoint.read(folder), pick_device("auto")
    model = checkpoint.build(state, folder, device)
    data, T = Dataset(state["train"]["dataset"]), model.config.block_size
    ids = torch.tensor([data.tokenizer.encode(PROMPT).tolist()], device=device)
    best, text = math.inf, ""
    for _ in range(2):
        began = time.perf_counter()
        tokens = model.generate(ids, SHOWN, temperature=0.8, generator=torch.Generator(device).manual_seed(1))
        best = min(best, time.perf_counter() - began)
        text = data.tokenizer.decode_bytes([t for t in tokens[0].tolist() if t < data.vocab_size]).decode("utf-8", "replace")
    starts = [start for start, _, _ in windows_of(data, "val", T, max_tokens=16 * T)][:-1]  # the last may have no token after it
    x = torch.stack([torch.from_numpy(data.tokens("val")[start:start + T + 1].astype(np.int64)) for start in starts]).to(device)
    return dict(decode_tokens_per_s=SHOWN / best, sample=text, heads=heads_of(model, x))


# what traces say of heads, and over which dimensions of it the mean is shown
SEEN = dict(entropy=(0, 2), concentration=(0, 2), gate=(1, 2), output_gate=(0, 2, 3), acag_gate=(0, 2, 3), router_gates=(0, 1), advantage=(0, 1),
            advantage_correlation=None, routing_load=None, dead_heads=None, effective_heads=None, token_entropy=None, batch_entropy=None)


def heads_of(model, x):
    """{name: a row for each layer} of what the heads do on the tokens x [B, T + 1]; the names are those of the traces."""
    traces, found = model(x[:, :-1], x[:, 1:], traces=True).traces, {}
    for key, value in traces.items():
        name = key.split(".", 2)[-1]
        if key.startswith("blocks.") and name in SEEN and value.numel():
            found.setdefault(name, []).append((value.float() if SEEN[name] is None else value.float().mean(SEEN[name])).tolist())
    if "a2c.explained_variance" in traces:
        found["critic's explained variance"] = float(traces["a2c.explained_variance"])
    return found


def machine_of(folder):
    """What a run trained on, from its config.json; None where that is not there."""
    with suppress(OSError, ValueError, KeyError):
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))["machine"]["device"]


# ---- command line ----

def plan_of(study):
    """What a study consists of, as text: every arm with its size, and how many runs are left."""
    arms, trials = study.arms.values(), study.trials()
    wide = max(len(arm.name) for arm in arms)
    lines = [f"{'arm':<{wide}}  {'parameters':>12}  {'steps':>8}  {'FLOPs':>9}  flags"]
    for arm in arms:
        lines.append(f"{arm.name:<{wide}}  {arm.params:>12,}  {arm.train.max_iters:>8,}  {arm.flops:>9.3g}  "
                     + " ".join(f"{k}={v}" for k, v in arm.flags.items())[:80])
    left = sum(not jobs.done(folder) for folder in trials.values())
    more = ["learning rates are tuned before, which is not counted"] if study.config.tune_lr else []
    later = study.config.matched is not None and study.config.matched < len(study.baselines)
    more += [f"then come the other baselines of the best {study.config.matched}"] if later and study.config.matched else []
    return "\n".join(lines + ["; ".join([f"{len(trials):,} runs, {left:,} of them to do, in {jobs.TRIALS}", *more])])


def run(argv):
    study_config, = configurator.load((StudyConfig,), argv, __doc__)
    files = configurator.split_args(argv, configurator.keys_of((StudyConfig,)))[0]
    study = Study(study_config, Path(files[0]).stem if files else "study")
    if study_config.dry_run:
        study.config.match = [what for what in study.config.match if what != "wall-clock"]  # which would be measured
        if study_config.matched is None or study_config.matched >= len(study.baselines):
            study.add_baselines(list(study.baselines))
        print(plan_of(study))
        return
    study.out.mkdir(parents=True, exist_ok=True)  # refused now rather than after the last run
    place = (jobs.Cluster(study_config.submit, study_config.jobs, study_config.submit_options) if study_config.submit
             else jobs.Processes(study_config.jobs, study_config.device))
    study.run(place)
    found = study.summary(shlex.join(["python", "compare.py", *argv]))
    write_atomic(study.out / "results.json", lambda f: f.write(json.dumps(found).encode()))
    print(report.table(found))
    print(*report.write(found, study.out), sep="\n")
    if found["failures"]:
        sys.exit(f"compare: {len(found['failures'])} run(s) failed, the report names them; start again to try them once more")


def main(argv=None):
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it, too, stops the runs before it ends this program
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
