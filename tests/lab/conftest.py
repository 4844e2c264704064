"""What tests of the lab share: a stand-in for nanoGPT."""

import pytest

NANOGPT = '''
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)
    def forward(self, x, y=None):
        logits, y = self.table(x), x if y is None else y
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    def generate(self, idx, n):
        return idx.repeat(1, n + 1)
'''


@pytest.fixture
def checkout(tmp_path):
    """The folder of a stand-in for a nanoGPT checkout."""
    folder = tmp_path / "nanoGPT"
    folder.mkdir()
    (folder / "model.py").write_text(NANOGPT)
    return str(folder)
