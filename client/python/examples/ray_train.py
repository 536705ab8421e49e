"""Ray Train: a worker that fails is started again with all others, and training goes on with the step that comes next.

Usage: ray_train.py [STEPS] [shard]. With shard, parameters live on the state servers; else DistributedDataParallel has them."""
import os
import sys

import torch
import torch.distributed as dist
from language_model import make_dataset, make_model
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

import ballast.torch


def train(config):
    model = ballast.torch.shard(make_model()) if config['shard'] else prepare_model(make_model())
    optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-3, max_norm=1.0, directory=config['state'], dram='256MiB',
                                    nvme='1GiB', resume='auto')
    start, _ = optimizer.resume()
    rows = make_dataset()[dist.get_rank()::dist.get_world_size()]
    for step in range(start, config['steps']):
        batch = [rows[(8 * step + i) % len(rows)] for i in range(8)]
        loss = model(**{key: torch.stack([row[key] for row in batch]) for key in batch[0]}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f'step {step + 1}: loss {loss.item():.6f}', flush=True)
    dist.barrier()  # the first rank's close() ends the server that the others use
    optimizer.close()


config = {'steps': int(sys.argv[1]) if len(sys.argv) > 1 else 60, 'shard': 'shard' in sys.argv[2:], 'state': os.path.abspath('ray_state')}
TorchTrainer(train, train_loop_config=config, torch_config=TorchConfig(backend='gloo'), scaling_config=ScalingConfig(num_workers=2),
             run_config=RunConfig(storage_path=os.path.abspath('ray_results'), failure_config=FailureConfig(max_failures=2))).fit()
