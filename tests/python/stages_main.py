"""One rank of test_stages.py: stages_main.py CASE[,CASE...] FOLDER, as placed_main.py. Two stages of two ranks each."""
import torch
import torch.distributed as dist
from placed_main import ARGUMENTS, WIDTH, alone_as_it_is, batch, main, mesh_of, ours, pipeline, stack, told
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import ballast.torch as bt
from ballast import Error


class Ends(nn.Module):
    """A model of tokens whose head is its embedding. of: the modules that this stage has."""

    def __init__(self, blocks, begins, ends):
        super().__init__()
        self.blocks, self.begins, self.ends = blocks, begins, ends
        if begins or ends:
            self.embed = nn.Embedding(16, WIDTH)
            nn.init.normal_(self.embed.weight, std=0.3, generator=torch.Generator().manual_seed(4))

    def forward(self, x):
        x = self.embed(x) if self.begins else x
        for block in self.blocks.values():
            x = block(x)
        return self.embed(x, True) if self.ends and not self.begins else x @ self.embed.weight.T if self.ends else x


class Tied(nn.Embedding):
    """An embedding, or with `head` the projection to its rows."""

    def forward(self, x, head=False):
        return x @ self.weight.T if head else super().forward(x)


def tokens_of(i, part, parts):
    return torch.randint(16, (8, 6), generator=torch.Generator().manual_seed(500 + i)).chunk(parts)[part]


def tied_model(stage, stages):
    whole = stack(4)
    mine = range(stage * 4 // stages, (stage + 1) * 4 // stages)
    model = Ends(nn.ModuleDict({str(i): whole[i] for i in mine}), stage == 0, stage == stages - 1)
    if hasattr(model, 'embed'):
        tied = Tied(16, WIDTH)
        tied.load_state_dict(model.embed.state_dict())
        model.embed = tied
    return model


def tied_loss(out, tokens):
    return nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten())


def tied_stages():
    """Losses of stages that share one tensor, by the optimizer alone and with shard(), of the model in one piece; and what they are told
    who do not say so, or say it of another name."""
    alone_model = tied_model(0, 1)
    optimizer = torch.optim.AdamW(alone_model.parameters(), **ARGUMENTS)
    expected = []
    for i in range(10):
        optimizer.zero_grad()
        tokens = tokens_of(i, 0, 1)
        loss = tied_loss(alone_model(tokens), tokens)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    mesh = mesh_of(2, 2, names=('pp', 'dp'))
    stage, part = mesh.get_local_rank('pp'), mesh.get_local_rank('dp')

    def trained(name, take, tied):
        model = tied_model(stage, 2)
        for block in [*model.blocks.values(), model.embed]:
            fully_shard(block, mesh=mesh['dp'], reshard_after_forward=False)
        model = take(fully_shard(model, mesh=mesh['dp'], reshard_after_forward=False))
        optimizer = ours(model, name, tied=tied)
        piped = PipelineStage(model, stage, 2, torch.device('cpu'), group=mesh.get_group('pp'))
        schedule = ScheduleGPipe(piped, n_microbatches=2, loss_fn=lambda out, target: tied_loss(out, target) / 2, scale_grads=False)
        try:
            optimizer.resume()
            losses = []
            for i in range(10):
                tokens, came = tokens_of(i, part, 2), []
                optimizer.zero_grad()
                schedule.step(*([] if stage else [tokens]), **({'target': tokens, 'losses': came} if stage else {}))
                optimizer.step()
                loss = torch.tensor(float(sum(each.item() for each in came)))
                dist.all_reduce(loss)
                losses.append(loss.item() / 2)
            return losses
        except Error as error:
            return str(error)
        finally:
            dist.barrier()
            optimizer.close()
    groups = {'embed.weight': mesh['pp']}
    return (expected, [trained('tied', alone_as_it_is, groups), trained('tied_sharded', bt.shard, groups)],
            [trained('untied', alone_as_it_is, None), trained('untied_sharded', bt.shard, None)],
            trained('misnamed', alone_as_it_is, {'embed': mesh['pp']}), trained('half', alone_as_it_is, groups if stage else None),
            trained('not_a_group', bt.shard, {'embed.weight': mesh['dp']}))


def unopened_stage():
    """What a stage's first pass is told before the job is open."""
    model, _ = pipeline(ScheduleGPipe, bt.shard)
    optimizer = ours(model, 'unopened_stage')
    said = told(lambda: model(batch(0, 0)))
    optimizer.close()
    return said,


if __name__ == '__main__':
    main({function.__name__: function for function in (unopened_stage, tied_stages)})
