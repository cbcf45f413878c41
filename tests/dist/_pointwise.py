"""Shared by tests: INTEGER, NO_DERIVATIVE, TWO_ARGUMENTS, forms, one_and_two_operands."""

import torch
import torch.nn.functional as F

from scidata.shard.ops import pointwise

TWO_ARGUMENTS = {
    "threshold": (0.1, 2.0),
    "clamp_min": (0.3,),
    "clamp_max": (0.3,),
    "clamp": (-0.2, 0.3),
    "clip": (0.1,),
    "polygamma": (1,),
    "mvlgamma": (1,),
    "multigammaln": (1,),
}


INTEGER = {"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"}
INTEGER |= {
    "__rlshift__",
    "__rrshift__",
    "__and__",
    "__or__",
    "__xor__",
    "__invert__",
    "__rand__",
    "__ror__",
    "__rxor__",
    "__lshift__",
    "__rshift__",
}
INTEGER |= {"gcd", "lcm"}


NO_DERIVATIVE = {"floor_divide", "__floordiv__", "__rfloordiv__", "heaviside", "nextafter", "airy_ai", "zeta"}
NO_DERIVATIVE |= {"igamma", "igammac", "gammainc", "gammaincc"}  # but with respect to one operand
NO_DERIVATIVE |= {
    name for name in f"{pointwise._UNARY} {pointwise._BINARY}".split() if "bessel" in name or "polynomial" in name
}


def forms(name):
    """Every callable form of a name: functions and methods."""
    for space in (torch.Tensor,) if name.startswith("__") else (torch, torch.Tensor, F, torch.special):
        function = getattr(space, name, None)
        if callable(function):
            yield function


def one_and_two_operands():
    """Yield (name, function, number of tensors, integer?) for the whole table of unary and binary names."""
    for name in pointwise._UNARY.split():
        for function in forms(name):
            extra = TWO_ARGUMENTS.get(name, ())
            if name == "polygamma" and function is not torch.Tensor.polygamma:
                yield name, lambda x, f=function: f(1, x), 1
            else:
                yield name, lambda x, f=function, e=extra: f(x, *e), 1
    for name in pointwise._BINARY.split():
        for function in forms(name):
            yield name, function, 2
