"""PyTorch optimizers that keep their state outside the trainer: on Ballast's state servers, or on a server inside this process.

AdamW, AdamW8bit, Adam, SGD, Adagrad and Muon take the arguments of torch.optim, Lion, AdEMAMix and AdamWScheduleFree those of their
papers, and all take Ballast's own (see help(ballast.torch.AdamW)).
shard() also moves a model's parameters to the servers, and gathered() gives them back. stash() moves activations out of device memory.
Reader reads a job's parameters in another process, while its trainer goes on. split_experts() and reached_experts() let shard() move only
those of a mixture of experts that tokens reach.
"""

from ballast.torch import requirements  # noqa: F401  # isort: skip  # before anything that an older torch lacks
from ballast.torch.activations.stash import stash
from ballast.torch.export import export_state, import_state
from ballast.torch.muon import muon_groups
from ballast.torch.optimizers import SGD, Adagrad, Adam, AdamW, AdamW8bit, AdamWScheduleFree, AdEMAMix, Lion, Muon
from ballast.torch.options import Arguments
from ballast.torch.reader import Reader
from ballast.torch.scaler import LossScaler
from ballast.torch.sharding.experts import split_experts
from ballast.torch.sharding.gathered import gathered
from ballast.torch.sharding.routing import reached_experts
from ballast.torch.sharding.saving import save_weights
from ballast.torch.sharding.shard import shard
from ballast.torch.tiled import TiledLinear
from ballast.torch.universal.loading import load_universal
from ballast.torch.universal.saving import save_universal
from ballast.torch.weights.checkpoint import Weights

__all__ = ['SGD', 'AdEMAMix', 'Adagrad', 'Adam', 'AdamW', 'AdamW8bit', 'AdamWScheduleFree', 'Arguments', 'Lion', 'LossScaler', 'Muon',
           'Reader', 'TiledLinear', 'Weights', 'export_state', 'gathered', 'import_state', 'load_universal', 'muon_groups',
           'reached_experts', 'save_universal', 'save_weights', 'shard', 'split_experts', 'stash']
