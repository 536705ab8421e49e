"""PyTorch optimizers whose state lives on Ballast's state servers, or in one inside this process."""

from ballast.torch.activations.stash import stash
from ballast.torch.export import export_state, import_state
from ballast.torch.optimizers import SGD, Adagrad, Adam, AdamW, AdamW8bit, Lion
from ballast.torch.scaler import LossScaler

__all__ = ['SGD', 'Adagrad', 'Adam', 'AdamW', 'AdamW8bit', 'Lion', 'LossScaler', 'export_state', 'import_state', 'stash']
