"""Rules of who may change which heads during training, read from a JSON file."""

import json
from pathlib import Path

from model import Agency
from nanoheads.common import UserError


class Rules:
    """Rules of who may change heads: the first that fits decides, and where none does, it is allowed.

    A JSON list of {"who": policy | config, "layers": [..], "heads": [..], "states": [..],
    "allow": true | false}; a key that is left out fits all.
    """

    KEYS = {"who": str, "layers": list, "heads": list, "states": list, "allow": bool}

    def __init__(self, rules=()):
        self.rules = list(rules)

    @classmethod
    def read(cls, path):
        """UserError: not such a file."""
        try:
            rules = json.loads(Path(path).read_bytes())
        except OSError as e:
            raise UserError(f"policy_rules: cannot read {path}: {e.strerror}") from None
        except ValueError as e:
            raise UserError(f"policy_rules: {path} is not JSON: {e}") from None
        rules = rules if isinstance(rules, list) else [rules]
        for rule in rules:
            if not isinstance(rule, dict) or "allow" not in rule or \
                    any(not isinstance(value, cls.KEYS.get(key, ())) for key, value in rule.items()):
                raise UserError(f"policy_rules: {path}: {json.dumps(rule)} is no rule; one is "
                                '{"who": "policy", "layers": [0], "states": ["withdrawn"], "allow": false}')
            for state in rule.get("states", ()):
                if state not in Agency.STATES:
                    raise UserError(f"policy_rules: {path}: state {state!r} must be one of "
                                    f"{', '.join(Agency.STATES)}")
            if rule.get("who", "policy") not in ("policy", "config"):
                raise UserError(f"policy_rules: {path}: who {rule['who']!r} must be policy or config")
        return cls(rules)

    def allow(self, who, layer, head, state):
        for rule in self.rules:
            if rule.get("who", who) == who and layer in rule.get("layers", [layer]) \
                    and head in rule.get("heads", [head]) and state in rule.get("states", [state]):
                return rule["allow"]
        return True
