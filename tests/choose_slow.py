"""
Which tests `make test` leaves to `make test-all`: writes tests/slow.txt from measured times.

    TEST_TIMES=times.json OMP_NUM_THREADS=1 python -m pytest -n 0     # every test, one after the other
    python tests/choose_slow.py times.json
    TEST_TIMES=fast.json OMP_NUM_THREADS=1 python -m pytest -n 0 -m "not slow"
    python tests/choose_slow.py times.json fast.json

A test counts with all its parameters. What a change usually breaks stays (KEEP), then the cheapest as long as
all of them fit into SECONDS of CPU time; the rest is slow. The first test that needs a fixture of its module
pays for it, and where that test is slow, the next one pays. That is why there is a second measurement: a test
counts with the most that it took in either.
"""
import json
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

SECONDS = 62  # the start of pytest and of two workers, 44 CPU seconds, comes on top
KEEP = (
    "test_mechanisms.py::test_*formula*",        # each mechanism's oracle, forward and gradient
    "test_model.py::test_forward_and_gradient_equal_the_oracle",
    # alone and all together; in pairs they are left to `make test-all`
    "test_promises.py::test_off_is_*", "test_promises.py::test_neutral_*",
    "test_promises.py::test_future_tokens_do_not_leak", "test_promises.py::test_the_leak_test_*",
    "test_promises.py::test_*cache*", "test_promises.py::test_rows_*",
    "test_promises.py::test_a_refusal_*", "test_promises.py::test_every_parameter_has_a_gradient",
    "test_promises.py::test_a_saved_model_is_the_same_model",
    "test_train.py::test_20_steps_*", "test_train.py::test_*resum*",
    "test_configurator.py::*wrong*", "test_configurator.py::test_every_*",
    "test_compare.py::test_a_study_is_run_again_*",  # a study of a few steps, twice
    "test_docs.py::*", "test_layout.py::*",
)


def main(*paths):
    measured = {}
    for path in paths:
        for test, value in json.loads(Path(path).read_text()).items():
            measured[test] = max(value, measured.get(test, 0.0))
    seconds = Counter()
    for test, value in measured.items():
        seconds[test.split("[")[0].split("/")[-1]] += value
    kept = {test for test in seconds if any(fnmatch(test, pattern) for pattern in KEEP)}
    total, slow = sum(seconds[test] for test in kept), []
    for test, value in sorted(seconds.items(), key=lambda item: item[1]):
        if test in kept:
            continue
        if total + value > SECONDS:
            slow.append(test)
        else:
            total += value
    Path(__file__).with_name("slow.txt").write_text("".join(f"{test}\n" for test in sorted(slow)))
    print(f"{len(slow)} of {len(seconds)} tests are slow; the others take {total:.0f} CPU seconds of "
          f"{sum(seconds.values()):.0f}, what is kept {sum(seconds[test] for test in kept):.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
