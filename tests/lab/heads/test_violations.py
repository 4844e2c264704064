"""Violations: which heads act without consent, or do not act although they consent."""

import math

import pytest
import torch

from helpers import tiny
from lab.heads.states import find_violations
from oracle import tokens


def test_a_head_without_consent_is_blocked_or_forced_by_whether_it_runs():
    flags = dict(agency=True, sentinel="sigmoid")
    model = tiny(flags, live=False)
    assert find_violations(model) == []
    for head in (1, 2, 3):
        model.set_state(0, head, state="withdrawn", step=7 + head)
    model.transformer.h[0].attn.agency.utilisation[1] = 0.25  # as the controller writes it
    model.set_gate(0, 2, 0.5)
    model.set_gate(0, 3, 0.0)  # not in use, so nothing is violated
    model.set_gate(1, 5, 0.5)  # consents
    gate = 1 / (1 + math.exp(-3.0))
    assert find_violations(model) == [
        dict(layer=0, head=1, type="blocked", gate=pytest.approx(gate), state="withdrawn", utilisation=0.25,
             last_signal=8),
        dict(layer=0, head=2, type="blocked", gate=pytest.approx(gate / 2), state="withdrawn",
             utilisation=0.0, last_signal=9)]
    traces = model(tokens(1, 4), traces=True).traces
    assert traces["blocks.0.agency_utilisation"].tolist() == [0, 0.25, 0, 0, 0, 0]
    assert traces["blocks.0.agency_last_signal"].tolist() == [0, 8, 9, 10, 0, 0]
    free = tiny(flags, live=False, agency_enforce=False)
    free.set_state(1, 4, consent=False)
    assert find_violations(free) == [
        dict(layer=1, head=4, type="forced", gate=pytest.approx(gate), state="active", utilisation=0.0,
             last_signal=0)]
    # 0.007 is below the threshold of 0.05
    torch.nn.init.constant_(free.transformer.h[1].attn.sentinel.logit, -5.0)
    assert find_violations(free) == []
