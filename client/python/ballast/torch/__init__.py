"""PyTorch optimizers whose state lives on Ballast's state servers, or in one inside this process."""

from ballast.torch.activations.stash import stash
from ballast.torch.export import export_state, import_state
from ballast.torch.optimizers import SGD, Adagrad, Adam, AdamW, AdamW8bit, Lion
from ballast.torch.options import Arguments
from ballast.torch.scaler import LossScaler
from ballast.torch.sharding.gathered import gathered
from ballast.torch.sharding.shard import shard
from ballast.torch.tiled import TiledLinear
from ballast.torch.universal.loading import load_universal
from ballast.torch.universal.saving import save_universal

__all__ = ['SGD', 'Adagrad', 'Adam', 'AdamW', 'AdamW8bit', 'Arguments', 'Lion', 'LossScaler', 'TiledLinear', 'export_state',
           'gathered', 'import_state', 'load_universal', 'save_universal', 'shard', 'stash']
