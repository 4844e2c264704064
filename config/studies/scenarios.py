# The five scenarios of the Adaptive Transformer write-up, on one corpus, five seeds each; what becomes of the
# heads of runs is what plot_curves.py --heads shows
# Tiny scale: runs of half a minute to two minutes on a core; compare.py plan counts them

import runpy as _runpy
from pathlib import Path as _Path


def _flags(name):
    path = _Path(__file__).parent.parent / "scenarios" / f"{name}.py"
    return {key: value for key, value in _runpy.run_path(str(path)).items() if not key.startswith("_")}


question = "Does a GPT whose heads have states and roles beat a plain one?"

variants = {name: _flags(name) for name in ("default", "specialised", "mixed", "constrained")}
# states that a small map predicts from the metrics, trained with the model
variants["learned states"] = dict(agency=True, agency_learned=True, controller_log=True,
                                  controller_interval=60)
# what the roles do without states, the states without roles; and consent that is withheld, and disregarded
variants["roles alone"] = dict(roles=["local", "long", "previous", "free"])
variants["no consent, disregarded"] = dict(agency=True, agency_enforce=False, policy=True, policy_dwell=1000,
                                           policy_no_consent=["0.0", "1.3"], controller_interval=60)
match_parameters = False
