"""Every op of the layer: importing this module fills `ops.OPS`, in the order of a call."""
# ruff: noqa: I001, F401

from . import publish
from . import route_table
from . import decide
from . import dispatch
from . import swiglu
from . import swiglu_backward
from . import combine
from . import sum_k
from . import wgrad
from . import permute
from .ops import OPS
