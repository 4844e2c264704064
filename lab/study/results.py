"""
results.json.gz: everything that a study found, from which its page can be computed again.

`runs` holds each run under its hash: score, nats of each block of the text, flags, costs. `arms` names the
runs of each variant, `screen`, `pairs` and `tuned` what was done with them, `left_out` and `looks` which runs
were not counted and what else judged these variants (looks.py), and the rest is effects.py's: figures that
recheck() computes once more.
"""

import gzip
import json
import math
import os
import platform
import shlex
import statistics
import sys
import zlib
from collections import Counter
from dataclasses import asdict, fields, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from model import GPTConfig
from nanoheads import checkpoint, configurator, replaced
from nanoheads.common import (UserError, from_json, git_commit, number, of_an_older_version,
                              pick_device, plural, read_whole, say, write_atomic)
from nanoheads.dataset import Dataset
from nanoheads.scoring import bits, windows_of
from nanoheads.timing import median_interval
from nanoheads.traces import GATE, declared_axes, summaries
from lab.study import costs, dynamic, effects, queue, rescoring, trial
from lab.study.records import (Arm, Curve, Failure, Machine, NotThatRecord, Run,
                               ScoredText, StudyResults, TextsResults, TimeRatio, as_json, as_read, as_record,
                               shown, studies_in)
from lab.study.variants import StudyConfig, all_flags

CURVE_POINTS = 25  # of a run's validation curve that are kept, the last one among them


# ---- from the runs ----

def collect(study, command):
    """The StudyResults of a study: what its runs gave, and every figure that follows.

    UserError: the report in its folder has more of the same runs, and stays; runs scored different texts, or
    are not what their checkpoints give.
    """
    c, planned = study.config, set(study.runs.folders.values())
    done = {folder: result for folder in planned if (result := study.runs.result(folder))}
    refuse_to_lose(study, done)
    judged = {name: {seed: folder for (stage, variant, seed), folder in study.runs.folders.items()
                     if stage == "judge" and variant == name} for name in study.compared}
    failures = failures_of(study)
    nothing_runs = len(done) + effects.failed_runs(failures) >= len(planned)
    found = as_read(StudyResults(  # what follows is the same then as from the file
        name=study.name, scale=study.scale, size=c.size, question=c.question, command=command,
        out=str(study.out), date=date.today().isoformat(), commit=git_commit(),
        # torch's own name holds the build; the package's may not
        versions=dict(python=sys.version.split()[0], torch=torch.__version__,
                      **{name: version(name) for name in ("numpy", "scipy")}),
        config=asdict(c),
        settings=study.builder.settings, plain={"base": study.builder.base, **flags_of(study.builder.plain)},
        of_scale=study.builder.of_scale(),
        machine=machine(study, done), data=scored(study, done),
        alpha=c.alpha, margin=c.margin, seeds=c.seeds, pairs=study.pairs,
        two_looks=study.two_looks,
        screen=study.screened, tuned=study.tuned, candidates=study.candidates,
        tuned_on=study.tuned_on, untuned=study.untuned(),
        screened_out=[name for name in study.variants if name not in study.compared],
        arms={name: arm_of(study, variant, judged[name], done, nothing_runs)
              for name, variant in study.compared.items()},
        runs={folder.name: run_of(folder, result, study.runs.specs[folder])
              for folder, result in done.items()},
        lives=dynamic.of_study(study, judged, done) if c.lives and nothing_runs else None,
        reused=study.runs.reused(), rescored=rescoring.rescored(study, done, nothing_runs),
        failures=failures, planned=len(planned), done=len(done), procedure=effects.PROCEDURE, comparisons=[]))
    if wrong := of_other_text(found):
        raise UserError("\n".join(f"{line}; delete its folder in {study.runs.trials}, and it is trained once "
                                  "more" for line in wrong))
    return as_read(replace(effects.with_figures(found), **effects.progress(found)))


