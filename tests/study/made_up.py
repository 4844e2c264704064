"""Makes studies whose scores are made up, for the tests of this folder."""

from study.records import PLAIN, Failure, Pair, Result, Run, Study, Variant

LEAKS = "31 positions in 4 rows"


def study_of(scores, measure="bits/byte", flags={}, **more):
    """The finished Study of {variant: its scores over seeds 1, 2, ..., or {text: those}}; None: a run failed.

    flags: {variant: its flags}. Each run has a curve that ends at its score, 20 steps long.
    """
    runs, results, failures = [], {}, {}
    for name, by_text in scores.items():
        for text, own in (by_text if isinstance(by_text, dict) else {"prose": by_text}).items():
            for seed, score in enumerate(own, 1):
                model = dict(seed=seed, n_layer=1, n_embd=8)
                train = dict(name=name, text=text, adamw_lr=0.01)
                run = Run("judge", name, text, seed, dict(model=model, train=train))
                runs.append(run)
                if score is None:
                    failures[run.name] = Failure("loss is not a finite number")
                    continue
                before = [0.1, score] if measure == "right answers" else [score + 1, score + 0.2]
                curve = dict(steps=[0, 10, 20], scores=[*before, score])
                results[run.name] = Result(float(score), 100.0, 1000, curve=curve, seconds=3.0, leaks=LEAKS)
    texts = tuple(dict.fromkeys(run.text for run in runs))
    groups = [(text,) for text in texts] if measure == "right answers" else [texts]
    variants = tuple(Variant(name, "plain" if name == PLAIN else "variant", flags.get(name, {}), 1000, 2e6,
                             3e9, (1.0, 0.99, 1.01), 20, 1400.0) for name in scores)
    pairs = tuple(Pair(name, PLAIN, group) for name in scores if name != PLAIN for group in groups)
    return Study(**{**dict(name="mine", measure=measure, variants=variants, pairs=pairs, texts=texts,
                           runs=tuple(runs), results=results, failures=failures), **more})
