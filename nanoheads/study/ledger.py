"""
The ledger: every comparison of every study in results/ as rows, for docs/ledger.html and the terminal.

    python compare.py --ledger                # every figure computed once more, then the page
    python compare.py --ledger add FOLDER     # before that a challenge's folder, rechecked, into results/

A row is what the report of its study says: judged on the test split, judged on validation, or screened there
without a verdict; and one for each plain GPT. It is of today's code where every run of its two sides is.
"""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

from model import MECHANISM_CLASSES, MECHANISMS, GPTConfig
from nanoheads.common import ROOT, UserError, json_safe, write_atomic
from nanoheads.hub import own_mechanism as own
from nanoheads.study import analysis, fingerprint, ledger_page, results, trial
from nanoheads.study.analysis import BOTH
from nanoheads.study.findings import (against_plain, at_cost, equal_of, interval, known, label_of, listed,
                                      mean_of, notices, others, p_of, sentence_of, short, show, verdict_of,
                                      worth_of)
from nanoheads.study.tables import in_markdown
from nanoheads.training.config import TrainConfig

RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "ledger.html"
SUMS = "SHA256SUMS"
STAGES = ("judged on test", "judged on validation", "screened on validation", "plain GPT")
# files whose runs were timed while other work ran on the machine: their times are not shown
TIMES_DISTURBED = {"all-tiny.json.gz"}
NOW, OLDER, UNKNOWN = ledger_page.CODE_STATES


# ---- the command ----

def folder_to_add(argv):
    """(argv without `add FOLDER` behind --ledger, FOLDER or None). UserError: no folder is named."""
    at = argv.index("--ledger") + 1 if "--ledger" in argv else len(argv)
    if argv[at:at + 1] != ["add"]:
        return argv, None
    if len(argv) < at + 2:
        raise UserError("--ledger add: name a challenge's folder, such as out/challenge-NAME-tiny")
    return [*argv[:at], *argv[at + 2:]], argv[at + 1]


def write():
    """Write the page; the lines for the terminal: a row for each mechanism as Markdown, then what was done.

    UserError: a figure of a file is not what its runs give.
    """
    rows = rows_of(RESULTS)
    write_atomic(PAGE, lambda f: f.write(ledger_page.html(rows).encode()))
    older = sum(row["code"] != NOW for row in rows)
    files = len({row["file"] for row in rows})
    return [short_table(rows), f"{PAGE}: {len(rows)} rows of {files} files, {older} of them of older code"]


def short_table(rows):
    """The most telling row of each mechanism, as Markdown.

    Judged before screened, today's code before older, then the largest model, all texts before one, then the
    most seeds: not the best score, which among several would be luck in part.
    """
    best = {}
    for row in rows:
        of_mechanism = row["name"] in MECHANISMS and row["equal"].startswith("hyperparameters")
        if of_mechanism and row["against"] == "plain GPT":
            rank = (STAGES.index(row["stage"]), row["code"] != NOW, -row["blocks"], BOTH not in row["text"],
                    -row["seeds"])
            if row["name"] not in best or rank < best[row["name"]][0]:
                best[row["name"]] = rank, row
    chosen = [best[name][1] for name in MECHANISMS if name in best]
    head = ("mechanism", "size", "text", "difference", "worth × compute", "seeds", "stage", "verdict", "code")
    keys = ("label", "size", "text", "difference", "worth", "seeds", "stage", "verdict", "code")
    return in_markdown(head, [[row[key] for key in keys] for row in chosen], (0, 2, 6, 7, 8))


# ---- a challenge's folder ----