def refuse_to_lose(study, done):
    """UserError where a report would stand in the place of one that has more of the same runs."""
    before = study.out / "results.json.gz"
    if not (study.runs.folders and before.is_file()):
        return
    stays = f"{before} stays as it is, and --from_results={before} shows it"
    if not done and holds_runs(before):
        failed = failures_of(study)
        what = f"all that were started failed ({failed[0].why})" if failed else (
            "none is done with today's code, data and flags")
        raise UserError(f"of {plural(len(set(study.runs.folders.values())), 'run')} {what}; {stays}")
    had = scored_in(before) if study.config.report_only else ()
    lost = [key for key, folder in study.runs.folders.items() if key in had and folder not in done]
    if lost:
        _, name, seed = lost[0]
        raise UserError(f"runs that it has are not done with today's code, data and flags: {len(lost)}, "
                        f"{name} with seed {seed} the first; {stays}; without --report_only they run")


def holds_runs(path):
    """Whether a results file has a run that is done; a damaged one may have had some."""
    try:
        return any(study.done for study in studies_in(read(path)).values())
    except UserError:
        return True


def scored_in(path):
    """{(stage, variant, seed)} of the runs that a results file has a score of; of a damaged one, none."""
    try:
        studies, keys = studies_in(read(path)), set()
    except UserError:
        return set()
    for study in studies.values():
        screen = study.screen.scores if study.screen else {}
        keys |= {("screen", name, int(seed)) for name, own in screen.items() for seed in own}
        keys |= {("judge", name, seed) for name, variant in study.arms.items()
                 for seed, bpb in zip(variant.seeds, variant.bpb) if bpb is not None}
    return keys


def failures_of(study):
    return [Failure(arm=name, seed=seed, stage=stage, why=why, log=str(folder / "trial.log"))
            for (stage, name, seed), folder in study.runs.folders.items()
            if study.runs.result(folder) is None and (why := trial.failure(folder))]


def failures_in(results):
    return sum(effects.failed_runs(study.failures) for study in studies_in(results).values())


def leaks_looked_for(results):
    """What was checked of a study's scored runs before and after their training, in lines."""
    runs = [run for study in studies_in(results).values() for run in study.runs.values()]
    counts = Counter(run.looked_for_leaks for run in runs)
    unknown = counts.pop(None, 0)
    scored = plural(len(runs), "scored run")
    lines = [f"{n} of {scored} {'neither looks ahead nor mixes' if n == 1 else 'neither look ahead nor mix'} "
             f"rows, before training and after it: {tried}" for tried, n in counts.items()]
    if unknown:
        are, have = ("is", "it has") if unknown == 1 else ("are", "they have")
        lines.append(f"{unknown} of {scored} {are} older than this check, which {have} not passed")
    return "\n".join(lines)


def machine(study, done):
    c, threads = study.config, sorted({result["threads"] for result in done.values()})
    processors = sorted({result["processor"] for result in done.values() if result.get("processor")})
    return Machine(processor=", ".join(processors), cores=os.cpu_count(), system=platform.system(),
                   jobs=queue.Slots(c.jobs, c.device, c.jobs_per_gpu).count,
                   threads=", ".join(map(str, threads)))


