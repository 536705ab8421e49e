"""DeepSpeed's side of test_universal.py: the model, its batches, ZeRO on CPUs, and the conversion to a universal checkpoint.

    torchrun --nproc-per-node 2 universal_deepspeed.py

makes universal_zero1.tar.gz and universal_zero3.tar.gz anew, of two ranks each: a universal checkpoint as ds_to_universal wrote it, and
expected.pt, what the engine held then, and the losses of its next steps. So the layout is tested where DeepSpeed is not installed."""
import os
import pathlib
import tarfile
import tempfile
import types

import torch
import torch.distributed as dist
from torch import nn

ROWS = 8
ARGUMENTS = {'lr': 1e-2, 'betas': (0.8, 0.95), 'eps': 1e-6}
DECAY = 0.1
BEFORE, AFTER = 4, 3  # steps before the checkpoint, and after


def model_of(width=37, dtype=torch.float32):
    """With a buffer, which a universal checkpoint of ZeRO-1 has a folder of."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(13, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 5))
    model.register_buffer('seen', torch.arange(3))
    return model.to(dtype)


def groups_of(model, named=False):
    """Matrices decay, and vectors do not."""
    parts = [[each for each in model.named_parameters() if (each[1].dim() > 1) is matrix] for matrix in (True, False)]
    return [{'params': part if named else [parameter for _, parameter in part], 'weight_decay': decay}
            for part, decay in zip(parts, (DECAY, 0.0))]


def loss_of(model, step, dtype=torch.float32, rank=None):
    """rank: whose batch; None for this one's."""
    rank = dist.get_rank() if rank is None else rank
    batch = torch.randn(ROWS, 13, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(batch.to(dtype)).float() - step / 10).square().mean()


# --- DeepSpeed

def engine_of(stage, model, universal=False):
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    dtype = next(model.parameters()).dtype
    # With ZeRO-3 groups that were loaded share one step count, which torch's optimizer would count up once for each.
    optimizer = (DeepSpeedCPUAdam if stage == 3 else torch.optim.AdamW)(groups_of(model), **ARGUMENTS)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
        'train_micro_batch_size_per_gpu': ROWS, 'zero_optimization': {'stage': stage}, 'zero_allow_untested_optimizer': True,
        'zero_force_ds_cpu_optimizer': False, 'bf16': {'enabled': dtype == torch.bfloat16}, 'gradient_clipping': 0.0,
        'checkpoint': {'load_universal': universal}})
    return engine


def engine_losses(engine, begin, count):
    dtype, losses = next(engine.module.parameters()).dtype, []
    for step in range(begin, begin + count):
        loss = loss_of(engine, step, dtype)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def engine_state(engine):
    """By name: what the engine holds, whole."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    if hasattr(engine.optimizer, '_hp_optimizer_states_linked'):  # DeepSpeed links the first group's alone
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {name: {'master': safe_get_full_fp32_param(parameter).clone(),
                   **{key: safe_get_full_optimizer_state(parameter, key).clone() for key in ('exp_avg', 'exp_avg_sq')}}
            for name, parameter in engine.module.named_parameters()}


def save_converted(engine, folder):
    """DeepSpeed's own checkpoint, and what ds_to_universal makes of it: FOLDER/global_stepN_universal."""
    from deepspeed.checkpoint import ds_to_universal
    engine.save_checkpoint(str(folder), client_state={'cursor': 5})
    dist.barrier()
    if dist.get_rank() == 0:
        tag = f'global_step{engine.global_steps}'
        ds_to_universal.main(types.SimpleNamespace(
            input_folder=f'{folder}/{tag}', output_folder=f'{folder}/{tag}_universal', num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True))
    dist.barrier()


# --- the fixtures

def _plain(entry):
    """An archive's entry without traces of the machine."""
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ''
    return entry


def main():
    import deepspeed
    deepspeed.init_distributed('gloo')
    here = pathlib.Path(__file__).parent
    for stage in (1, 3):
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)
            root = pathlib.Path(shared[0])
            engine = engine_of(stage, model_of(width=7))
            engine_losses(engine, 0, BEFORE)
            save_converted(engine, root)
            state = engine_state(engine)
            losses = [None] * dist.get_world_size()
            dist.all_gather_object(losses, engine_losses(engine, BEFORE, AFTER))
            if dist.get_rank() == 0:
                torch.save({'state': state, 'losses': losses, 'made by': f'deepspeed {deepspeed.__version__}, torch {torch.__version__}'},
                           root / 'expected.pt')
                with tarfile.open(here / f'universal_zero{stage}.tar.gz', 'w:gz') as archive:
                    for name in (f'global_step{BEFORE}_universal', 'latest_universal', 'expected.pt'):
                        archive.add(root / name, name, filter=_plain)
            dist.barrier()


if __name__ == '__main__':
    os.environ.setdefault('DS_ACCELERATOR', 'cpu')
    main()
