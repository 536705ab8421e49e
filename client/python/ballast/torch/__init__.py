"""PyTorch optimizers whose state lives on Ballast's state servers, or in one inside this process."""

from ballast.torch.activations.stash import stash
from ballast.torch.export import export_state, import_state
from ballast.torch.optimizers import SGD, Adagrad, Adam, AdamW, AdamW8bit, Lion
from ballast.torch.scaler import LossScaler
from ballast.torch.sharding.gathered import gathered
from ballast.torch.sharding.shard import shard
from ballast.torch.tiled import TiledLinear

__all__ = ['SGD', 'Adagrad', 'Adam', 'AdamW', 'AdamW8bit', 'Lion', 'LossScaler', 'TiledLinear', 'export_state', 'gathered',
           'import_state', 'shard', 'stash']