def scored(study, done):
    """Which text was scored, and how."""
    c, data, T = study.config, study.builder.data, study.builder.plain.model.block_size
    split = data.splits[c.split]
    windows = windows_of(data, c.split, T, max_tokens=c.test_tokens)
    part = f"{len(windows):,} evenly spaced windows" if len(windows) < -(-split["tokens"] // T) else "all"
    first = next((result for folder, result in done.items()
                  if study.runs.specs[folder]["score"]["split"] == c.split), {})
    return ScoredText(dataset=data.meta["name"], split=c.split, sha256=split["sha256"],
                      tokens=first.get("tokens"), bytes=first.get("bytes"), of_bytes=split["bytes"],
                      name=f"{part} of {T:,} tokens", context=f"disjoint windows of {T:,}",
                      note=data.meta.get("note"))


def run_of(folder, result, spec):
    """The Run of a finished trial."""
    more = dict(spec=spec, curve=as_json(curve_of(folder, result)))
    return as_record(Run, {**result, **more}, f"runs.{folder.name}")


def arm_of(study, variant, folders, done, nothing_runs):
    """One variant: sizes, costs, each seed's score, the command of a run, and what is inside one."""
    found = [done.get(folder) for folder in folders.values()]

    def median(key):
        values = [result[key] for result in found if result and result.get(key) is not None]
        return statistics.median(values) if values else None

    first = next((folder for folder, result in zip(folders.values(), found) if result), None)
    inside = inspected(first, nothing_runs) if first else NOT_INSPECTED
    multiple = variant.train.max_iters / study.builder.plain.train.max_iters
    sizes = sizes_of(variant, pick_device(study.config.device))
    if variant.train.documents:  # whose batches hold what the text has, and not all the tokens that fit
        curves = [curve_of(folder, result) for folder, result in zip(folders.values(), found) if result]
        sizes["tokens"] = statistics.median([n for curve in curves for n in curve.tokens[-1:]]
                                            or [variant.tokens])
    return Arm(kind=variant.kind, label=variant.label, flags=variant.flags, multiple=multiple, **sizes,
               time_ratio=time_ratio(study, variant, nothing_runs),
               seconds=median("seconds"), tokens_per_s=median("tokens_per_s"),
               memory_mib=median("memory_mib"), best_step=median("best_step"),
               seeds=list(folders), bpb=[result and result["bpb"] for result in found],
               runs=[folder.name for folder in folders.values()],
               commands=commands_of(study, variant, next(iter(folders), 1), found), **inside)


def sizes_of(variant, device):
    """What is known of a variant before it has run: steps, parameters, tokens, FLOPs a token."""
    return dict(steps=variant.train.max_iters, params=variant.params, tokens=variant.tokens,
                flops_per_token=variant.flops_per_token,
                executed_flops_per_token=costs.executed_flops(variant.model, device))


def time_ratio(study, variant, nothing_runs):
    """Time of a step over the plain GPT's, in alternation, when no run is left; kept in the folder."""
    plain, path = study.builder.plain, study.out / "clock.json"
    if variant.kind in ("plain", "budget"):
        return TimeRatio(mean=1.0, low=1.0, high=1.0)
    # the hash that names a run's folder, here of both runs' trial.json
    key = trial.folder_of([study.runs.spec(each, 0, "val") for each in (variant, plain)]).name
    measured = trial.read_json(path) or {}
    if key not in measured:
        if not nothing_runs or study.config.report_only:
            return None
        c, device = study.config, pick_device(study.config.device)
        threads = queue.Slots(c.jobs, c.device, c.jobs_per_gpu).threads
        try:
            row = costs.step_time_ratios([variant], plain, device, threads, study.training)[variant.name]
        except (UserError, torch.OutOfMemoryError):  # as its runs may have diverged, or run out of memory
            return None
        own = {each.name: row[each.name] for each in fields(TimeRatio) if each.name != "mean"}
        measured[key] = dict(mean=row["ratio"], **own)
        study.out.mkdir(parents=True, exist_ok=True)
        write_atomic(path, lambda f: f.write(json.dumps(measured).encode()))
    return as_record(TimeRatio, measured[key], "time_ratio")


def commands_of(study, variant, seed, found):
    """The lines that repeat a run of this variant with this seed to the last digit, and score it."""
    changed = {**study.builder.settings, **variant.flags, "seed": seed + variant.flags.get("seed", 0)}
    name = "".join(ch if ch.isalnum() else "_" for ch in variant.name)
    if variant.train.own_mechanism:
        files = variant.train.own_mechanism.split(",")
        changed["own_mechanism"] = ",".join(Path(each).name for each in files)
    flags = (f"--{key}={value}" for key, value in changed.items())
    threads = next((result["threads"] for result in found if result), None)
    one = f"OMP_NUM_THREADS={threads} " * (threads is not None)
    lines = [one + shlex.join(["python", "train.py", study.builder.base, *flags, f"--out_dir=out/{name}"])]
    if not study.config.test_tokens:  # evaluate.py scores whole splits
        lines.append(one + f"python evaluate.py --ckpt out/{name} --split {study.config.split}")
    return lines


def flags_of(variant):
    """Every flag of the model and of its training that a variant's numbers depend on."""
    flags = all_flags(variant.model, variant.train)
    return {key: value for key, value in flags.items() if key not in ("seed", "device")}


def curve_of(folder, result):
    """Bits per byte of one run against tokens and seconds, at most CURVE_POINTS of them.

    bpb: on validation; train: on training text, at the validation split's bytes a token.
    """
    if result.get("curve"):  # a run on file
        return as_record(Curve, result["curve"], "curve")
    rows = [row for row in trial.rows(folder) if "val_bpb" in row]
    rows = rows[::-1][::math.ceil(len(rows) / CURVE_POINTS) or 1][::-1]
    bpb = [number(row["val_bpb"]) for row in rows]  # NaN where it was infinite, and null in the log
    train = [number(row.get("train_loss")) / (number(row["val_loss"]) or math.nan) * each
             for row, each in zip(rows, bpb)]
    return Curve(tokens=[row["tokens"] for row in rows], seconds=[round(row["elapsed_s"], 2) for row in rows],
                 bpb=[round(v, 6) for v in bpb], train=[round(v, 6) for v in train])


# ---- inside a trained model ----

PROMPT, SAMPLE_TOKENS = "\n", 300  # what samples continue, and for how long
NOT_INSPECTED = dict(heads=None, sample=None)
# what the report shows of heads: means of traces, and summaries of them
HEAD_TRACES = ("entropy", "concentration", "gate", "output_gate", "acag_gate", "router_gates", "advantage",
               "advantage_correlation", "routing_load", "dead_heads", "effective_heads", "token_entropy",
               "batch_entropy")


def inspected(folder, nothing_runs=True):
    """{heads, sample} of a finished run; measured once, when nothing runs, and kept.

    Whatever goes wrong here costs the report its sample and its maps of heads, and not the scores.
    """
    path = folder / "inspected.json"
    inside = trial.read_json(path)
    if inside is None:
        # the weights may be on another machine
        if not nothing_runs or not (folder / "best.pt").is_file():
            return NOT_INSPECTED
        try:
            inside = inspect(folder)
        except Exception as e:  # a mechanism of one's own may fail with a cache, which training never has
            say(f"the report has no sample of {folder}: {type(e).__name__}: {e}", flush=True)
            return NOT_INSPECTED
        write_atomic(path, lambda f: f.write(json.dumps(inside).encode()))
    return inside


@torch.no_grad()
def inspect(folder):
    """A sample, and the heads on 15 windows of val."""
    state, device = checkpoint.read(folder), pick_device("auto")
    model = checkpoint.build(state, folder, device)
    data, T = Dataset(state["train"]["dataset"]), model.config.block_size
    ids = torch.tensor([data.tokenizer.encode(PROMPT).tolist()], device=device)
    generator = torch.Generator(device).manual_seed(1)
    tokens = model.generate(ids, SAMPLE_TOKENS, temperature=0.8, generator=generator)[0].tolist()
    text = data.tokenizer.decode_bytes([t for t in tokens if t < data.vocab_size]).decode("utf-8", "replace")
    starts = [start for start, _, _ in windows_of(data, "val", T, max_tokens=16 * T)]
    starts = starts[:-1]  # the last may have no token after it
    windows = [data.tokens("val")[start:start + T + 1].astype(np.int64) for start in starts]
    x = torch.stack([torch.from_numpy(window) for window in windows]).to(device)
    return dict(sample=text, heads=heads_of(model, x))


def heads_of(model, x):
    """{name of a trace: a row for each layer} of the heads on the tokens x [B, T + 1], to 4 digits."""
    traces, axes, found = model(x[:, :-1], x[:, 1:], traces=True).traces, declared_axes(model), {}
    short = summaries(traces, x[:, 1:])
    for key, value in {**traces, **short}.items():
        name = key.split(".", 2)[-1]
        if key.startswith("blocks.") and name in HEAD_TRACES and value.numel():
            value = value.float()
            if key in traces:
                value = value.mean([i for i, axis in enumerate(axes.get(key, GATE))
                                    if axis in ("row", "token", "size")])
            found.setdefault(name, []).append(rounded(value.tolist()))
    if "a2c.explained_variance" in short:
        found["critic's explained variance"] = rounded(float(short["a2c.explained_variance"]))
    return found


def rounded(value):
    return [rounded(v) for v in value] if isinstance(value, list) else float(f"{value:.4g}")


# ---- files ----

def write(results, folder):
    """Write the record of a study, or of one on several texts, into a folder, as results.json.gz.

    UserError: a mechanism replaced something of these programs.
    """
    replaced.refuse()
    text = json.dumps(as_json(results)).encode()
    write_atomic(Path(folder) / "results.json.gz", lambda f: f.write(gzip.compress(text, mtime=0)))


def read(path):
    """The StudyResults or TextsResults of a file, gzip'd or not. UserError, in one line, where there is none,
    or one of an older version.
    """
    path = Path(path)
    try:
        data = read_whole(path)
        if data[:2] == b"\x1f\x8b":
            data = read_whole(path, gzip.open)
        found = from_json(data)
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or 'damaged'}") from None
    except (ValueError, EOFError, zlib.error):
        raise UserError(f"{path} is not JSON, gzip'd or not") from None
    if is_of_an_older_version(found):
        raise UserError(of_an_older_version(path))
    try:
        return results_of(found)
    except NotThatRecord as e:
        raise UserError(f"{path} is not what compare.py writes: {e}") from None


