"""Schedule-free AdamW as the paper has it (Defazio et al. 2024, algorithm 1), in plain torch: z, x, and parameters y between them."""
import torch

ARGUMENTS = {'lr': 0.01, 'weight_decay': 0.1, 'warmup_steps': 6, 'r': 0.5}


class AdamWScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr=0.0025, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, warmup_steps=0, r=0.0, weight_lr_power=2.0):
        super().__init__(params, {'lr': lr, 'betas': betas, 'eps': eps, 'weight_decay': weight_decay, 'warmup_steps': warmup_steps, 'r': r,
                                  'weight_lr_power': weight_lr_power, 'k': 0, 'weights': 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group['k'] += 1
            t, (beta1, beta2) = group['k'], group['betas']
            lr = group['lr'] * min(1.0, t / max(group['warmup_steps'], 1))
            weight = t**group['r'] * lr**group['weight_lr_power']
            group['weights'] += weight
            for y in group['params']:
                state = self.state[y]
                if not state:
                    state.update(z=y.clone(), x=y.clone(), v=torch.zeros_like(y))
                z, x, v = state['z'], state['x'], state['v']
                v.mul_(beta2).addcmul_(y.grad, y.grad, value=1 - beta2)
                z -= lr * (y.grad / ((v / (1 - beta2**t)).sqrt() + group['eps']) + group['weight_decay'] * y)
                x.lerp_(z, weight / group['weights'])
                y.copy_((1 - beta1) * z + beta1 * x)

    def average(self, y):
        return self.state[y]['x']
