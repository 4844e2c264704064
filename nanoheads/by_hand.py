"""What a caller can set of a model's heads by hand: a gate, a state, consent (--set gate.0.3=0)."""

import torch

LARGEST_GATE = torch.finfo(torch.float32).max


class HeadControl:
    """The methods of a GPT that find a head, by its block and original number, and set it by hand."""

    def find_head(self, layer, head):
        """(the attention of a block, the index there of the head with this original number).

        Raises ValueError for a block or a head that there is not.
        """
        if not 0 <= layer < self.config.n_layer:
            raise ValueError(f"there is no block {layer}; they go from 0 to {self.config.n_layer - 1}")
        attn = self.transformer.h[layer].attn
        heads = attn.all_head_ids()
        if head not in heads:
            raise ValueError(f"block {layer} has no head {head}; it has {', '.join(map(str, heads))}")
        return attn, heads.index(head)

    def set_gate(self, layer, head, gate):
        """Set one more factor on a head's output, beside the gates of mechanisms: 1 is none, 0 closes it.

        Raises ValueError for a head that there is not, or a number that is not finite.
        """
        attn, i = self.find_head(layer, head)
        if not abs(gate) <= LARGEST_GATE:
            raise ValueError(f"the gate must be a number of at most {LARGEST_GATE:g} either way")
        if attn.gate_by_hand is None:
            attn.gate_by_hand = torch.ones(attn.n_total, device=self.transformer.wte.weight.device)
        attn.gate_by_hand[i] = gate

    def set_state(self, layer, head, state=None, consent=None, step=0):
        """Move a head of a model with agency to a state, or set its consent.

        Raises ValueError for a head or a state that there is not.
        """
        attn, i = self.find_head(layer, head)
        agency = getattr(attn, "agency", None)  # with no Agency in model.py no head has states
        if agency is None:
            raise ValueError("the model has no head states: it was trained with agency off")
        agency.set(i, state, consent, step)
