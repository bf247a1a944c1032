"""The two functions of the Laplace whose gradients are by hand, so that less is kept and computed: taps and loss."""

import torch

LOSS_CHUNK = 1024  # tokens whose logits exist at a time


class _Convolve(torch.autograd.Function):
    """Keeps x in its own dtype, where autograd would keep a float32 copy for each tap."""

    @staticmethod
    def forward(ctx, x, w, same):
        ctx.save_for_backward(x, w, same)
        y = x[:, len(w) - 1 :].float() * w[-1]
        for j, mask in _taps(w, same):
            y.addcmul_(_masked(x[:, j : j + y.shape[1]], mask), w[j])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, same = ctx.saved_tensors
        T = dy.shape[1]
        dx, dw = torch.zeros_like(x, dtype=torch.float32), torch.empty_like(w)
        for j, mask in ((len(w) - 1, None), *_taps(w, same)):
            d = _masked(dy, mask)
            dx[:, j : j + T].addcmul_(d, w[j])
            dw[j] = (d * x[:, j : j + T]).sum((0, 1))
        return dx.to(x.dtype), dw, None


def _taps(w, same):
    """(j, the mask of its tokens) of all taps but the last, which meets the token itself."""
    return [(j, None if same is None else same[..., len(w) - 2 - j, None]) for j in range(len(w) - 1)]


def _masked(x, mask):
    return x.float() if mask is None else x.float() * mask


def convolve(x, w, same=None):
    """A depthwise convolution, y_t = sum_j w_j x_{t + j}: x [B, W - 1 + T, E], w [W, E] float32 -> float32 [B, T, E].

    same: bool [B, T, W - 1], whether the token r = 1 ... W - 1 before the last one counts; None: all do.
    """
    return _Convolve.apply(x, w, same)


class _CrossEntropy(torch.autograd.Function):
    """Finds the gradients with the loss, a chunk of tokens after the other: no logit is kept or computed again."""

    @staticmethod
    def forward(ctx, h, weight, targets):
        total = torch.zeros((), device=h.device)
        grads = any(ctx.needs_input_grad)
        dh = torch.empty_like(h) if grads else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if grads else None
        for at in range(0, len(h), LOSS_CHUNK):
            x, t = h[at : at + LOSS_CHUNK], targets[at : at + LOSS_CHUNK, None]
            counts, t = t >= 0, t.clamp_min(0)
            z = (x @ weight.T).float()  # [chunk, vocabulary]
            lse = z.logsumexp(-1, keepdim=True)
            total += torch.where(counts, lse - z.gather(1, t), 0).sum()
            if grads:
                p = z.sub_(lse).exp_().scatter_add_(1, t, z.new_full(t.shape, -1)).mul_(counts).to(h.dtype)
                dh[at : at + LOSS_CHUNK] = p @ weight
                dw += p.T @ x
        if grads:
            ctx.save_for_backward(dh, dw.to(weight.dtype))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        dh, dw = ctx.saved_tensors
        return dh * d.to(dh.dtype), dw * d.to(dw.dtype), None


def cross_entropy(h, weight, targets):
    """The sum in nats, over targets [M] of at least 0, of hidden states h [M, D] unembedded by weight [V, D]."""
    return _CrossEntropy.apply(h, weight, targets)