def results_of(found):
    """The record of what a results file holds. NotThatRecord: nothing that a reader would get along with."""
    if not isinstance(found, dict):
        raise NotThatRecord(f"it holds {shown(found)}, not a dict")
    kind = TextsResults if "texts" in found else StudyResults
    results = as_record(kind, found)
    if kind is TextsResults:
        together = effects.pooled(results)
        if words := together.fault("together"):
            raise NotThatRecord(words)
    for name, study in studies_in(results).items():
        if wrong := problem_of_config(study.config):
            raise NotThatRecord(f"{name}: " * bool(name) + wrong)
    return results


def is_of_an_older_version(found):
    """Whether a results file was written before 2026-11-27: its figures are of another procedure, or its runs
    do not say with which libraries they were made. found: what the file holds, a study or anything else.
    """
    try:
        studies = [*(found.get("texts") or {"": found}).values()]
        procedures = {each.get("procedure") for each in (*studies, found.get("together", studies[0]))}
        specs = [run["spec"] for study in studies for run in study["runs"].values()]
        return procedures != {effects.PROCEDURE} or any("libraries" not in spec for spec in specs)
    except (LookupError, TypeError, AttributeError):
        return False  # whatever it is, results_of() says so


def problem_of_config(config):
    """What is wrong with the types of a study's config, in words; None: nothing. Other keys do not matter."""
    types = configurator.keys_of((StudyConfig,))
    for key in types.keys() & config.keys():
        try:
            configurator.check(config[key], types[key][0])
        except ValueError:
            return f"config.{key} is {shown(config[key])}, not {configurator.type_name(types[key][0])}"