def add(folder):
    """Recheck a challenge's folder and copy its results into results/; a line. UserError: it is refused."""
    folder = Path(folder)
    sums = checked_sums(folder)
    source = folder / "results.json.gz"
    line, found = results.recheck(source), results.read(source)
    name = folder.resolve().name
    target = RESULTS / f"{name}.json.gz"
    if not re.fullmatch(r"\w[\w+.-]*", name) or name.split(".")[0] != name:
        raise UserError(f"{folder}: a file in results/ gets its name: letters, digits, _, + and - only")
    if target.exists():
        same = target.read_bytes() == source.read_bytes()
        raise UserError(f"{target} is there already, "
                        + ("the same" if same else "another study's: give the folder another name"))
    for file, wanted in own_files(found):
        if file not in sums:
            raise UserError(f"{folder / SUMS} does not list {file}, the mechanism of its runs")
        mine = own.opened(folder / file)
        if mine.digest != wanted:
            raise UserError(f"{folder / file} is another text than its runs were made with (sha256 "
                            f"{wanted}...)")
        if missing := [each.place.as_posix() for each in mine.others if each.place.as_posix() not in sums]:
            raise UserError(f"{folder / SUMS} does not list {missing[0]}, which {file} imports")
        own.copy(mine, RESULTS / name)
    write_atomic(target, lambda f: f.write(source.read_bytes()))
    return (f"{line}\nadded as {target}; nothing was trained again, which its own command with --fresh does")


