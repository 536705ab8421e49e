"""AdEMAMix as the paper has it (Pagliardini et al. 2024, algorithm 1, and section 3 for the warm-up), in plain torch. Keys of the state are
those of the authors' implementation."""
import math

import torch


class AdEMAMix(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999, 0.9999), alpha=5.0, t_alpha=None, t_beta3=None, eps=1e-8, weight_decay=1e-2):
        super().__init__(params, {'lr': lr, 'betas': betas, 'alpha': alpha, 't_alpha': t_alpha, 't_beta3': t_beta3, 'eps': eps,
                                  'weight_decay': weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p, group):
        state, g, (beta1, beta2, beta3) = self.state[p], p.grad, group['betas']
        if not state:
            state['step'] = torch.tensor(0.0)
            for key in ('exp_avg_fast', 'exp_avg_sq', 'exp_avg_slow'):
                state[key] = torch.zeros_like(p)
        state['step'] += 1
        t, alpha = state['step'].item(), group['alpha']
        if group['t_alpha']:
            alpha = min(t * alpha / group['t_alpha'], alpha)
        if group['t_beta3']:
            ln1, ln3, part = math.log(beta1), math.log(beta3), t / group['t_beta3']
            beta3 = min(math.exp(ln1 * ln3 / ((1 - part) * ln3 + part * ln1)), beta3) if part < 1 else beta3
        m1, v, m2 = state['exp_avg_fast'], state['exp_avg_sq'], state['exp_avg_slow']
        m1.mul_(beta1).add_(g, alpha=1 - beta1)
        m2.mul_(beta3).add_(g, alpha=1 - beta3)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        m1_hat, v_hat = m1 / (1 - beta1**t), v / (1 - beta2**t)
        p.sub_(group['lr'] * ((m1_hat + alpha * m2) / (v_hat.sqrt() + group['eps']) + group['weight_decay'] * p))
