"""A study in so many minutes: first fewer seeds, then fewer steps, until what is planned fits."""

from dataclasses import replace

from nanoheads.common import UserError, plural

LEAST_SEEDS = 3    # fewer give no interval worth reading
LEAST_SHARE = 0.1  # of the steps: a model that has hardly begun to learn says nothing of one that has


def fitted(config, seconds, steps):
    """(a StudyConfig whose runs fit into config.minutes, a line that says what was left out).

    seconds(config): how long everything that it plans takes on this machine. steps: those of its plain GPT.
    Raises UserError where not even LEAST_SEEDS and LEAST_SHARE of the steps fit.
    """
    limit, minutes, seeds = 60 * config.minutes, plural(config.minutes, "minute", "g"), len(config.seeds)
    if (whole := seconds(config)) <= limit:
        return config, (f"{minutes}: all of it fits, {plural(seeds, 'seed')}, {plural(steps, 'step')} a run; "
                        f"{about(whole)}")
    extras = {"the screening": config.screen, "the search for rates": config.tune_lr,
              "other budgets": config.budgets}
    without = [word for word, on in extras.items() if on]
    left_out = f"; without {', '.join(without)}" if without else ""
    plain = replace(config, mechanism=None, screen=False, tune_lr=False, budgets=[])
    for n in range(seeds, min(seeds, LEAST_SEEDS) - 1, -1):
        fewer = replace(plain, seeds=config.seeds[:n])
        if (whole := seconds(fewer)) <= limit:
            return fewer, (f"{minutes}: {plural(n, 'seed')} of {seeds}, {plural(steps, 'step')} a run"
                           f"{left_out}; {about(whole)}")
    # steps by 5 %, so that the same command trains the same on another day; scoring takes as long as before
    for twentieths in range(19, round(20 * LEAST_SHARE) - 1, -1):
        share = twentieths / 20
        shorter = at_share(fewer, share, steps)
        if (whole := seconds(shorter)) <= limit:
            return shorter, (f"{minutes}: {plural(n, 'seed')} of {seeds}, {round(steps * share):,} of "
                             f"{plural(steps, 'step')} a run{left_out}; {about(whole)}")
    raise UserError(f"minutes={config.minutes:g} are too few: {plural(n, 'seed')} at "
                    f"{LEAST_SHARE:.0%} of the steps {'takes' if n == 1 else 'take'} {about(whole)}")


def at_share(config, share, steps):
    """The StudyConfig with so much of the steps of its plain GPT, and of variants that set their own."""
    own = {name: {**flags, "max_iters": round(flags["max_iters"] * share)} if "max_iters" in flags else flags
           for name, flags in config.variants.items()}
    config = replace(config, variants=own)
    if config.tokens_per_param:
        return replace(config, tokens_per_param=config.tokens_per_param * share)
    return replace(config, settings={**config.settings, "max_iters": round(steps * share)})


def about(seconds):
    return f"about {seconds / 60:,.1f} minutes"