def checked_sums(folder):
    """{file: digest} of a folder's SHA256SUMS, each file as listed, the results among them. UserError."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{folder} has no {SUMS}: it is no folder that a challenge wrote") from None
    sums = {}
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{64})  ([^\\]+)", line)
        if not match or Path(match[2]).is_absolute() or ".." in Path(match[2]).parts:
            raise UserError(f"{folder / SUMS}: {line[:80]!r} is no digest and name")
        sums[match[2]] = match[1]
    if "results.json.gz" not in sums:
        raise UserError(f"{folder / SUMS} does not list results.json.gz")
    for name, digest in sums.items():
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing, and {SUMS} lists it")
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise UserError(f"{folder / name} is not the file that {SUMS} lists: its SHA-256 differs")
    return sums


def own_files(found):
    """[(name, digest)] of the files of one's own mechanisms that a results file's runs were made with."""
    return sorted({(each["file"], each["digest"]) for study in trial.studies_in(found).values()
                   for run in study["runs"].values() for each in results.own_records(run["spec"])})


# ---- rows ----

def rows_of(folder):
    """The rows of every results file of a folder, the largest first. UserError: a figure does not follow."""
    claims = claims_of((ROOT / "docs" / "claims.md").read_text(encoding="utf-8"))
    digests, rows = {}, []
    for path in sorted(Path(folder).glob("*.json.gz")):
        found = results.read(path)
        for size, study in trial.studies_in(found).items():
            file = File(path, size, computed(study, path), claims, digests)
            rows += file.rows()
        if "texts" in found:
            both = computed(analysis.pooled(found), path)
            rows += File(path, "", both, claims, digests).judged_rows()
    most = Counter(row["file"] for row in rows)
    return sorted(rows, key=lambda row: (STAGES.index(row["stage"]), -most[row["file"]], row["file"],
                                         row["blocks"]))


def computed(study, path):
    """A study with its figures as its runs give them today. UserError: the file has others."""
    fresh = json.loads(json.dumps(json_safe(analysis.figures(study))))
    wrong = [line for key, value in fresh.items()
             for line in results.differences(value, study.get(key), key)[1]]
    for variant in study["arms"].values() if not study.get("texts") else ():  # those of each text are checked
        for run, bpb in zip(variant["runs"], variant["bpb"]):
            wrong += results.wrong_score(study["runs"].get(run), bpb)
    if wrong:
        raise UserError(f"{path}: {len(wrong)} figures are not what its runs give; --recheck={path} names "
                        "them")
    return {**study, **fresh}


class File:
    """One study of a results file, for its rows; size: of a ladder's study."""

    def __init__(self, path, size, study, claims, digests):
        self.path, self.size, self.study, self.claims = path, size, study, claims
        self.digests = digests  # flags of a run, as text: today's digest of its code
        self.blocks = 12 * study["plain"]["n_layer"] * study["plain"]["n_embd"] ** 2
        # of a study over several texts, the runs of them all
        self.trials = study["runs"] or {name: run for each in study.get("texts", {}).values()
                                        for name, run in each["runs"].items()}
        self.by_score = {} if not study.get("screen") else {
            (run["bpb"], run["spec"]["model"]["seed"], run["spec"]["score"]["split"]): name
            for name, run in study["runs"].items()}

    def rows(self):
        screened = map(self.screened, self.study.get("screened") or ())
        return [*self.judged_rows(), *screened, self.plain()]

    def judged_rows(self):
        return [self.judged(c) for c in [*against_plain(self.study), *others(self.study)]]

    def judged(self, c):
        """The row of a comparison: what the report's table says of it."""
        study, variant = self.study, self.study["arms"][c["variant"]]
        split = "test" if study["data"]["split"] == "test" else "validation"
        facts = [("In words", sentence_of(study, c)),
                 ("Worth", (c.get("worth") or {}).get("words")),
                 ("Plain GPT's steps to its score", worth_of(c, study["arms"]["plain"]["steps"], ",.0f")),
                 ("Bits/byte", f"{show(mean_of(variant), '.4f')}, the other side "
                               f"{show(mean_of(study['arms'][c['baseline']]), '.4f')}"),
                 ("Corrected p", f"{p_of(c)}, of {len(study['comparisons'])} comparisons"),
                 ("Interval over text", over_text(c)),
                 ("At equal FLOPs", at_cost(c, "equal_flops", interval)),
                 ("At equal time", None if self.path.name in TIMES_DISTURBED
                  else at_cost(c, "equal_time", interval))]
        return self.row(c["variant"], f"judged on {split}", difference=interval(c),
                        mean=c["mean"], worth=worth_of(c), value=(c.get("worth") or {}).get("mean"),
                        verdict=verdict_of(study, c), against=label_of(study, c["baseline"]),
                        equal=equal_of(study, c), facts=facts, runs=self.runs(c["variant"]),
                        others=self.runs(c["baseline"]))

    def screened(self, row):
        """The row of a variant in the first stage: no verdict."""
        scores = self.study["screen"]["scores"]
        chosen = "yes, see its other row" if row["chosen"] else "no"
        facts = [("Bits/byte", show(row["bpb"], ".4f")), ("Judged on test", chosen)]
        runs, plain = (self.runs_by_score(scores[name]) for name in (row["variant"], "plain"))
        return self.row(row["variant"], "screened on validation", difference=interval(row),
                        mean=row["mean"], verdict="screened", facts=facts, runs=runs, others=plain)

    def plain(self):
        """The row of the plain GPT itself."""
        study = self.study
        budgets = [f"{show(mean_of(each), '.4f')} at {each['multiple']:g} ×"
                   for each in study["arms"].values() if each["kind"] == "budget"]
        rates = (study.get("plain_rates") or {}).get("flags")
        facts = [("Bits/byte", show(mean_of(study["arms"]["plain"]), ".4f")),
                 ("At other budgets", listed(budgets)),
                 ("Rates found", rates and listed([f"{flag}={value:g}" for flag, value in rates.items()])),
                 ("Notes", " ".join(notices(study)))]
        return self.row("plain", "plain GPT", verdict="baseline", facts=facts,
                        runs=self.runs("plain"), equal="–", against="–")

    def row(self, name, stage, verdict, runs, facts, others=(), difference="–", mean=None, worth="–",
            value=None, against="plain GPT", equal="hyperparameters"):
        """One row as a dict of text, and of numbers to sort by; runs, others: those of its two sides."""
        study, variant, plain = self.study, self.study["arms"].get(name, {}), self.study["arms"]["plain"]
        base, flags = name.removesuffix(", tuned"), variant.get("flags", self.flags_of(runs))
        flops = analysis.flops_ratio(variant, plain)
        flops = flops if known(flops) else None
        time, stem = variant.get("time_ratio") or {}, self.path.name.split(".")[0]
        time = {} if self.path.name in TIMES_DISTURBED else time
        named = [*filter(None, (stem, self.size)), name, stage.split()[0]]
        named += [against] if against not in ("plain GPT", "–") else []
        return dict(
            id=".".join(re.sub(r"[^\w+-]+", "-", part) for part in named), name=base,
            label=label_of(study, name), is_named=self.is_named(base), stage=stage, verdict=verdict,
            against=against, equal=equal, blocks=self.blocks, size=f"{self.blocks / 1e6:.2f} M",
            text=study["data"]["dataset"], recipe=self.recipe(),
            difference=difference, mean=mean, worth=worth, value=value, flops=show(flops, ".2f"),
            flops_value=flops, time=interval(time, ".2f") if time else "–", time_value=time.get("mean"),
            seeds=len(runs), date=study.get("date") or "", code=self.code_of([*runs, *others]),
            file=self.path.name, flags=" ".join(f"{key}={value}" for key, value in flags.items()),
            facts=[(what, text) for what, text in (*facts, *self.facts(variant, runs))
                   if text and text != "–"],
            runs=[(seed, show(bpb, ".4f"), run) for seed, bpb, run in runs],
            claims=naming(self.claims, base, study["name"]),
            kinds=kinds_of(flags),
            commands=variant.get("commands") or [])

    def is_named(self, name):
        """Whether a variant is a mechanism by its name; one in a file of one's own is in the study's list."""
        named = set(self.study.get("config", {}).get("mechanisms", ()))
        return name in MECHANISMS or name in named - {"all_on"}  # whose flags are shown

    def recipe(self):
        """The recipe of both sides, its optimizer where it is not the recipe's own, the plain GPT's steps."""
        plain = self.study["plain"]
        usual = TrainConfig().for_recipe(plain["recipe"]).optimizer
        others = [plain["optimizer"]] if plain.get("optimizer", usual) != usual else []
        return ", ".join([plain["recipe"], *others, f"{show(self.study['arms']['plain']['steps'])} steps"])

    def facts(self, variant, runs):
        """[(heading, text)] of any row: sizes, and where and with which code it was measured."""
        study, plain = self.study, self.study["arms"]["plain"]
        steps, tokens = (variant.get(key, plain[key]) for key in ("steps", "tokens"))
        patched = ", with a patch" * bool(study.get("patch"))
        return [("Parameters", short(variant.get("params", self.of_runs(runs, "params")))),
                ("Trained for", f"{show(steps)} steps, {short(tokens)} tokens"),
                ("Plain GPT", f"{study['plain']['base']}, {self.blocks:,} parameters in its blocks"),
                ("Machine", f"{study['machine']['processor']}, torch {study['versions']['torch']}"),
                ("Commit", f"{study.get('commit') or 'unknown'}{patched}"), ("Study", study["command"])]

    # ---- of its runs ----

    def runs(self, name):
        """[(seed, bits/byte, name of the run)] of a variant's finished runs."""
        variant = self.study["arms"][name]
        return [each for each in zip(variant["seeds"], variant["bpb"], variant["runs"]) if known(each[1])]

    def runs_by_score(self, scores):
        """The same of a first stage, whose {seed: bits/byte} name no runs."""
        split = self.study["screen"]["split"]
        return [(int(seed), bpb, self.by_score.get((bpb, int(seed), split), ""))
                for seed, bpb in scores.items()]

    def of_runs(self, runs, key):
        """What the first of some runs holds under a key; None: nothing."""
        return next((self.trials[run].get(key) for *_, run in runs if run in self.trials), None)

    def flags_of(self, runs):
        """What differs from the plain GPT in runs whose variant the file does not describe."""
        spec = self.of_runs(runs, "spec") or dict(model={}, train={})
        return {key: value for key, value in {**spec["model"], **spec["train"]}.items()
                if key not in ("seed", "device") and self.study["plain"].get(key) != value}

    def code_of(self, runs):
        """NOW where the code of all these runs is today's, else OLDER; UNKNOWN: it cannot be had."""
        names = [name for *_, run in runs for name in run.split(BOTH)]
        specs = [self.trials[name]["spec"] for name in names if name in self.trials]
        states = {NOW if spec.get("code") == self.digest(spec) else
                  OLDER if "mechanism" not in spec.get("data", {}) or self.digest(spec) else UNKNOWN
                  for spec in specs} or {UNKNOWN}
        return next(state for state in (OLDER, UNKNOWN, NOW) if state in states)

    def digest(self, spec):
        """Today's digest of the code that a run of this trial.json executes; None: unknown flags."""
        flags = json.dumps([{**spec["model"], "seed": 0}, spec["train"]], sort_keys=True)
        if flags not in self.digests:
            try:
                model, training = GPTConfig(**spec["model"]), TrainConfig(**spec["train"])
                self.digests[flags] = fingerprint.code_digest(model, training)
            except (TypeError, UserError):  # a flag that is gone, or a mechanism that is not here
                self.digests[flags] = None
        return self.digests[flags]


