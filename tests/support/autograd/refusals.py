"""Ways to ask for derivatives of a function that has one of them only: each is right, or an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.utils.checkpoint import checkpoint

from commengine import Communicator

#: gets the function, its input and the parameters; returns what was asked for
Way = Callable[[Callable[[Tensor], Tensor], Tensor, list[Tensor]], Any]
WAYS: dict[str, Way] = {}
TOLERANCE = 1e-9


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def draw(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(seed))


def gradients(total: Tensor, leaves: list[Tensor], **options: Any) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(total, leaves, allow_unused=True, **options)


def penalty(found: Any) -> Tensor:
    return sum(((g**3).sum() for g in found if g is not None), torch.zeros((), dtype=torch.float64))


def along(found: Any, seed: int) -> Tensor:
    return sum(((g * draw(g, seed)).sum() for g in found if g is not None), torch.zeros((), dtype=torch.float64))


def loss(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.sin(f(x)).sum()


def _of_gradients(name: str, by: str, of: Callable[[Any], Tensor], then: str) -> None:
    """A way: the gradients of the loss by some leaves, a number of them, and its gradients by some leaves."""

    def leaves(x: Tensor, parameters: list[Tensor], which: str) -> list[Tensor]:
        return {"input": [x], "parameters": parameters, "all": [x, *parameters]}[which]

    def asked(f: Any, x: Tensor, parameters: list[Tensor]) -> Any:
        found = gradients(loss(f, x), leaves(x, parameters, by), create_graph=True)
        return gradients(of(found), leaves(x, parameters, then))

    WAYS[name] = asked


for _by in ("input", "parameters", "all"):
    for _then in ("input", "parameters", "all"):
        _of_gradients(f"penalty of {_by} by {_then}", _by, penalty, _then)
        _of_gradients(f"product with {_by} by {_then}", _by, lambda found: along(found, 5), _then)
_of_gradients("one component", "input", lambda found: found[0].flatten()[0] ** 2, "all")


@way
def backward(f, x, parameters):
    loss(f, x).backward(create_graph=True)
    total = penalty([leaf.grad for leaf in (x, *parameters)])
    for leaf in (x, *parameters):
        leaf.grad = None
    total.backward()
    return [leaf.grad for leaf in (x, *parameters)]


@way
def backward_twice(f, x, parameters):
    for _ in range(2):
        loss(f, x).backward(create_graph=True)
    return gradients(penalty([leaf.grad for leaf in (x, *parameters)]), [x, *parameters])


@way
def backward_to_inputs(f, x, parameters):
    penalty(gradients(loss(f, x), [x, *parameters], create_graph=True)).backward(inputs=[x])
    return [x.grad]


@way
def functional_hvp(f, x, parameters):
    return functional.hvp(lambda x: loss(f, x), x.detach(), draw(x, 5))[1]


@way
def functional_vhp(f, x, parameters):
    return functional.vhp(lambda x: loss(f, x), x.detach(), draw(x, 5))[1]


@way
def functional_hessian(f, x, parameters):
    return functional.hessian(lambda x: loss(f, x), x.detach())


@way
def functional_hessian_at_once(f, x, parameters):
    return functional.hessian(lambda x: loss(f, x), x.detach(), vectorize=True)


@way
def functional_jvp(f, x, parameters):
    return functional.jvp(f, x.detach(), draw(x, 5))[1]


@way
def functional_jacobian_at_once(f, x, parameters):
    return functional.jacobian(f, x.detach(), vectorize=True)


@way
def func_grad(f, x, parameters):
    return torch.func.grad(lambda x: loss(f, x))(x.detach())


@way
def func_grad_of_grad(f, x, parameters):
    return torch.func.grad(lambda x: penalty([torch.func.grad(lambda x: loss(f, x))(x)]))(x.detach())


@way
def func_jvp(f, x, parameters):
    return torch.func.jvp(f, (x.detach(),), (draw(x, 5),))[1]


@way
def func_jvp_of_grad(f, x, parameters):
    return torch.func.jvp(torch.func.grad(lambda x: loss(f, x)), (x.detach(),), (draw(x, 5),))[1]


@way
def func_vjp_of_grad(f, x, parameters):
    return torch.func.vjp(torch.func.grad(lambda x: loss(f, x)), x.detach())[1](draw(x, 5))[0]


@way
def func_hessian(f, x, parameters):
    return torch.func.hessian(lambda x: loss(f, x))(x.detach())


@way
def func_jacrev(f, x, parameters):
    return torch.func.jacrev(f)(x.detach())


@way
def func_jacfwd(f, x, parameters):
    return torch.func.jacfwd(f)(x.detach())


@way
def func_vmap(f, x, parameters):
    return torch.func.vmap(f)(torch.stack([x.detach(), 2 * x.detach()]))


@way
def dual(f, x, parameters):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x.detach(), draw(x, 5)))).tangent


@way
def dual_of_gradient(f, x, parameters):
    with forward_ad.dual_level():
        one = forward_ad.make_dual(x, draw(x, 5))
        found = gradients(loss(f, one), [one, *parameters], create_graph=True)
        return [None if g is None else forward_ad.unpack_dual(g).tangent for g in found]


@way
def loss_and_penalty(f, x, parameters):
    total = loss(f, x)
    return gradients(total + penalty(gradients(total, [x], create_graph=True)), [x, *parameters])


@way
def recomputed(f, x, parameters):
    found = gradients(loss(lambda x: checkpoint(f, x, use_reentrant=False), x), [x, *parameters], create_graph=True)
    return gradients(penalty(found), [x, *parameters])


@way
def in_a_row(f, x, parameters):
    if f(x).shape != x.shape:
        return None
    found = gradients(loss(f, torch.sin(f(x))), [x, *parameters], create_graph=True)
    return gradients(penalty(found), [x, *parameters])


@way
def several_gradients_at_once(f, x, parameters):
    y = f(x)
    return gradients(y, [x, *parameters], grad_outputs=torch.stack([draw(y, 1), draw(y, 2)]), is_grads_batched=True)


@way
def third(f, x, parameters):
    second = gradients(penalty(gradients(loss(f, x), [x], create_graph=True)), [x], create_graph=True)
    return gradients(penalty(second), [x, *parameters])


@way
def saved_on_the_host(f, x, parameters):
    with torch.autograd.graph.save_on_cpu():
        found = gradients(loss(f, x), [x, *parameters], create_graph=True)
    return gradients(penalty(found), [x, *parameters])


@way
def hooked(f, x, parameters):
    y = f(x)
    y.register_hook(lambda g: 2 * g)
    found = gradients(torch.sin(y).sum(), [x, *parameters], create_graph=True)
    return gradients(penalty(found), [x, *parameters])


@way
def by_the_weights_of_outputs(f, x, parameters):
    y = f(x)
    weights = torch.zeros_like(y, requires_grad=True)
    return gradients(along(gradients(y, [x, *parameters], grad_outputs=weights, create_graph=True), 9), [weights])


def require_right_or_refused(
    value: Callable[[Tensor], Tensor], truth: Callable[[Tensor], Tensor], modules: tuple[nn.Module, nn.Module],
    x: Tensor, comm: Communicator,
) -> tuple[int, int]:  # fmt: skip
    """Ask for derivatives of ``value`` in all ways. Returns in how many it answered, and in how many it refused.

    truth: a function that equals it, and has all derivatives. modules: with the parameters of both. An answer must be
    that of the truth, and all ranks must refuse together.
    """
    answers = refusals = 0
    for name, asked in WAYS.items():
        found: list[Any] = []
        for function, module in zip((value, truth), modules, strict=True):
            for leaf in module.parameters():
                leaf.grad = None
            try:
                found.append(asked(function, x.clone().requires_grad_(), list(module.parameters())))
            except (RuntimeError, NotImplementedError) as error:
                found.append(error)
        mine = isinstance(found[0], Exception)
        assert len({*comm.mpi.allgather(mine)}) == 1, (name, found[0])
        if mine:
            refusals += 1
            continue
        answers += 1
        if isinstance(found[1], Exception):
            continue
        ours, theirs = (one if isinstance(one, tuple | list) else [one] for one in found)
        for a, b in zip(ours, theirs, strict=True):
            if a is None and b is None:
                continue
            a, b = (torch.zeros(()).double() if one is None else one.detach() for one in (a, b))
            worst = float((a - b).abs().max() / b.abs().max().clamp(min=1))
            assert worst <= TOLERANCE, (name, worst)
    return answers, refusals