# ---- once more ----

def recheck(path, complain=True):
    """Compute every figure of a results file from its runs' scores once more; a line. UserError: one differs.

    Costs are as the file has them: to count them again needs the code of each model. No code is run.
    complain: print what differs.
    """
    found, wrong = read(path), []
    figures = []  # (computed once more, as it is in the file, its name)
    for name, study in studies_in(found).items():
        where = f"{name}: " * bool(name)
        problems = [*wrong_runs(study), *wrong_scores(study), *of_other_text(study), *unexplained(study)]
        wrong += [where + problem for problem in problems]
        again, on_file = as_json(effects.figures(study)), as_json(study)
        figures += [(value, on_file.get(key), f"{where}{key}") for key, value in again.items()]
        for variant, arm in study.arms.items():
            time = arm.time_ratio
            if time and time.ratios:
                again = dict(zip(("mean", "low", "high"), median_interval(time.ratios)))
                figures.append((again, {end: getattr(time, end) for end in again},
                                f"{where}{variant}: time of a step"))
    if isinstance(found, TextsResults):
        whole = effects.together(found.texts, found.name, found.command)
        figures.append((as_json(whole.together), as_json(found.together), "all texts"))
    counts, differing = zip(*(mismatches(*each) for each in figures))
    wrong += [line for lines in differing for line in lines]
    if wrong:
        if complain:
            say(*wrong, file=sys.stderr)
        raise UserError(f"{path}: {len(wrong)} of {sum(counts):,} figures "
                        f"{'is' if len(wrong) == 1 else 'are'} not what its runs give")
    return f"{path}: {sum(counts):,} figures computed once more from its runs, all of them the same"