def kinds_of(flags):
    """The flags that turn a variant's mechanisms on; those in files of one's own, last, need not be here."""
    ours = [cls.flag for cls in MECHANISM_CLASSES if flags.get(cls.flag) not in (None, False)]
    known = {*GPTConfig.defaults(), *TrainConfig.__dataclass_fields__}
    others = own.turned_on({name: value for name, value in flags.items() if name not in known})
    return ours + [name for name in others
                   if not any(name != each and name.startswith(each) for each in others)]


def over_text(c):
    """The interval over the text, of these trained models; None: blocks unknown."""
    low, high = (show((c.get("text") or {}).get(end), "+.4f") for end in ("low", "high"))
    return None if low == "–" else f"[{low}, {high}]"


# ---- claims ----

def anchor(heading):
    """What GitHub calls a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def claims_of(text):
    """[(id, anchor of its section, claim, verdict, names, studies)] of a row of the claims' page.

    A row without an id goes on with the one above; so does a command that is "the same" or "as C1".
    """
    found, commands = [], {}
    for part in re.split(r"^##+ ", text, flags=re.M)[1:]:
        heading, *lines = part.splitlines()
        number = claim = ""
        for line in lines:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) < 5 or "verdict" in cells or not re.fullmatch(r"(\w\d+)?|`\w+`", cells[0]):
                continue
            number, claim = cells[0].strip("`") or number, cells[1] or claim
            other = re.match(r"as (\w\d+)|the same", cells[-1])
            before = commands.get(other[1] or "last", "") if other else ""
            commands[number] = commands["last"] = command = before + cells[-1]
            names = {word for code in re.findall(r"`([^`]*)`", line) for word in re.findall(r"\w+", code)}
            names.add(cells[2].split(",")[0].lower())  # A, judged
            studies = set(re.findall(r"config/studies/(\w+)\.py", command))
            found.append((number, anchor(heading), plain_text(claim), plain_text(cells[-2]), names, studies))
    return found


def plain_text(markdown):
    """Without emphasis, code marks, escapes and the addresses of links."""
    return re.sub(r"[*`\\]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown))


def naming(claims, name, study):
    """[(id, anchor, claim, verdict)] of the claims whose row names a mechanism or has its study's command.

    In its own section a mechanism goes by the second part of its name: `temperature` for a2c_temperature.
    """
    first, _, second = name.partition("_")
    found = []
    for *claim, names, studies in claims:
        named = name in MECHANISMS and (name in names or first in claim[1] and second in names)
        if named or study in studies:
            found.append(tuple(claim))
    return found
