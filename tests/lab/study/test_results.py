"""What lies in results/: every figure is what the runs give, and nothing that a file names is run."""

import gzip
import json
import shutil

import numpy as np
import pytest

from compare import main
from helpers import ROOT, forget_own_mechanisms
from lab_helpers import study_of
from nanoheads import own_mechanism
from nanoheads.common import UserError
from lab.study import effects, records, results
from lab.study.effects import BOTH

FILES = sorted(path for path in (ROOT / "results").rglob("*.json.gz") if path.parent.name != "tasks")


def write_file(path, found):
    path.write_bytes(gzip.compress(json.dumps(records.as_json(found)).encode()))


# ---- the files of this repository ----

@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.split(".")[0])
def test_every_figure_on_file_is_what_its_runs_give(path):
    assert " figures computed once more from its runs, all of them the same" in results.recheck(path)


@pytest.mark.parametrize("name", ["demo", "recipes-nano", "all-tiny"])
def test_a_file_that_is_read_is_written_with_the_same_keys_and_values(name):
    path = ROOT / "results" / f"{name}.json.gz"
    found = json.loads(gzip.decompress(path.read_bytes()))
    for study in (found.get("texts") or {"": found}).values():
        for arm in study["arms"].values():
            arm.pop("decode_tokens_per_s", None)  # which no reader has known for long
    assert records.as_json(results.read(path)) == found


def identical(study, c):
    """Whether both sides of a comparison have the same scores wherever they have the same seeds."""
    one, other = (study["arms"][c[side]] for side in ("variant", "baseline"))
    known = dict(zip(other["seeds"], other["bpb"]))
    return all(known.get(seed) == bpb for seed, bpb in zip(one["seeds"], one["bpb"]))


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.split(".")[0])
def test_a_difference_is_that_of_the_means_of_its_runs(path):
    """The slow way: the nats of each run's blocks, summed, in float64."""
    found = results.read(path)
    studies = [*records.studies_in(found).values()]
    studies += [effects.pooled(found)] if isinstance(found, records.TextsResults) else []
    for study in studies:
        bpb = {name: sum(run["block_nats"]) / np.log(2) / run["bytes"]
               for each in (study.texts or {"": study}).values() for name, run in each["runs"].items()}
        for c in study["comparisons"]:
            sides = [np.mean([bpb[part] for run in study["arms"][c[side]]["runs"] for part in run.split(BOTH)
                              if part in bpb]) for side in ("variant", "baseline")]
            if identical(study, c):  # a variant that changes nothing is no other GPT, with which seeds ever
                assert c["mean"] == 0
                continue
            assert c["mean"] == pytest.approx(sides[0] - sides[1], abs=1e-6), c["variant"]


# ---- mechanisms in files of one's own ----

@pytest.fixture
def challenge(plain, here, mine, tmp_path):  # noqa: F811
    """The folder that a challenge with a mechanism in a file of one's own has left."""
    path = mine()
    own_mechanism.add(path)
    folder = tmp_path / "out" / "challenge-forget-tiny"
    study = study_of(plain, seeds=[5, 6], mechanisms=["forget"], out_dir=str(folder), match_parameters=False)
    study.run(here)
    results.write(results.collect(study, "python compare.py --mechanism=mine.py"), folder)
    shutil.copy(path, folder)
    return folder


@pytest.mark.slow
def test_a_recheck_needs_no_code_of_ones_own(challenge, monkeypatch):
    path = challenge / "results.json.gz"
    forget_own_mechanisms()
    monkeypatch.setattr(own_mechanism, "add", None)
    assert results.recheck(path).endswith("all of them the same")


@pytest.mark.slow
def test_nothing_that_a_results_file_names_is_run(challenge, tmp_path):
    """Neither what lies beside it, nor what its runs name by an absolute path."""
    marker, evil = tmp_path / "marker", tmp_path / "evil.py"
    path = challenge / "results.json.gz"
    (challenge / "mine.py").write_text(f"open({str(marker)!r}, 'w')")
    evil.write_text(f"open({str(marker)!r}, 'w')")
    found = results.read(path)
    for run in found["runs"].values():
        if "mechanism" in run["spec"]["data"]:
            run["spec"]["train"]["own_mechanism"] = str(evil)
            run["spec"]["data"]["mechanism"] = own_mechanism.opened(evil).sha256
    write_file(path, found)
    forget_own_mechanisms()
    with pytest.raises(UserError):  # its runs have other hashes now
        results.recheck(path)
    main([f"--from_results={path}", f"--out_dir={tmp_path / 'again'}"])
    assert (tmp_path / "again" / "report.html").is_file() and not marker.exists()