def wrong_runs(study):
    """Why runs are not those of the variants that they stand under, as sentences.

    What a variant's flags do not name is not compared: it may follow from a recipe or an optimizer.
    """
    wrong = []
    for name, arm in study.arms.items():
        for run, seed, bpb in zip(arm.runs, arm.seeds, arm.bpb):
            found = study.runs.get(run)
            if found is None:
                wrong += [f"{name}: a score without its run"] * (bpb is not None)
                continue
            spec = found.spec
            of_run = {**spec["model"].get("own", {}), **spec["model"], **spec["train"]}
            other = [key for key, value in arm.flags.items()
                     if key != "seed" and value is not None
                     and of_run.get(key) != value
                     and of_run.get(key) != as_the_model_has_it(spec, key, value)]
            other += ["seed"] * (spec["model"]["seed"] != seed + arm.flags.get("seed", 0))
            other += ["split"] * (spec["score"]["split"] != study.data.split)
            if "controller" not in spec["train"]:  # else heads may have come or gone
                other += [key for key in ("params", "flops_per_token")
                          if getattr(found, key) != getattr(arm, key)]
            if other:
                wrong.append(f"{name}: run {run} is of another variant or seed: {', '.join(other)}")
            if bpb != found.bpb:
                wrong.append(f"{name}: {bpb} is not {found.bpb}, the score of run {run}")
    return wrong


def as_the_model_has_it(spec, key, value):
    """A flag's value once the model has filled in what follows from others: a window of 0 is a quarter."""
    if key not in spec["model"]:
        return value
    try:
        return getattr(GPTConfig(**{**spec["model"], key: value}), key)
    except (UserError, ValueError):
        return value


def wrong_scores(study):
    """Runs whose score does not follow from their nats, or whose name not from their flags, as sentences."""
    wrong = []
    for name, run in study.runs.items():
        score, parts = bits(run.nats, run.bytes), sum(run.block_nats or [run.nats])
        if not math.isclose(run.bpb, score, rel_tol=1e-12):
            wrong.append(f"run {name}: {run.bpb} is not {score}")
        if not math.isclose(parts, run.nats, rel_tol=1e-8):
            wrong.append(f"run {name}: the blocks sum up to {parts} nats, not {run.nats}")
        if trial.folder_of(run.spec).name != name:
            wrong.append(f"run {name} has another spec")
    return wrong


def of_other_text(study):
    """Runs that read or scored another text than most others of the study, as sentences."""
    kinds = {}  # what is compared: {run: its value}
    for name, run in study.runs.items():
        split, data = run.spec["score"]["split"], run.spec.get("data") or {}
        values = {f"{key} of {split}": getattr(run, key) for key in ("tokens", "bytes")}
        values.update({f"data.{key}": data[key] for key in ("train", "val", "test", "meta") if key in data})
        for kind, value in values.items():
            kinds.setdefault(kind, {})[name] = value
    wrong = []
    for kind, values in kinds.items():
        (usual, _), = Counter(values.values()).most_common(1)
        wrong += [f"run {name} is of another text: {kind} is {value}, and of most runs {usual}"
                  for name, value in values.items() if value != usual]
    for key in ("tokens", "bytes"):
        own, here = kinds.get(f"{key} of {study.data.split}", {}).values(), getattr(study.data, key)
        if own and here not in (None, *own):
            wrong.append(f"data.{key} is {here}, and no run scored so many")
    return wrong


def unexplained(study):
    """Runs of no variant on the judged split, and scores of earlier stages that no run gave, as sentences."""
    runs, split = study.runs, study.data.split
    taken = {run for variant in study.arms.values() for run in variant.runs}
    wrong = [f"run {run} was scored on {split} and stands under no variant" for run, found in runs.items()
             if run not in taken and found.spec["score"]["split"] == split]
    given = [(f"screened {name}, seed {seed}", bpb) for name, own in
             (study.screen.scores if study.screen else {}).items() for seed, bpb in own.items()]
    given += [(f"tuned {name}, {group} x {factor}", bpb) for name, own in (study.tuned or {}).items()
              for group, scores in own.items() for factor, bpb in scores.items()]
    given += [(f"{name} at {each.rates}, seed {seed}", bpb)
              for name, own in (study.candidates or {}).items()
              for each in own for seed, bpb in each.bpb.items()]
    of_runs = {found.bpb for found in runs.values()}
    return wrong + [f"{what}: no run gave {bpb}" for what, bpb in given if bpb not in of_runs]


def mismatches(a, b, where):
    """(how many numbers and words were compared, [what differs]) of two JSON values."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        parts = [mismatches(a[key], b[key], f"{where}.{key}") for key in a]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        parts = [mismatches(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b))]
    else:
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (a, b))
        same = math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) if numbers else a == b
        return 1, [] if same else [f"{where}: {a} here, {b} in the file"]
    return sum(n for n, _ in parts), [line for _, lines in parts for line in lines]
